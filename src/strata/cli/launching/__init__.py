"""Commands that start, stop and check training."""
