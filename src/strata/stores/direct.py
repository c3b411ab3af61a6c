"""Moving large files past the page cache.

Aligned memory (an mmap of /dev/shm, page-locked buffers) and the device exchange bytes directly, 16 MiB at a
time at most: one thread writes, which measured as fast as more, and two read, which measured twice as fast as one.
Other memory is written through one aligned buffer, and read through the page cache. Where direct I/O is not
supported, or stops working half-way, the page cache takes over. Nothing is durable before the caller's fsync.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from strata.stores.protocol import TakePart

BLOCK_BYTES = 4096
CHUNK_BYTES = 16 << 20
READERS = 2
SMALLEST_DIRECT_BYTES = 1 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """An open file being written; `fd` belongs to the caller."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self._fd = fd
        self._direct = direct
        self._flagged = False
        self._gather: mmap.mmap | None = None
        self._gathered_bytes = 0

    def write(self, view: memoryview) -> None:
        if not self._direct:
            self._write_out(view)
            return
        while view:
            if (
                not self._gathered_bytes
                and len(view) >= SMALLEST_DIRECT_BYTES
                and _address(view) % BLOCK_BYTES == 0
            ):
                whole_bytes = len(view) - len(view) % BLOCK_BYTES
                self._write_out(view[:whole_bytes])
                view = view[whole_bytes:]
            else:
                view = self._collect(view)

    def finish(self) -> None:
        """Write what is still gathered. The tail that fills no whole block takes the buffered path."""
        if self._gather is None:
            return
        with memoryview(self._gather) as held:
            whole_bytes = self._gathered_bytes - self._gathered_bytes % BLOCK_BYTES
            if whole_bytes >= SMALLEST_DIRECT_BYTES:
                self._write_out(held[:whole_bytes])
            else:
                whole_bytes = 0
            self._stop_direct()
            self._write_out(held[whole_bytes : self._gathered_bytes])
        self.close()

    def close(self) -> None:
        # Let go of, not closed: an exception on its way up may still hold a view of it.
        self._gather, self._gathered_bytes = None, 0

    def _collect(self, view: memoryview) -> memoryview:
        if self._gather is None:
            self._gather = mmap.mmap(-1, CHUNK_BYTES)
        take_bytes = min(len(view), CHUNK_BYTES - self._gathered_bytes)
        self._gather[self._gathered_bytes : self._gathered_bytes + take_bytes] = view[:take_bytes]
        self._gathered_bytes += take_bytes
        if self._gathered_bytes == CHUNK_BYTES:
            with memoryview(self._gather) as held:
                self._write_out(held)
            self._gathered_bytes = 0
        return view[take_bytes:]

    def _write_out(self, view: memoryview) -> None:
        self._start_direct()
        while view:
            try:
                written_bytes = os.write(self._fd, view[:CHUNK_BYTES])
            except OSError as error:
                # A device with larger blocks, or a short write that left an odd offset, refuses direct I/O.
                if error.errno != errno.EINVAL or not self._flagged:
                    raise
                self._stop_direct()
                continue
            view = view[written_bytes:]

    def _start_direct(self) -> None:
        if self._direct and not self._flagged:
            self._direct = self._flagged = _set_direct(self._fd, True)

    def _stop_direct(self) -> None:
        self._direct = False
        if self._flagged:
            self._flagged = False
            _set_direct(self._fd, False)


def read_into(fd: int, view: memoryview, offset: int, *, direct: bool) -> None:
    """Fill `view` from `offset`; `EOFError` if the file ends before that."""
    starts = range(0, len(view), CHUNK_BYTES)
    is_large = len(view) >= SMALLEST_DIRECT_BYTES
    if is_large and direct and offset % BLOCK_BYTES == 0 and _address(view) % BLOCK_BYTES == 0:
        _set_direct(fd, True)
    _in_parallel(lambda start: _fill(fd, view[start : start + CHUNK_BYTES], offset + start), starts)


def read_parts(fd: int, take: TakePart, *, size_bytes: int, part_bytes: int, direct: bool) -> None:
    """Give the first `size_bytes` of a file to `take`, part by part, through one buffer for each thread that reads."""
    starts = range(0, size_bytes, part_bytes)
    if len(starts) > 1 and direct and part_bytes % BLOCK_BYTES == 0:
        _set_direct(fd, True)
    held = threading.local()

    def read(start: int) -> None:
        if not hasattr(held, "buffer"):
            held.buffer = memoryview(mmap.mmap(-1, part_bytes))
        part = held.buffer[: min(part_bytes, size_bytes - start)]
        _fill(fd, part, start)
        take(start, part)

    _in_parallel(read, starts)


def _fill(fd: int, chunk: memoryview, position: int) -> None:
    refused = False
    while chunk:
        # Only whole blocks can be read directly; what is left of the last one is refused, then read buffered.
        whole_bytes = len(chunk) - len(chunk) % BLOCK_BYTES
        try:
            read_bytes = os.preadv(fd, [chunk[: whole_bytes or len(chunk)]], position)
        except OSError as error:
            if error.errno != errno.EINVAL or refused:
                raise
            refused = True
            _set_direct(fd, False)
            continue
        if read_bytes == 0:
            raise EOFError(f"the file ends at byte {position}")
        chunk, position = chunk[read_bytes:], position + read_bytes


def _in_parallel(read: Callable[[int], None], starts: Sequence[int]) -> None:
    if len(starts) <= 1:
        for start in starts:
            read(start)
        return
    with ThreadPoolExecutor(READERS, "strata-read") as pool:
        try:
            for _ in pool.map(read, starts):
                pass
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _set_direct(fd: int, on: bool) -> bool:
    """Whether the file system agreed."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return True


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
