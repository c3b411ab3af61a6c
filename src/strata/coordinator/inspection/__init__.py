"""Reading files on behalf of the API, in processes of their own."""
