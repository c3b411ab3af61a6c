"""Benchmarks: each figure beside its target and its peers, in one run. `strata bench <what>` runs them."""
