"""Digests of large payloads: xxh3-128 per chunk, and one over all chunks.

Finds accidents (flipped bits, short or mixed-up files) at memory speed and says in which chunk. It is no
signature: it does not stop somebody who rewrites payload and manifest together.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

CHUNK_BYTES = 16 << 20
_MOST_THREADS = 16
_MOST_HELPERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What a payload must hash to. `whole` is the digest of the chunk digests, in order."""

    chunk_bytes: int
    chunks: tuple[str, ...]
    whole: str

    @classmethod
    def of_chunks(cls, chunks: Iterable[bytes], *, chunk_bytes: int = CHUNK_BYTES) -> Digest:
        parts = tuple(chunks)
        return cls(
            chunk_bytes=chunk_bytes,
            chunks=tuple(part.hex() for part in parts),
            whole=xxhash.xxh3_128_hexdigest(b"".join(parts)),
        )


@contextlib.contextmanager
def helping_threads() -> Iterator[Executor | None]:
    """A few threads for a digest that somebody waits for: of many processors some are idle while training, of few none."""
    count = min(_MOST_HELPERS, (os.cpu_count() or 1) // 4)
    if not count:
        yield None
        return
    with ThreadPoolExecutor(count, thread_name_prefix="strata-digest") as pool:
        yield pool


def digest_of(view: memoryview, *, chunk_bytes: int = CHUNK_BYTES, pool: Executor | None = None) -> Digest:
    """Hash a payload that is in memory, on the threads of `pool` as well where one is given."""
    pieces = _pieces(view, chunk_bytes)
    hashed = [b""] * len(pieces)
    todo = iter(range(len(pieces)))  # Shared: whoever has time takes the next.

    def work() -> None:
        for number in todo:
            hashed[number] = _hash(pieces[number])

    helping = [pool.submit(work) for _ in range(min(_MOST_THREADS, len(pieces)) - 1)] if pool else []
    work()
    for helper in helping:
        helper.result()
    return Digest.of_chunks(hashed, chunk_bytes=chunk_bytes)


def damaged_chunks(view: memoryview, expected: Digest, *, pool: Executor | None = None) -> list[int]:
    """The numbers of the chunks whose bytes differ; empty when the payload is what it should be."""
    actual = digest_of(view, chunk_bytes=expected.chunk_bytes, pool=pool)
    count = max(len(actual.chunks), len(expected.chunks))
    return [n for n in range(count) if actual.chunks[n : n + 1] != expected.chunks[n : n + 1]]


class StreamingDigest:
    """Hash a payload that arrives piece by piece, in pieces of any size."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._left_bytes = chunk_bytes

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.size_bytes += len(view)
        while view:
            piece = view[: self._left_bytes]
            self._hasher.update(piece)
            self._left_bytes -= len(piece)
            view = view[len(piece) :]
            if not self._left_bytes:
                self._end_chunk()

    def finish(self) -> Digest:
        if self._left_bytes < self._chunk_bytes:
            self._end_chunk()
        return Digest.of_chunks(self._chunks, chunk_bytes=self._chunk_bytes)

    def _end_chunk(self) -> None:
        self._chunks.append(self._hasher.digest())
        self._hasher.reset()
        self._left_bytes = self._chunk_bytes


def _pieces(view: memoryview, chunk_bytes: int) -> list[memoryview]:
    flat = view.cast("B")
    return [flat[start : start + chunk_bytes] for start in range(0, len(flat), chunk_bytes)]


_hash: Callable[[memoryview], bytes] = xxhash.xxh3_128_digest


class WindowBuffer:
    def __init__(self, size_bytes: int = 4 * CHUNK_BYTES) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))

    def window(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` of it, to be overwritten."""
        if size_bytes > len(self.view):
            self.view = memoryview(mmap.mmap(-1, size_bytes))
        return self.view[:size_bytes]
