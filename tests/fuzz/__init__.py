"""Fuzzing of everything that reads bytes of others: `python -m tests.fuzz TARGET --cases N --seed S`.

A case is a function of its target, seed and number, so that any failure is repeated by naming the three. Cases run in a
process of their own, with a limit on memory and one on time for each; what kills that process, stops it, or is not the error
that the target promises, is a failure and is reported with its case. What was found once is kept in `corpus/` and tried again
each time.
"""
