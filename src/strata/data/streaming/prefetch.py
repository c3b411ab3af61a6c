"""Fetching what the next batches need before it is read.

A loader knows which samples come next, whatever their order. A dataset with remote parts has `ahead()`, which says how to fetch what
some of its samples need; mixtures, packed and mapped datasets ask the ones they are made of. `Prefetcher` is given the samples some
batches ahead, and has them fetched by a thread of its own. It never waits and never raises: what could not be fetched ahead is
fetched, or reported, when it is read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from strata.data.streaming.sources import BLOCK_BYTES, FETCH_THREADS
from strata.errors import StrataError

BATCHES_AHEAD = 8
"""At least, beyond those that loader processes have been given."""
BYTES_AHEAD = 2 * FETCH_THREADS * BLOCK_BYTES
"""About: so much keeps every thread that fetches at work, also where batches are small."""
MOST_BATCHES_AHEAD = 64
_WAITING = 2 * MOST_BATCHES_AHEAD


class Ahead(Protocol):
    """How to fetch what samples of a dataset need. For one thread, which need not be the one that reads."""

    @property
    def sample_bytes(self) -> float:
        """How large a sample is, about."""
        ...

    def fetch(self, samples: Sequence[int], *, in_memory: bool) -> None:
        """Have what these samples need on its way; without `in_memory` only what a disk keeps for other processes."""
        ...

    def close(self) -> None: ...


class FetchesAhead:
    """A dataset that knows what of its samples is remote, and how to fetch it."""

    def ahead(self) -> Ahead | None:
        """None where nothing is remote."""
        return None


def ahead_of(dataset: object) -> Ahead | None:
    """How to fetch ahead from any dataset; None where that is not known, or nothing of it is remote."""
    return dataset.ahead() if isinstance(dataset, FetchesAhead) else None


class RangesAhead:
    """Samples that are ranges of one object."""

    def __init__(
        self,
        source: Any,
        ranges: Callable[[Sequence[int]], Sequence[tuple[int, int]]],
        *,
        sample_bytes: float,
    ) -> None:
        self._source = source
        self._ranges = ranges
        self.sample_bytes = sample_bytes

    def fetch(self, samples: Sequence[int], *, in_memory: bool) -> None:
        self._source.prefetch(self._ranges(samples), in_memory=in_memory)

    def close(self) -> None:
        pass


class Prefetcher:
    """A thread that fetches ahead. Close it when the iteration is over."""

    def __init__(self, ahead: Ahead, *, in_memory: bool) -> None:
        """`in_memory`: this process reads the samples itself."""
        self._ahead = ahead
        self._in_memory = in_memory
        self._wanted: queue.Queue[Sequence[int] | None] = queue.Queue(_WAITING)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="strata-prefetch", daemon=True)
        self._thread.start()

    def put(self, samples: Sequence[int]) -> None:
        """These come soon. Forgotten where too many wait already."""
        with suppress(queue.Full):
            self._wanted.put_nowait(samples)

    def batches_ahead(self, samples: int) -> int:
        """How many batches of so many samples to be given ahead."""
        wanted = int(BYTES_AHEAD / max(samples * self._ahead.sample_bytes, 1.0))
        return min(max(wanted, BATCHES_AHEAD), MOST_BATCHES_AHEAD)

    def close(self) -> None:
        self._is_closed = True
        with suppress(queue.Full):  # Then it sees with the next one that it is closed.
            self._wanted.put_nowait(None)

    def _run(self) -> None:
        try:
            while (samples := self._wanted.get()) is not None and not self._is_closed:
                with suppress(StrataError):  # The thread that reads it reports what is wrong.
                    self._ahead.fetch(samples, in_memory=self._in_memory)
        finally:
            self._ahead.close()
