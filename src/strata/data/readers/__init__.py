"""Readers of dataset files, one module per family of formats. Each gives random access by row through a small
index per file; `strata.data.reader` puts files together."""
