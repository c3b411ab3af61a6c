"""Copying a state into an image in memory, on the CPU and beside CUDA, with digests on the way."""
