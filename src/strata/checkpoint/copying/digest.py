"""Digests of large payloads: one per chunk, and one over all chunks.

By default xxh3-128, which finds accidents (flipped bits, short or mixed-up files) at memory speed and says in which chunk. It
does not stop an attacker who rewrites payload and manifest together. Where manifests are signed (`strata.checkpoint.catalog.signing`)
it is SHA-256, which cannot be forged.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview | ctypes.Array[ctypes.c_char]

CHUNK_BYTES = 16 << 20
KEY_VARIABLE = "STRATA_SIGNING_KEY"
XXH3, SHA256 = "xxh3-128", "sha256"
_MOST_THREADS = 16
_MOST_HELPERS = 4


class Hasher(Protocol):
    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


_HASHERS: Mapping[str, Callable[[], Hasher]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


def new_hasher(algorithm: str) -> Hasher:
    """Raises `ValueError` for an algorithm that this version does not know."""
    if algorithm not in _HASHERS:
        raise ValueError(f"unknown digest algorithm {algorithm!r}")
    return _HASHERS[algorithm]()


def payload_algorithm() -> str:
    """What this process hashes payloads with."""
    return SHA256 if os.environ.get(KEY_VARIABLE, "").strip() else XXH3


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What a payload must hash to. `whole` is the digest of the chunk digests, in order."""

    chunk_bytes: int
    chunks: tuple[str, ...]
    whole: str
    algorithm: str = XXH3

    @classmethod
    def of_chunks(
        cls, chunks: Iterable[bytes], *, chunk_bytes: int = CHUNK_BYTES, algorithm: str = XXH3
    ) -> Digest:
        parts = tuple(chunks)
        return cls(
            chunk_bytes=chunk_bytes,
            chunks=tuple(part.hex() for part in parts),
            whole=_hash(algorithm, b"".join(parts)).hex(),
            algorithm=algorithm,
        )

    def hasher(self) -> Hasher:
        """For one chunk."""
        return new_hasher(self.algorithm)

    def fits(self, number: int, chunk: Buffer) -> bool:
        """Whether these are the bytes of chunk `number`."""
        return self.chunks[number : number + 1] == (_hash(self.algorithm, chunk).hex(),)


@contextlib.contextmanager
def helping_threads() -> Iterator[Executor | None]:
    """A few threads for a digest that a caller waits for: of many processors some are idle while training, of few none."""
    count = min(_MOST_HELPERS, (os.cpu_count() or 1) // 4)
    if not count:
        yield None
        return
    with ThreadPoolExecutor(count, thread_name_prefix="strata-digest") as pool:
        yield pool


def digest_of(
    view: memoryview,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    pool: Executor | None = None,
    algorithm: str | None = None,
    wait: Callable[[int], None] | None = None,
) -> Digest:
    """Hash a payload that is in memory, on the threads of `pool` as well where one is given. One that is still arriving, front to
    back, is followed: `wait` returns when so many of its bytes are there."""
    algorithm = algorithm or payload_algorithm()
    pieces = _pieces(view, chunk_bytes)
    hashed = [b""] * len(pieces)
    todo = iter(range(len(pieces)))  # Shared: a thread that has time takes the next.

    def work() -> None:
        for number in todo:
            if wait is not None:
                wait(min((number + 1) * chunk_bytes, len(view)))
            hashed[number] = _hash(algorithm, pieces[number])

    helping = [pool.submit(work) for _ in range(min(_MOST_THREADS, len(pieces)) - 1)] if pool else []
    work()
    for helper in helping:
        helper.result()
    return Digest.of_chunks(hashed, chunk_bytes=chunk_bytes, algorithm=algorithm)


def damaged_chunks(view: memoryview, expected: Digest, *, pool: Executor | None = None) -> list[int]:
    """The numbers of the chunks whose bytes differ; empty when the payload is what it should be."""
    actual = digest_of(view, chunk_bytes=expected.chunk_bytes, pool=pool, algorithm=expected.algorithm)
    count = max(len(actual.chunks), len(expected.chunks))
    return [n for n in range(count) if actual.chunks[n : n + 1] != expected.chunks[n : n + 1]]


class StreamingDigest:
    """Hash a payload that arrives piece by piece, in pieces of any size."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.size_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[bytes] = []
        self._algorithm = payload_algorithm()
        self._hasher = new_hasher(self._algorithm)
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
        return Digest.of_chunks(self._chunks, chunk_bytes=self._chunk_bytes, algorithm=self._algorithm)

    def _end_chunk(self) -> None:
        self._chunks.append(self._hasher.digest())
        self._hasher = new_hasher(self._algorithm)
        self._left_bytes = self._chunk_bytes


def _pieces(view: memoryview, chunk_bytes: int) -> list[memoryview]:
    flat = view.cast("B")
    return [flat[start : start + chunk_bytes] for start in range(0, len(flat), chunk_bytes)]


def _hash(algorithm: str, data: Buffer) -> bytes:
    if algorithm == XXH3:
        return xxhash.xxh3_128_digest(data)
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return hasher.digest()


class WindowBuffer:
    def __init__(self, size_bytes: int = 4 * CHUNK_BYTES) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))

    def window(self, size_bytes: int) -> memoryview:
        """The first `size_bytes` of it, to be overwritten."""
        if size_bytes > len(self.view):
            self.view = memoryview(mmap.mmap(-1, size_bytes))
        return self.view[:size_bytes]
