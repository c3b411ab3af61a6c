"""Checkpoints measured: whole and sharded, on CPU and CUDA, to disk and S3, beside other savers."""
