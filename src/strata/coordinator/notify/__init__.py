"""Telling people: which channels there are (`settings`), how each is spoken to (`channels`), and when (`notifier`).

What is worth telling is decided by `strata.core.faults.notifications`. Nothing here ever holds up the engine: each channel has a
bounded queue and a thread of its own.
"""
