"""One byte image: how it is laid out, read safely, and loaded in place."""
