"""Numbers in sentences."""

from __future__ import annotations


def counted(n: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
