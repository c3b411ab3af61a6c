"""How often, and for how long, a request is tried again."""

from __future__ import annotations

import logging
import random
import time

log = logging.getLogger("strata.stores")

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class RetryBudget:
    """A number of retries and a span of time; whichever is spent first ends it."""

    def __init__(self, *, max_retries: int, budget_s: float) -> None:
        self._retries_left = max_retries
        self._deadline_s = time.monotonic() + budget_s
        self._delay_s = _FIRST_DELAY_S

    def wait(self, doing: str, failure: Exception) -> bool:
        """Pause before another try; False, at once, if there is to be none."""
        pause_s = self._delay_s * random.uniform(0.5, 1.0)  # Many workers must not come back in step.
        if self._retries_left <= 0 or time.monotonic() + pause_s > self._deadline_s:
            return False
        self._retries_left -= 1
        self._delay_s = min(self._delay_s * 2, _LONGEST_DELAY_S)
        log.warning("%s failed (%s), trying again in %.1f s", doing, type(failure).__name__, pause_s)
        time.sleep(pause_s)
        return True
