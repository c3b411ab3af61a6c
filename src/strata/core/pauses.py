"""How long to wait: between attempts that fail, and after more than a rate allows.

Pure: time arrives as `now_s`, and chance is added by `strata.backoff`.
"""

from __future__ import annotations

import math

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 8.0
"""Of a caller that asks a destination again that does not answer."""


def pause_after_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """The pause after so many failures in a row: none after none, then the first, doubled each time up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) if failures > 0 else 0.0


class Pace:
    """A rate that is kept: a caller that is ahead of it waits. What was left unused counts for a burst of so many seconds' worth, and for
    what comes in one piece after a silence that is as long as it is worth."""

    __slots__ = ("_burst_s", "_due_s")

    def __init__(self, burst_s: float = 0.0) -> None:
        self._burst_s = burst_s
        self._due_s = -math.inf

    def take(self, worth_s: float, now_s: float) -> float:
        """How long to wait after what takes `worth_s` at the steady rate."""
        # For every call and command of a coordinator: `max` would take as long as all the rest.
        least_s = now_s - (worth_s if worth_s > self._burst_s else self._burst_s)
        due_s = self._due_s = (self._due_s if self._due_s > least_s else least_s) + worth_s
        return due_s - now_s if due_s > now_s else 0.0

    def is_unused(self, now_s: float) -> bool:
        """Whether a new one would say the same."""
        return self._due_s <= now_s - self._burst_s
