"""Reading in place: files on disk or in object storage by range, what is cached of them, and how a sample is reached."""
