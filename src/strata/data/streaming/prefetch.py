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
from strata.data.streaming.sources import BLOCK_BYTES, FETCH_THREADS

BATCHES_AHEAD = 8
"""At least, beyond those that loader processes have been given."""
BYTES_AHEAD = 2 * FETCH_THREADS * BLOCK_BYTES
"""About: so much keeps every thread that fetches at work, also where batches are small."""
MOST_BATCHES_AHEAD = 64
_WAITING = 2 * MOST_BATCHES_AHEAD


class Prefetcher:
    """A thread that fetches ahead. Close it when the iteration is over."""

    def __init__(self, found: DatasetFiles) -> None:
        self._found = found
        samples = sum(file.samples for file in found.files)
        self._sample_bytes = sum(file.size_bytes for file in found.files) / max(samples, 1)
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
        wanted = int(BYTES_AHEAD / max(samples * self._sample_bytes, 1.0))
        return min(max(wanted, BATCHES_AHEAD), MOST_BATCHES_AHEAD)

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
