"""The elastic harness: torchrun training that survives crashes, joins and leaves."""
