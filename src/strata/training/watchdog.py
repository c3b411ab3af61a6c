"""A rank that makes no progress is named, with the Python stack of every thread, and by policy ends.

Each rank watches itself from a thread of its own. When the training loop has completed no step for `timeout_s`, the
stacks and its last collectives are written to the log (and so reach the coordinator); with the policy `restart` the process then ends, so
that torchrun starts the job anew from its last snapshot. A rank that only waits for others says so: the one that
does not is the culprit. Time in which the whole process stood still is nobody's fault and is not counted.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from strata.agent.frames import report
from strata.agent.trace import last_step_here
from strata.core.faults.failures import EXIT_HUNG, HANG, WorkerError
from strata.torch_compat.flight_recorder import last_collectives

log = logging.getLogger("strata.training")

Policy = Literal["warn", "restart"]
STACKS_KEPT = 8_000
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")


class Watchdog:
    def __init__(
        self,
        *,
        timeout_s: float,
        policy: Policy,
        name: str,
        before_end: Callable[[], None] | None = None,
        on_hang: Callable[[WorkerError], None] | None = None,
    ) -> None:
        """`before_end` runs before the process ends: the time to send the last words. `on_hang` is called where it does not
        end."""
        self._timeout_s = timeout_s
        self._policy = policy
        self._name = name
        self._before_end = before_end
        self._on_hang = on_hang
        self._progress = 0
        self._doing = "starting"
        self._is_suspended = False
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="strata-watchdog", daemon=True)
        self._thread.start()

    def alive(self, doing: str) -> None:
        """Progress was made; `doing` is what comes next."""
        self._doing = doing
        self._progress += 1
        self._is_suspended = False

    def suspend(self) -> None:
        """Look at nothing until the next sign of life."""
        self._is_suspended = True

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def _watch(self) -> None:
        look_s = min(1.0, self._timeout_s / 4)
        seen, reported, silent_s, looked_s = self._progress, -1, 0.0, time.monotonic()
        while not self._stop.wait(look_s):
            before_s, looked_s = looked_s, time.monotonic()
            silent_s += min(looked_s - before_s, 2 * look_s)
            if seen != self._progress or self._is_suspended:
                seen, silent_s = self._progress, 0.0
            if silent_s < self._timeout_s or reported == seen:
                continue
            reported = seen
            self._report(silent_s)
            if self._policy == "restart":
                log.error("%s ends now, so that the job restarts from its last snapshot", self._name)
                with suppress(Exception):  # Nothing may keep a hung process alive.
                    if self._before_end is not None:
                        self._before_end()
                logging.shutdown()
                os._exit(EXIT_HUNG)

    def _report(self, silent_s: float) -> None:
        verdict = "waits for other ranks" if self._only_waits() else "is stuck itself"
        said = f"has completed no step for {silent_s:.1f} s while {self._doing}; it {verdict}"
        evidence = all_stacks()[-STACKS_KEPT:]
        if found := last_collectives():
            evidence += "\n\nIts last collectives, newest first:\n" + "\n".join(found)
        log.error("%s %s. Stacks:\n%s", self._name, said, evidence)
        error = WorkerError(
            type=HANG, message=said, traceback=evidence, step=last_step_here(), at_s=time.monotonic()
        )
        if self._policy == "restart":
            report(error)  # For the agent, which sees this process end.
        elif self._on_hang is not None:
            self._on_hang(error)

    def _only_waits(self) -> bool:
        frame = sys._current_frames().get(self._main or 0)
        return frame is not None and any(part in frame.f_code.co_filename for part in _WAITING)


def all_stacks() -> str:
    """Every thread's Python stack, also when the interpreter is busy in native code."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().strip()
