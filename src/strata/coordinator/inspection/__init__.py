"""Reading files on behalf of the API, on threads that can be left behind."""
