"""How managers and backends end: by `with`, by `close`, or on their own when nobody has them any more."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from strata.checkpoint.manager import CheckpointManager
from strata.errors import StrataError

log = logging.getLogger("elastic_harness.checkpoint")


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


def close_engine(engine: CheckpointManager) -> None:
    """After a crash of the program, its snapshots in memory stay for its next life."""
    try:
        engine.close(keep_memory=getattr(sys, "last_value", None) is not None)
    except StrataError as error:
        log.warning("%s", error)
