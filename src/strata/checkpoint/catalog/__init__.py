"""What exists: manifests, the run they belong to, their lineage, publishing and retention."""
