"""The parts of a sharded checkpoint: one value per rank, written front to back, read in verified pieces.

A part is the bytes of its items one after the other, each at a multiple of 64. It is durable when `PartWriter.finish`
returns, and means nothing until a manifest names it. Its own name tells which process wrote it, so parts that never
got a manifest can be distinguished from those that still may. Reading fetches whole chunks and compares each with its digest
before a byte of it is used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from strata.checkpoint.catalog.listing import Catalog, check_part, where
from strata.checkpoint.catalog.manifest import Part
from strata.checkpoint.catalog.naming import new_id, writer_of
from strata.checkpoint.copying.digest import CHUNK_BYTES, Digest, StreamingDigest, WindowBuffer
from strata.checkpoint.errors import Damaged
from strata.processes import this_process
from strata.stores.protocol import Store, StoreError

log = logging.getLogger("strata.checkpoint")

FOLDER = "parts"
SUFFIX = ".part"
ALIGNMENT_BYTES = 64
_FOREIGN_ORPHAN_AGE_S = 24 * 3600.0
_MOST_CHUNKS = 1024
_MOST_REQUESTS = 16
_SMALLEST_CHUNK_BYTES = 256 << 10
_SMALLEST_HASHED_BESIDE_BYTES = 1 << 20

_lock = threading.Lock()
_unnamed: dict[str, set[str]] = {}
"""Parts this process wrote to each store, by URL, that it does not know to be in a manifest."""
_named: dict[str, tuple[str, ...]] = {}
"""Parts of the last manifest this process published to each store, by URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of one part."""

    part: int
    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """A part that is durable. It travels from its rank to the coordinator."""

    key: str
    size_bytes: int
    digest: Digest

    @property
    def part(self) -> Part:
        return Part(key=self.key, size_bytes=self.size_bytes, digest=self.digest)


def chunk_bytes_for(size_bytes: int | None) -> int:
    """How much of a part of this size has one digest, and so is the least that can be read and verified. Slices of small
    tensors want small chunks; a manifest wants few of them."""
    if size_bytes is None:
        return CHUNK_BYTES
    least = -(-size_bytes // _MOST_CHUNKS)
    return min(CHUNK_BYTES, max(_SMALLEST_CHUNK_BYTES, 1 << max(0, least - 1).bit_length()))


class PartWriter:
    """A part on its way to a store. Large pieces are hashed by a second thread while they are written."""

    def __init__(self, store: Store, step: int, *, size_hint_bytes: int | None = None) -> None:
        """`size_hint_bytes` is what will be added, about: space for it is checked first, and chunks are as small as that
        permits."""
        self._store = store
        self.key = f"{FOLDER}/{new_id(step)}{SUFFIX}"
        self._digest = StreamingDigest(chunk_bytes=chunk_bytes_for(size_hint_bytes))
        # Starts with its first work.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="strata-digest")
        with _lock:
            _unnamed.setdefault(store.url, set()).add(self.key)
        self._blob = store.open_write(self.key, size_hint_bytes=size_hint_bytes)

    def add(self, data: memoryview) -> tuple[int, int]:
        """Where the bytes have got: offset and length. They are no longer needed when it returns."""
        offset_bytes = -(-self._digest.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._put(memoryview(bytes(offset_bytes - self._digest.size_bytes)))
        self._put(data)
        return offset_bytes, len(data)

    def extend(self, data: memoryview) -> None:
        """More bytes of what was added last."""
        self._put(data)

    def finish(self) -> WrittenPart:
        self._hashing.shutdown()
        self._blob.commit()
        return WrittenPart(key=self.key, size_bytes=self._digest.size_bytes, digest=self._digest.finish())

    def abort(self) -> None:
        self._hashing.shutdown()
        self._blob.abort()
        forget(self._store, [self.key])

    def _put(self, piece: memoryview) -> None:
        if len(piece) < _SMALLEST_HASHED_BESIDE_BYTES:
            if len(piece):
                self._digest.update(piece)
                self._blob.write(piece)
            return
        hashed = self._hashing.submit(self._digest.update, piece)
        try:
            self._blob.write(piece)
        finally:
            hashed.result()


class PartReader:
    """Verified bytes of one part. Spans are best asked for in the order of their offsets."""

    def __init__(self, store: Store, part: Part, buffer: WindowBuffer) -> None:
        self._store = store
        self._part = part
        self._buffer = buffer
        self._first = self._end = 0
        """The chunks in the buffer."""
        check_part(store, part)

    def pieces(self, span: Span, *, name: str) -> Iterator[tuple[int, memoryview]]:
        """The bytes of a span, front to back: how far into it each piece begins, and the piece. A piece is valid until
        the next is asked for."""
        chunk_bytes = self._part.digest.chunk_bytes
        at_bytes = span.offset_bytes
        while at_bytes < span.end_bytes:
            chunk = at_bytes // chunk_bytes
            if not self._first <= chunk < self._end:
                self._fetch(chunk, -(-span.end_bytes // chunk_bytes), name)
            window_bytes = self._first * chunk_bytes
            upto_bytes = min(span.end_bytes, self._end * chunk_bytes)
            yield (
                at_bytes - span.offset_bytes,
                self._buffer.view[at_bytes - window_bytes : upto_bytes - window_bytes],
            )
            at_bytes = upto_bytes

    def read(self, span: Span, *, name: str) -> bytearray:
        """The bytes of a span, all at once."""
        found = bytearray(span.size_bytes)
        for start, piece in self.pieces(span, name=name):
            found[start : start + len(piece)] = piece
        return found

    def _fetch(self, first: int, wanted_end: int, name: str) -> None:
        """Bring chunks from `first` on into the buffer, as many as are wanted and fit."""
        digest = self._part.digest
        self._first = self._end = first
        end = min(wanted_end, first + max(1, len(self._buffer.view) // digest.chunk_bytes))
        start_bytes = first * digest.chunk_bytes
        size_bytes = min(end * digest.chunk_bytes, self._part.size_bytes) - start_bytes
        view = self._buffer.window(size_bytes)
        self._store.read_into(self._part.key, view, offset=start_bytes)
        check_chunks(self._store, self._part, first, end, view, lambda *_: (name,))
        self._end = end


def check_parts(store: Store, parts: Sequence[Part]) -> None:
    """Raises `Damaged` for a part that is missing or has another size."""
    with ThreadPoolExecutor(_MOST_REQUESTS, thread_name_prefix="strata-parts") as pool:
        for _ in pool.map(lambda part: check_part(store, part), parts):
            pass


def check_chunks(
    store: Store,
    part: Part,
    first: int,
    end: int,
    view: memoryview,
    names: Callable[[int, int], tuple[str, ...]],
) -> None:
    """Raises `Damaged` unless `view` has the bytes of these chunks. `names` tells which tensors have bytes in a range of the
    part."""
    digest = part.digest
    for number in range(first, end):
        begin = (number - first) * digest.chunk_bytes
        if not digest.fits(number, view[begin : begin + digest.chunk_bytes]):
            start_bytes = number * digest.chunk_bytes
            raise Damaged(
                path=where(store, part.key),
                reason=f"bytes changed since they were saved, chunk {number} of {len(digest.chunks)}",
                tensors=names(start_bytes, start_bytes + digest.chunk_bytes),
            )


def forget(store: Store, keys: Iterable[str]) -> None:
    """These parts are named by a manifest, or removed."""
    with _lock:
        _unnamed.get(store.url, set()).difference_update(keys)


def remember_named(store: Store, keys: Iterable[str]) -> None:
    """A manifest of this process names these parts."""
    forget(store, keys)
    with _lock:
        _named[store.url] = tuple(keys)


def named_last(store: Store) -> tuple[str, ...]:
    """What the other ranks may forget: their parts of the save before. Most saves succeed, and so they rarely have to look."""
    with _lock:
        return _named.get(store.url, ())


def clean_up_own_parts(catalog: Catalog) -> None:
    """Remove the parts of this process's earlier saves that never came to be.

    Called when a save begins: the ones before it in this process have ended.
    """
    with _lock:
        mine = set(_unnamed.get(catalog.store.url, ()))
    if mine:
        _remove_unnamed(catalog, mine)
        forget(catalog.store, mine)


def remove_orphans(catalog: Catalog) -> None:
    """Remove the parts of dead writers that no manifest names."""
    store = catalog.store
    now_s, own = time.time(), this_process()
    left = set()
    for blob in store.list(f"{FOLDER}/"):
        writer = writer_of(blob.key)
        if not blob.key.endswith(SUFFIX) or writer is None or writer == own:
            continue
        if writer.has_ended() or now_s - blob.modified_s > _FOREIGN_ORPHAN_AGE_S:
            left.add(blob.key)
    if left:
        _remove_unnamed(catalog, left)


def _remove_unnamed(catalog: Catalog, keys: Iterable[str]) -> None:
    listing = catalog.list(fresh=True)
    if listing.problems:
        return  # A manifest that cannot be read may name any of them.
    named = {part.key for entry in listing.entries for part in entry.manifest.parts}
    for key in sorted(set(keys) - named):
        try:
            catalog.store.delete(key)
        except StoreError as error:
            log.warning("could not remove %s, which belongs to no checkpoint: %s", key, error)
        else:
            log.info("removed %s: its save was never finished", key)
