"""Fetching what the next batches need before anybody reads it.

A loader knows which samples come next, whatever their order. `Prefetcher` is given them some batches ahead, and has the blocks
of remote files they lie in brought to this machine's cache, by a thread of its own with a reader of its own. It never waits
and never raises: what could not be fetched ahead is fetched, or reported, when it is read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress

from strata.data.reader import DatasetFiles, DatasetReader

BATCHES_AHEAD = 8
"""Beyond those that loader processes have been given."""
_WAITING = 4 * BATCHES_AHEAD


class Prefetcher:
    """A thread that fetches ahead. Close it when the iteration is over."""

    def __init__(self, found: DatasetFiles) -> None:
        self._found = found
        self._wanted: queue.Queue[Sequence[int] | None] = queue.Queue(_WAITING)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="strata-prefetch", daemon=True)
        self._thread.start()

    def put(self, samples: Sequence[int]) -> None:
        """These come soon. Forgotten where too many wait already."""
        with suppress(queue.Full):
            self._wanted.put_nowait(samples)

    def close(self) -> None:
        self._is_closed = True
        with suppress(queue.Full):  # Then it sees with the next one that it is closed.
            self._wanted.put_nowait(None)

    def _run(self) -> None:
        reader = DatasetReader(self._found)
        try:
            while (samples := self._wanted.get()) is not None and not self._is_closed:
                reader.prefetch(samples)
        finally:
            reader.close()
