"""SIGTERM means: save what you have, and leave. Within a deadline, whatever happens."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

log = logging.getLogger("strata.training")

EXIT_AGAIN = 75
"""Exit status of a process that should be started again (EX_TEMPFAIL)."""


class Preemption:
    """Notes the signal; the training loop looks at `requested` at its next step. Main thread only."""

    def __init__(self, *, deadline_s: float) -> None:
        self.requested = False
        self._deadline_s = deadline_s
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._timer: threading.Timer | None = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            return
        self.requested = True
        self._timer = threading.Timer(self._deadline_s, self._too_late)
        self._timer.daemon = True
        self._timer.start()

    def _too_late(self) -> None:
        log.error(
            "asked to leave %.0f s ago and still here; leaving without a final checkpoint", self._deadline_s
        )
        os._exit(EXIT_AGAIN)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        signal.signal(signal.SIGTERM, self._previous)
