"""What the harness's manager and backends share: settings, saves under way, and how they end."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self

from strata.checkpoint.manager import CheckpointManager as Engine
from strata.errors import StrataError
from strata.trainer.errors import ConfigurationError
from strata.trainer.validation import section_problems

log = logging.getLogger("elastic_harness.checkpoint")


class InvalidCheckpointConfig(ConfigurationError, ValueError):
    """A setting of `CheckpointConfig` that cannot be."""

    code = "checkpoint_config"

    def __init__(self, reason: str, *, section: str | None = "checkpoint") -> None:
        super().__init__(reason, section=section)


def check_settings(section: str | None = "checkpoint", **values: object) -> None:
    """Raise `InvalidCheckpointConfig` for the first that the trainer's configuration could not have either."""
    for problem in section_problems("checkpoint", values):
        raise InvalidCheckpointConfig(problem, section=section)


def budget_bytes(megabytes: float | None) -> int | None:
    return int(megabytes * (1 << 20)) if megabytes is not None else None


class Pending:
    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()

    def add(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.append(future)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until those started so far have ended, well or not; whether they have, in time."""
        with self._lock:
            futures = list(self._futures)
        return not wait(futures, timeout_s).not_done

    def take_failures(self) -> list[BaseException]:
        """What those that have ended failed of; each is reported once."""
        with self._lock:
            ended = [future for future in self._futures if future.done()]
            self._futures = [future for future in self._futures if not future.done()]
        return [error for future in ended if (error := future.exception()) is not None]


class Closing:
    _end: Callable[[], object]
    """Does its work once."""

    def close(self) -> None:
        """Finish the saves under way, and give memory back. What is not closed does so when it ends."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_engines(engines: Mapping[str, Engine], *, keep_memory: bool = True) -> None:
    """After a crash of the program, its snapshots in memory stay for its next life; of the backends nobody would find them."""
    for engine in engines.values():
        try:
            engine.close(keep_memory=keep_memory and getattr(sys, "last_value", None) is not None)
        except StrataError as error:
            log.warning("%s", error)
