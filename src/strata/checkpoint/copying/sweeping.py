"""Copying lists of addresses on the CPU, with a few threads that go over them front to back.

A thread that the machine has no time for is not waited for: what it did not take is taken by the others. (Torch's own
parallel copy waits for all its threads at every tensor, which on a busy machine took fifty times as long.)

The copying is done by a few lines of C (`stream.c`) that write past the caches, with the interpreter's lock released: for tensors
of 100 KB in half the time that memmove needs. Where there was no compiler when the package was installed, memmove does it.
The addresses are not checked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

PIECE_BYTES = 4 << 20
THREADS = min(4, os.cpu_count() or 1)
NUMBER_BYTES = 8

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
"""Addresses or sizes, as C reads them."""


class Sweep:
    """Work in parts that any number of threads take front to back. `report` receives how many are done from the front on."""

    def __init__(self, parts: int, do: Callable[[int], None], report: Callable[[int], None]) -> None:
        self.parts = parts
        self._do = do
        self._report = report
        self._next = 0
        self._under_way: set[int] = set()
        self._lock = threading.Lock()

    def work(self) -> None:
        while self._do_next():
            pass
        self._report(self._front())

    def _do_next(self) -> bool:
        with self._lock:
            number = self._next
            if number == self.parts:
                return False
            self._next += 1
            self._under_way.add(number)
        self._do(number)
        with self._lock:
            self._under_way.remove(number)
        self._report(self._front())
        return True

    def _front(self) -> int:
        with self._lock:
            return min(self._under_way, default=self._next)


class Pieces:
    """Copies between addresses, in the order given, in pieces of about `PIECE_BYTES`."""

    def __init__(self, to: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        rows: list[tuple[int, int, int]] = []
        self._bounds: list[int] = []
        left_bytes = 0
        for address, source, size_bytes in zip(to, sources, sizes, strict=True):
            for within in range(0, size_bytes, PIECE_BYTES):
                take_bytes = min(PIECE_BYTES, size_bytes - within)
                if left_bytes < take_bytes:
                    self._bounds.append(len(rows))
                    left_bytes = PIECE_BYTES
                rows.append((address + within, source + within, take_bytes))
                left_bytes -= take_bytes
        self._bounds.append(len(rows))
        self._to, self._sources, self._sizes = np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy()

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def copy(self, piece: int) -> None:
        some = slice(self._bounds[piece], self._bounds[piece + 1])
        copy_each(self._to[some], self._sources[some], self._sizes[some])


def copy_bytes(to: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy from addresses to addresses, and return when it is done."""
    pieces = Pieces(to, sources, sizes)
    sweep = Sweep(len(pieces), pieces.copy, lambda _: None)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="strata-copy") as pool:
        for _ in range(min(THREADS, sweep.parts) - 1):
            pool.submit(sweep.work)
        sweep.work()


def copy_each(to: Numbers, sources: Numbers, sizes: Numbers) -> None:
    if library is not None:
        library.strata_copy(len(sizes), to.ctypes.data, sources.ctypes.data, sizes.ctypes.data)
        return
    for address, source, size_bytes in zip(to.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        memmove(address, source, size_bytes)


def load_library() -> Any | None:
    """The copies in C, where they were built."""
    found = importlib.util.find_spec("strata.checkpoint.copying._stream")
    if found is None or found.origin is None:
        return None
    made: Any = ctypes.CDLL(found.origin)
    address, count = ctypes.c_void_p, ctypes.c_size_t
    made.strata_copy.argtypes = (count, address, address, address)
    made.strata_copy_twice.argtypes = (count, address, address, address, address, address)
    made.strata_copy.restype = made.strata_copy_twice.restype = None
    return made


library = load_library()
memmove = ctypes.CDLL(None).memmove  # Called without the interpreter's lock.
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = None
