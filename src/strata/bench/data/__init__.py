"""Data measured: building and reading token indices, mixtures and packing, resuming."""
