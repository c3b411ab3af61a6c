"""Numbers in sentences, and names as ids."""

from __future__ import annotations

import re


def counted(n: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def as_identifier(name: str, *, otherwise: str = "data") -> str:
    """An id that is close to a name and is fine everywhere: in addresses, file names and commands."""
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", name).lstrip("-.:") or otherwise
