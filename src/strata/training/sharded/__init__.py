"""A job whose state is spread over its ranks."""
