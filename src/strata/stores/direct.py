"""Writing a file front to back past the page cache.

Large aligned memory (an mmap of /dev/shm, page-locked buffers) goes to the device straight from where it is, in
16 MiB writes on one thread, which measured as fast as more threads or larger writes. Other memory is
gathered in one aligned buffer first. Where direct I/O is not supported, or stops working half-way, the rest is
written through the page cache. Nothing is durable before the caller's fsync.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np

BLOCK_BYTES = 4096
WRITE_BYTES = 16 << 20
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
        self._gathered_bytes = 0
        if self._gather is not None:
            gather, self._gather = self._gather, None
            gather.close()

    def _collect(self, view: memoryview) -> memoryview:
        if self._gather is None:
            self._gather = mmap.mmap(-1, WRITE_BYTES)
        take_bytes = min(len(view), WRITE_BYTES - self._gathered_bytes)
        self._gather[self._gathered_bytes : self._gathered_bytes + take_bytes] = view[:take_bytes]
        self._gathered_bytes += take_bytes
        if self._gathered_bytes == WRITE_BYTES:
            with memoryview(self._gather) as held:
                self._write_out(held)
            self._gathered_bytes = 0
        return view[take_bytes:]

    def _write_out(self, view: memoryview) -> None:
        self._start_direct()
        while view:
            try:
                written_bytes = os.write(self._fd, view[:WRITE_BYTES])
            except OSError as error:
                # A device with larger blocks, or a short write that left an odd offset, refuses direct I/O.
                if error.errno != errno.EINVAL or not self._flagged:
                    raise
                self._stop_direct()
                continue
            view = view[written_bytes:]

    def _start_direct(self) -> None:
        if not self._direct or self._flagged:
            return
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _O_DIRECT)
        except OSError:
            self._direct = False  # Not on this file system.
        else:
            self._flagged = True

    def _stop_direct(self) -> None:
        self._direct = False
        if self._flagged:
            self._flagged = False
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
