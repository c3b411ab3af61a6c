"""Datasets made of datasets: mixed in proportions, packed into sequences, filtered and split."""
