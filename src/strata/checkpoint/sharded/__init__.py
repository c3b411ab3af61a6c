"""Sharded state through PyTorch's distributed checkpoints; `strata.checkpoint.dcp` is the public face."""
