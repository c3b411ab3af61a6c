"""Filling an image on the CPU, and hashing it on the way.

An image is processed in windows of a megabyte. What a window is made of, spans of tensors and what lies between them, is
written to the image past the caches and at the same time to a buffer that stays in them, and hashed there: reading it again
from memory would take five times as long. The bytes that are hashed are those that were written, even where
other code changes the tensors meanwhile.

The parts of a sweep are the chunks of the digest, so that each is hashed by one thread, front to back.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from strata.checkpoint.copying import sweeping
from strata.checkpoint.copying.digest import CHUNK_BYTES, Digest, new_hasher, payload_algorithm
from strata.checkpoint.copying.sweeping import NUMBER_BYTES, Numbers, memmove

WINDOW_BYTES = 1 << 20
Buffer: TypeAlias = memoryview | ctypes.Array[ctypes.c_char]
assert CHUNK_BYTES % WINDOW_BYTES == 0


class Windows:
    """What each window of an image is made of, for all states of one plan."""

    def __init__(self, image: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        """The slots of the image, in their order; all else in it stays as it is."""
        self.size_bytes = image.numel()
        self.address = image.data_ptr()
        self._itself = len(sizes)
        rows: list[tuple[int, int, int, int]] = []
        self.bounds = [0]
        for start, end, number, within in self._spans(offsets, sizes):
            while start < end:
                window = start // WINDOW_BYTES
                take_bytes = min(end, (window + 1) * WINDOW_BYTES) - start
                rows.append((start % WINDOW_BYTES, number, within, take_bytes))
                start, within = start + take_bytes, within + take_bytes
                if start % WINDOW_BYTES == 0:
                    self.bounds.append(len(rows))
        if self.size_bytes % WINDOW_BYTES:
            self.bounds.append(len(rows))
        self.offsets, self._numbers, self._within, self.sizes = np.array(rows, dtype=np.uint64).T.copy()

    def _spans(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """From one offset to another: the number of the slot, and where in it that begins."""
        end = 0
        for number, (offset_bytes, size_bytes) in enumerate(zip(offsets, sizes, strict=True)):
            yield end, offset_bytes, self._itself, end
            end = offset_bytes + size_bytes
            yield offset_bytes, end, number, 0
        yield end, self.size_bytes, self._itself, end

    def sources(self, addresses: Sequence[int]) -> Numbers:
        """Where each span is copied from, when these are the addresses of the slots' bytes."""
        found: Numbers = np.array([*addresses, self.address], dtype=np.uint64)[self._numbers] + self._within
        return found


class Filling:
    """One state on its way into an image."""

    def __init__(self, windows: Windows, addresses: Sequence[int]) -> None:
        self._windows = windows
        self._sources = windows.sources(addresses)
        self._algorithm = payload_algorithm()
        self._hashed = [b""] * -(-windows.size_bytes // CHUNK_BYTES)
        tables = (windows.offsets, self._sources, windows.sizes)
        self._tables = [int(table.ctypes.data) for table in tables]

    @property
    def chunks(self) -> int:
        return len(self._hashed)

    def end_of(self, chunks: int) -> int:
        """The bytes of so many chunks, from the front."""
        return min(chunks * CHUNK_BYTES, self._windows.size_bytes)

    def copy(self, chunk: int) -> None:
        hasher = new_hasher(self._algorithm)
        for start in range(chunk * CHUNK_BYTES, self.end_of(chunk + 1), WINDOW_BYTES):
            hasher.update(self._copy_window(start))
        self._hashed[chunk] = hasher.digest()

    def digest(self) -> Digest:
        """When all chunks have been copied."""
        return Digest.of_chunks(self._hashed, algorithm=self._algorithm)

    def _copy_window(self, start: int) -> Buffer:
        """Copy one window; its bytes, to be hashed."""
        windows, number = self._windows, start // WINDOW_BYTES
        first, end = windows.bounds[number], windows.bounds[number + 1]
        size_bytes = min(WINDOW_BYTES, windows.size_bytes - start)
        to = windows.address + start
        if sweeping.library is not None:
            tables = [table + first * NUMBER_BYTES for table in self._tables]
            sweeping.library.strata_copy_twice(end - first, to, _buffer.address, *tables)
            return _buffer.view[:size_bytes]
        for n in range(first, end):
            memmove(to + int(windows.offsets[n]), int(self._sources[n]), int(windows.sizes[n]))
        return (ctypes.c_char * size_bytes).from_address(to)


class _Buffer(threading.local):
    """A window in the caches of whatever core this thread runs on."""

    def __init__(self) -> None:
        # Private: ranks are forked from a server that has one already, and would write to the same pages.
        memory = mmap.mmap(-1, WINDOW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))


_buffer = _Buffer()
