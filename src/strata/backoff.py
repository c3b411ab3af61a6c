"""Pauses between attempts: doubled each time up to a longest one, and cut by chance, so that many do not come back in step.

Says how long to wait and whether another attempt is due; the caller waits, on a thread, in an event loop or for an event.
Needs nothing but Python.
"""

from __future__ import annotations

import random
import time

from strata.core.pauses import pause_after_s


class Backoff:
    """The pauses of one undertaking. `retries` and `budget_s` bound it; whichever is spent first ends it."""

    def __init__(
        self,
        *,
        first_s: float,
        longest_s: float,
        retries: int | None = None,
        budget_s: float | None = None,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._retries_left = retries
        self._deadline_s = None if budget_s is None else time.monotonic() + budget_s
        self._failures = 1
        """In a row, with the one that the next pause follows."""

    def pause_s(self) -> float | None:
        """How long to wait before the next attempt; None if there is to be none."""
        growing_s = pause_after_s(self._failures, first_s=self._first_s, longest_s=self._longest_s)
        pause_s = growing_s * random.uniform(0.5, 1.0)
        if self._retries_left is not None and self._retries_left <= 0:
            return None
        if self._deadline_s is not None and time.monotonic() + pause_s > self._deadline_s:
            return None
        if self._retries_left is not None:
            self._retries_left -= 1
        self._failures += 1
        return pause_s

    def worked(self) -> None:
        """The last attempt went well for a while: the next is due at once, and then the first pause."""
        self._failures = 0
