"""Saves under way, shared by everything that reads what they write."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any


class Pending:
    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()

    def add(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.append(future)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until those begun so far have ended, well or not; whether they have, in time."""
        with self._lock:
            futures = list(self._futures)
        return not wait(futures, timeout_s).not_done

    def take_failures(self) -> list[BaseException]:
        """What those that have ended failed of; each is told once."""
        with self._lock:
            ended = [future for future in self._futures if future.done()]
            self._futures = [future for future in self._futures if not future.done()]
        return [error for future in ended if (error := future.exception()) is not None]
