"""SIGTERM and Ctrl-C mean: save what you have, and leave. Within a deadline, whatever happens; a second Ctrl-C means now.

The deadline is the job's, unless it is known when the machine goes (`strata.agent.leaving`)."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from strata.agent.leaving import read_deadline
from strata.core.faults.failures import EXIT_AGAIN

log = logging.getLogger("strata.training")


class Preemption:
    """Notes the signal; the training loop looks at `requested` at its next step.

    Python lets only the main thread handle signals: a job in another one (some notebooks) is not asked, and ends as any
    Python program does.
    """

    def __init__(self, *, deadline_s: float, on_late: Callable[[], None] = lambda: None) -> None:
        """`on_late` is called, on another thread, before the process ends because it was not done in time."""
        self.number: int | None = None
        """Which signal has come."""
        self._deadline_s = deadline_s
        self._on_late = on_late
        self._until_s = math.inf
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
        self.watch()

    def watch(self) -> None:
        """Take the signals over from the handlers that have them now."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        now_s = time.monotonic()
        announced_s = read_deadline() if number == signal.SIGTERM else None
        if announced_s is not None:
            self._deadline_s = max(0.0, announced_s - now_s)
        self._until_s = now_s + self._deadline_s
        self.number = number
        self._timer = threading.Timer(self._deadline_s, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    @property
    def requested(self) -> bool:
        return self.number is not None

    @property
    def left_s(self) -> float:
        """Until this process ends; infinite while it was not asked to."""
        return max(0.0, self._until_s - time.monotonic()) if self.requested else math.inf

    def _too_late(self) -> None:
        log.error(
            "asked to stop %.1f s ago and still running; exiting without a final checkpoint", self._deadline_s
        )
        self._on_late()
        os._exit(EXIT_AGAIN)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.unwatch()

    def unwatch(self) -> None:
        """Leave the signals to the handlers that had them before."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        self._previous = {}
