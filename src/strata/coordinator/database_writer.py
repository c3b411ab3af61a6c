"""A SQLite file that nothing depends on, and the one thread that writes to it.

A caller hands over what it has and continues; the thread takes all that waits, writes it together, and makes space once in a
while. A file that cannot be read is put aside and a new one started; that it cannot be written to is logged once.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strata.coordinator.journal.sqlite import open_or_put_aside
from strata.logs import OutageLog

TIDY_EVERY_S = 1.0


class DatabaseWriter(ABC):
    """What waits for the thread belongs to the class that inherits from this, and is guarded by `_changed`."""

    def __init__(
        self, path: Path, schema: str, *, what: str, gather_s: float, patience_s: float, outage: OutageLog
    ) -> None:
        """`gather_s` is how long what waits is waited for more, `patience_s` how long a flush or the end may take."""
        self.path = path
        self.is_paused: Callable[[], bool] = lambda: False
        """While it says so nothing is written: what space there is belongs to others."""
        self._gather_s = gather_s
        self._patience_s = patience_s
        self._outage = outage
        self._changed = threading.Condition()
        self._writing = False
        self._hurry = False
        self._closing = False
        self._next_tidy_mono_s = 0.0
        self._db = open_or_put_aside(path, schema, what=what)
        self._thread = threading.Thread(target=self._run, name=f"{path.stem}-writer", daemon=True)
        """To be started once everything else is there."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Whether everything handed over so far has been dealt with in time."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._hurry and not self._writing,
                self._patience_s if timeout_s is None else timeout_s,
            )

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._patience_s)
        with suppress(sqlite3.Error):
            self._db.close()

    # --- the thread -----------------------------------------------------------------------------------------

    @abstractmethod
    def _collect(self) -> Callable[[], None]:
        """Take what waits, while no other thread may touch it; what is returned writes it."""

    @abstractmethod
    def _make_space(self) -> None: ...

    def _gather(self) -> None:
        self._changed.wait_for(lambda: self._closing or self._hurry, self._gather_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._gather()
                self._hurry = False
                write = self._collect()
                is_last = self._closing
                self._writing = True
            try:
                write()
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()
            if is_last:
                return

    def _check_space(self) -> None:
        if self.is_paused():
            raise sqlite3.OperationalError("the disk is full")

    def _tidy(self) -> None:
        now_mono_s = time.monotonic()
        if now_mono_s >= self._next_tidy_mono_s:
            self._next_tidy_mono_s = now_mono_s + TIDY_EVERY_S
            self._make_space()
