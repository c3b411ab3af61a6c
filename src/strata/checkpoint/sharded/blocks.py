"""Blocks of tensors, copied from the parts of a sharded checkpoint straight to where they belong.

A rank of another world needs rows, columns or corners of what was stored. Only chunks of the parts with bytes of those are
read, by a few threads, each through one small buffer; a chunk is compared with its digest while it is still in the caches,
and only then copied on, to its places in the tensors' own memory. Nothing else is put together, so memory is bounded by the
threads' buffers, whatever the size of the tensors. After a failure, what was verified before it may be in place.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from strata.checkpoint.catalog.manifest import Part
from strata.checkpoint.copying.sweeping import Numbers, Sweep, copy_each
from strata.checkpoint.sharded.parts import check_chunks
from strata.stores.protocol import Store

FILE_WINDOW_BYTES = 1 << 20
"""What is read at once from a file: it stays in the caches of a core until it is copied on."""
REQUEST_WINDOW_BYTES = 16 << 20
"""What is read at once where every read is a request, or two."""
_THREADS = min(4, max(2, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Equal runs of bytes that lie in a part as the rows of an array lie in memory, and where they belong.

    Run (i, j, …) begins at `start_bytes` + i · `strides[0]` + j · `strides[1]` + … of the part, and goes to `address`
    + i · `to_strides[0]` + … of this process. Runs are in the order of the part. The addresses are not checked.
    """

    name: str
    start_bytes: int
    run_bytes: int
    address: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    to_strides: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        return math.prod(self.counts)

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self._extent_bytes(0)

    def ranges(self, gap_bytes: int) -> Iterator[tuple[int, int]]:
        """From where to where it has bytes in the part, leaving out gaps larger than `gap_bytes`."""
        if self.runs and self.run_bytes:
            yield from self._ranges(self.start_bytes, 0, gap_bytes)

    def within(self, first_bytes: int, last_bytes: int) -> tuple[Numbers, Numbers, Numbers]:
        """Its bytes in this range of the part: addresses they go to, offsets into the range, sizes."""
        first, last = self._run_ending_after(first_bytes), self._run_starting_from(last_bytes)
        starts, to = self._starts(first, last)
        ends = np.minimum(starts + self.run_bytes, last_bytes)
        cut = np.maximum(first_bytes - starts, 0)
        sizes = ends - starts - cut
        return _numbers(to + cut), _numbers(starts + cut - first_bytes), _numbers(sizes)

    def _extent_bytes(self, dimension: int) -> int:
        inner = zip(self.counts[dimension:], self.strides[dimension:], strict=True)
        return self.run_bytes + sum((count - 1) * stride for count, stride in inner)

    def _ranges(self, start_bytes: int, dimension: int, gap_bytes: int) -> Iterator[tuple[int, int]]:
        if dimension == len(self.counts):
            yield start_bytes, start_bytes + self.run_bytes
            return
        stride, inner_bytes = self.strides[dimension], self._extent_bytes(dimension + 1)
        if stride - inner_bytes > gap_bytes:
            for number in range(self.counts[dimension]):
                yield from self._ranges(start_bytes + number * stride, dimension + 1, gap_bytes)
        else:
            yield start_bytes, start_bytes + self._extent_bytes(dimension)

    def _start(self, number: int) -> int:
        """Where a run starts, as an offset from the first."""
        offset = 0
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            number, index = divmod(number, count)
            offset += index * stride
        return offset

    def _run_starting_from(self, at_bytes: int) -> int:
        """The first run that starts at or after this offset of the part."""
        low, high = 0, self.runs
        while low < high:
            middle = (low + high) // 2
            if self.start_bytes + self._start(middle) < at_bytes:
                low = middle + 1
            else:
                high = middle
        return low

    def _run_ending_after(self, at_bytes: int) -> int:
        return self._run_starting_from(at_bytes - self.run_bytes + 1)

    def _starts(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.arange(first, last, dtype=np.int64)
        starts = np.full(len(numbers), self.start_bytes, dtype=np.int64)
        to = np.full(len(numbers), self.address, dtype=np.int64)
        dimensions = zip(self.counts[::-1], self.strides[::-1], self.to_strides[::-1], strict=True)
        for count, stride, to_stride in dimensions:
            numbers, index = np.divmod(numbers, count)
            starts += index * stride
            to += index * to_stride
        return starts, to


def _numbers(values: np.ndarray) -> Numbers:
    return np.ascontiguousarray(values, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Chunks of one part that are read at once, and the blocks with bytes in them."""

    part: Part
    first: int
    end: int
    blocks: Sequence[Block]

    @property
    def first_bytes(self) -> int:
        return self.first * self.part.digest.chunk_bytes

    @property
    def end_bytes(self) -> int:
        return min(self.end * self.part.digest.chunk_bytes, self.part.size_bytes)


def copy_blocks(store: Store, wanted: Sequence[tuple[Part, Sequence[Block]]]) -> None:
    """Copy the blocks of each part to where they belong, every byte verified. Raises `Damaged`, which names the part and the
    tensors, and the store's errors. Whether the parts are there in full is for `check_parts` to say."""
    window_bytes = FILE_WINDOW_BYTES if store.free_bytes() is not None else REQUEST_WINDOW_BYTES
    windows = [window for part, blocks in wanted for window in _windows(part, blocks, window_bytes)]
    failed = threading.Event()
    own = threading.local()

    def copy(number: int) -> None:
        if failed.is_set():
            return
        try:
            _copy(store, windows[number], own)
        except BaseException:
            failed.set()
            raise

    sweep = Sweep(len(windows), copy, lambda _: None)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="strata-blocks") as pool:
        for working in [pool.submit(sweep.work) for _ in range(min(_THREADS, len(windows)))]:
            working.result()


def _windows(part: Part, blocks: Sequence[Block], window_bytes: int) -> Iterator[_Window]:
    """The chunks that are needed, in runs of about `window_bytes`."""
    chunk_bytes = part.digest.chunk_bytes
    most = max(1, window_bytes // chunk_bytes)
    by_chunk: dict[int, list[Block]] = {}
    for block in blocks:
        last = -1
        for start_bytes, end_bytes in block.ranges(chunk_bytes):
            for chunk in range(max(last + 1, start_bytes // chunk_bytes), -(-end_bytes // chunk_bytes)):
                by_chunk.setdefault(chunk, []).append(block)
                last = chunk
    needed = sorted(by_chunk)
    first = 0
    for at in range(1, len(needed) + 1):
        ends = at == len(needed) or needed[at] != needed[at - 1] + 1 or at - first == most
        if ends:
            held = {id(block): block for chunk in needed[first:at] for block in by_chunk[chunk]}
            yield _Window(part=part, first=needed[first], end=needed[at - 1] + 1, blocks=[*held.values()])
            first = at


def _copy(store: Store, window: _Window, own: threading.local) -> None:
    size_bytes = window.end_bytes - window.first_bytes
    if len(getattr(own, "memory", b"")) < size_bytes:
        own.memory = mmap.mmap(-1, size_bytes)
        own.view = memoryview(own.memory)
        own.address = np.frombuffer(own.view, np.uint8).ctypes.data
    view = own.view[:size_bytes]
    store.read_into(window.part.key, view, offset=window.first_bytes)

    def names(start_bytes: int, end_bytes: int) -> tuple[str, ...]:
        hit = [b for b in window.blocks if any(s < end_bytes and start_bytes < e for s, e in b.ranges(0))]
        return tuple(dict.fromkeys(block.name for block in hit))

    check_chunks(store, window.part, window.first, window.end, view, names)
    for block in window.blocks:
        to, offsets, sizes = block.within(window.first_bytes, window.end_bytes)
        copy_each(to, offsets + np.uint64(own.address), sizes)
