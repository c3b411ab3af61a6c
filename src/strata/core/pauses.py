"""How long to wait between attempts that fail. Pure, and without chance: `strata.backoff` adds that."""

from __future__ import annotations

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 8.0
"""Of whoever asks a destination again that does not answer."""


def pause_after_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many failures in a row: none after none, then the first, doubled each time up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) if failures > 0 else 0.0
