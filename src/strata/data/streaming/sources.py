"""Files of a dataset, on disk or in object storage, read by range.

`find` turns what a user wrote (a file, a directory, a glob, a URL) into the files it names, in a stable order.
A `Source` reads any range of one of them. Local reads use positions of their own, so that processes which
inherit a file from their parent do not disturb each other. Datasets are never written to.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.data.errors import DataError
from strata.data.streaming.block_cache import block_cache
from strata.stores import InvalidStoreURL, NotFound, Replaced, Store, StoreError, open_store
from strata.stores.protocol import VersionReader

CHUNK_BYTES = 4 * 2**20
BLOCK_BYTES = 4 * 2**20
"""In which remote files are fetched and kept."""
READ_AHEAD_BLOCKS = 6
FETCH_THREADS = 6
UNDER_WAY_BYTES = 128 * 2**20
IN_MEMORY_BYTES = 64 * 2**20
"""So much of the blocks it fetched itself a process keeps, so that they are read without the disk; and so much at most of what
it fetched of blocks that no disk keeps."""
_STALE_S = 60.0
"""What was fetched ahead so long ago and not read makes way for more."""
_PEEK_BYTES = 64
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A file that exists, and what tells whether it has changed since."""

    path: str
    size_bytes: int
    modified_s: float
    version: str = ""
    """Of an object: differs where it was replaced."""


class Source(Protocol):
    """One open file."""

    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """The bytes at [offset, offset + length), fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


Permit = Callable[[int, str], None]
"""Raises for an open file, and the path it was opened by, that must not be read."""

_permit: Permit | None = None


def restrict_to(permit: Permit) -> None:
    """For a process that reads on behalf of others: every local file is shown to `permit` once it is open, so that what
    was permitted is what is read."""
    global _permit
    _permit = permit


class LocalSource:
    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from error
        if _permit is not None:
            _permit(self._fd, path)
        self.size_bytes = os.fstat(self._fd).st_size

    def fileno(self) -> int:
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length and (more := os.pread(self._fd, length - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class StoredSource:
    """An object in S3, GCS or Azure: one version of it, read through the cache of this machine.

    Ranges are read in blocks, which are kept on disk and shared. What is read from front to back is fetched ahead. Where a
    dataset is larger than the cache, or there is none, small reads out of order fetch what they ask for and nothing more.
    """

    def __init__(
        self, url: str, *, version: str = "", size_bytes: int | None = None, set_bytes: int = 0
    ) -> None:
        """`version` and `size_bytes` as a listing reported them; else they are asked for. `set_bytes`: of the whole dataset."""
        self.path = url
        self._store, self._key = _client(url)
        if size_bytes is None:
            try:
                blob = self._store.stat(self._key)
            except StoreError as error:
                raise DataError.at(url, error.message, hint=error.hint) from error
            if blob is None:
                raise _missing(url)
            version, size_bytes = blob.version, blob.size_bytes
        self.size_bytes = size_bytes
        self.version = version
        self._cache = block_cache()
        self._is_set_larger = max(set_bytes, size_bytes) > self._cache.limit_bytes
        self._file = f"{url}\n{version}"
        self._names: dict[int, str] = {}
        self._expected = 0
        """Where a read that continues the last one begins."""
        self._run_bytes = 0
        """How much was read from front to back before that."""
        self._ahead_to = 0
        """Blocks before this one are on their way, or here."""

    def read(self, offset: int, length: int) -> bytes:
        found = self.view(offset, length)
        whole = found.obj
        return whole if isinstance(whole, bytes) and len(whole) == len(found) else bytes(found)

    def view(self, offset: int, length: int) -> memoryview:
        """As `read`, without copying what is in memory. What is kept of it keeps a whole block alive."""
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return memoryview(b"")
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        if not 0 <= offset - self._expected <= BLOCK_BYTES // 64:
            self._run_bytes = 0
        is_sequential = self._run_bytes >= BLOCK_BYTES // 8  # The files of one sample are no run yet.
        self._run_bytes += length
        self._expected = offset + length
        if is_sequential:
            if last + 1 + READ_AHEAD_BLOCKS != self._ahead_to:
                self._fetch_ahead(last)
        elif self._is_set_larger and length <= BLOCK_BYTES // 8:
            return self._piece(offset, length, first, last)
        if first == last and self._cache.limit_bytes:
            start = offset - first * BLOCK_BYTES
            return self._block(first, start, start + length)
        return self._joined(offset, length, first, last)

    def prefetch(self, ranges: Sequence[tuple[int, int]], *, in_memory: bool = True) -> None:
        """Fetch what will be read soon, beside other work; without `in_memory`, by other processes alone. Never waits; what cannot
        be fetched is found out when it is read."""
        if not in_memory and not self._cache.limit_bytes:
            return
        begin = 0
        for end in range(1, len(ranges) + 1):  # Those that follow each other are one.
            if end < len(ranges) and ranges[end][0] == sum(ranges[end - 1]):
                continue
            start, stop = ranges[begin][0], min(sum(ranges[end - 1]), self.size_bytes)
            if self._is_set_larger and stop - start <= BLOCK_BYTES // 8:
                for offset, length in ranges[begin:end] if in_memory else ():
                    self._start_piece(offset, length)
            else:
                for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
                    self._start(block)
            begin = end

    def close(self) -> None:
        pass

    def _fetch_ahead(self, block: int) -> None:
        stop = min(block + 1 + READ_AHEAD_BLOCKS, -(-self.size_bytes // BLOCK_BYTES))
        for ahead in range(max(block, self._ahead_to if self._ahead_to <= stop else 0), stop):
            self._start(ahead)
        self._ahead_to = block + 1 + READ_AHEAD_BLOCKS

    def _start(self, number: int) -> None:
        name = self._name(number)
        if not _fetching.has(name) and not self._cache.has(name):
            _fetching.start(name, self._block_bytes(number), lambda arrived: self._fill(number, arrived))

    def _start_piece(self, offset: int, length: int) -> None:
        name = self._name(offset // BLOCK_BYTES)
        if not _fetching.has(name) and not self._cache.has(name):
            _fetching.start_piece(self._file, offset, length, lambda: self._fetch(offset, length))

    def _piece(self, offset: int, length: int, first: int, last: int) -> memoryview:
        """A small part of blocks that need not be here."""
        if (fetched := _fetching.wait_piece(self._file, offset, length)) is not None:
            return fetched
        if all(
            _fetching.has(self._name(n)) or self._cache.has(self._name(n)) for n in range(first, last + 1)
        ):
            return self._joined(offset, length, first, last)
        return self._fetch(offset, length)

    def _joined(self, offset: int, length: int, first: int, last: int) -> memoryview:
        for block in range(first, last + 1):
            self._start(block)
        pieces = []
        for block in range(first, last + 1):
            start = max(offset - block * BLOCK_BYTES, 0)
            stop = min(offset + length - block * BLOCK_BYTES, BLOCK_BYTES)
            pieces.append(self._block(block, start, stop))
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def _block(self, number: int, start: int, stop: int) -> memoryview:
        name = self._name(number)
        if (fetched := _fetching.wait(name)) is not None:
            return fetched[start:stop]
        return self._cache.read(
            name, self._block_bytes(number), start, stop, lambda: self._fetch_block(number)
        )

    def _fill(self, number: int, arrived: Callable[[memoryview], None]) -> None:
        """Have a block in the cache. Where it is fetched, `arrived` has its bytes before they are written."""

        def fetch() -> memoryview:
            data = self._fetch_block(number)
            arrived(data)
            return data

        name = self._name(number)
        if not self._cache.has(name):
            self._cache.fill(name, self._block_bytes(number), fetch)

    def _name(self, number: int) -> str:
        name = self._names.get(number)
        if name is None:
            text = f"{self.path}\n{self.version}\n{self.size_bytes}\n{BLOCK_BYTES}\n{number}"
            name = self._names[number] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return name

    def _block_bytes(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size_bytes - number * BLOCK_BYTES)

    def _fetch_block(self, number: int) -> memoryview:
        return self._fetch(number * BLOCK_BYTES, self._block_bytes(number))

    def _fetch(self, offset: int, length: int) -> memoryview:
        try:
            if isinstance(self._store, VersionReader):
                return self._store.read_version(self._key, self.version, offset=offset, length=length)
            return memoryview(self._store.read(self._key, offset=offset, length=length))
        except NotFound as error:
            raise _missing(self.path) from error
        except Replaced as error:
            raise DataError.at(
                self.path,
                "the object was replaced since it was first looked at",
                hint="Data must not change during an epoch: restore the version it had, or register it again.",
                command_hint="Run the command again while the data does not change.",
            ) from error
        except StoreError as error:
            raise DataError.at(self.path, error.message, hint=error.hint) from error


@dataclass(slots=True)
class _Piece:
    """A range that is fetched ahead of the one who reads it, or parts of it."""

    file: str
    start: int
    stop: int
    started_s: float
    arrived: Future[memoryview | None]
    is_read: bool = False


class _Fetching:
    """What is fetched beside reading, in a few threads of this process. Never raises: the thread that reads what could not be
    fetched tries it again, and reports what is wrong.

    A block can be read as soon as its bytes are here, while they are written to the cache. The last few stay in memory. Pieces of
    blocks that no disk keeps stay until others need the space after they were read; where all of it waits to be read, no more is fetched.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._under_way: dict[str, Future[None]] = {}
        """Until they are written; each is done once its bytes are here."""
        self._under_way_bytes = 0
        self._recent: dict[str, memoryview] = {}
        self._recent_bytes = 0
        self._pieces: dict[str, list[_Piece]] = {}
        """By file."""
        self._pieces_in_turn: deque[_Piece] = deque()
        self._pieces_bytes = 0

    def has(self, name: str) -> bool:
        """Whether a block is in memory, or on its way."""
        return name in self._recent or name in self._under_way

    def start(self, name: str, size_bytes: int, fill: Callable[[Callable[[memoryview], None]], None]) -> None:
        """Fetch a block. `fill` calls what it is given as soon as the bytes are here."""
        self._after_fork()
        with self._lock:
            if self.has(name) or self._under_way_bytes + size_bytes > UNDER_WAY_BYTES:
                return
            arrived: Future[None] = Future()
            self._under_way[name] = arrived
            self._under_way_bytes += size_bytes
            self._threads().submit(self._fetch, name, size_bytes, fill, arrived)

    def wait(self, name: str) -> memoryview | None:
        """The block, once it is here; None where it was not fetched, or is in memory no more."""
        self._after_fork()
        if (arrived := self._under_way.get(name)) is not None:
            arrived.result()
        return self._recent.get(name)

    def start_piece(self, file: str, offset: int, length: int, fetch: Callable[[], memoryview]) -> None:
        self._after_fork()
        now_s = time.monotonic()
        with self._lock:
            while self._pieces_in_turn and self._pieces_bytes + length > IN_MEMORY_BYTES:
                oldest = self._pieces_in_turn[0]
                if not oldest.is_read and now_s - oldest.started_s < _STALE_S:
                    return
                self._pieces_in_turn.popleft()
                self._pieces[oldest.file].remove(oldest)
                self._pieces_bytes -= oldest.stop - oldest.start
            of_file = self._pieces.setdefault(file, [])
            if any(each.start <= offset and offset + length <= each.stop for each in of_file):
                return
            piece = _Piece(file, offset, offset + length, now_s, Future())
            of_file.append(piece)
            self._pieces_in_turn.append(piece)
            self._pieces_bytes += length
            self._threads().submit(self._fetch_piece, piece, fetch)

    def wait_piece(self, file: str, offset: int, length: int) -> memoryview | None:
        """What was fetched ahead, once it is here; None where it was not."""
        self._after_fork()
        with self._lock:
            for piece in self._pieces.get(file, ()):
                if piece.start <= offset and offset + length <= piece.stop:
                    break
            else:
                return None
        data = piece.arrived.result()
        piece.is_read = True
        return None if data is None else data[offset - piece.start : offset - piece.start + length]

    def forget(self) -> None:
        """Everything under way is written, and nothing fetched is in memory."""
        while True:  # Others may start more meanwhile.
            with self._lock:
                pool, self._pool = self._pool, None
                if pool is None:
                    self._clear()
                    return
            pool.shutdown(wait=True)

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._pool, self._pid, self._lock = None, os.getpid(), threading.Lock()
            self._clear()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FETCH_THREADS, "strata-fetch")
        return self._pool

    def _fetch(
        self,
        name: str,
        size_bytes: int,
        fill: Callable[[Callable[[memoryview], None]], None],
        arrived: Future[None],
    ) -> None:
        def keep(data: memoryview) -> None:
            with self._lock:
                self._recent[name] = data
                self._recent_bytes += len(data)
                while self._recent_bytes > IN_MEMORY_BYTES:  # The oldest first: they were read first.
                    self._recent_bytes -= len(self._recent.pop(next(iter(self._recent))))
            arrived.set_result(None)

        try:
            with suppress(Exception):
                fill(keep)
        finally:
            if not arrived.done():
                arrived.set_result(None)
            with self._lock:
                self._under_way.pop(name, None)
                self._under_way_bytes -= size_bytes

    def _fetch_piece(self, piece: _Piece, fetch: Callable[[], memoryview]) -> None:
        data = None
        try:
            with suppress(Exception):
                data = fetch()
        finally:
            piece.arrived.set_result(data)


_fetching = _Fetching()


def forget_fetched() -> None:
    """Wait until what was fetched is in the cache, and keep none of it in memory: for measurements that begin cold."""
    _fetching.forget()


class WatchedSource:
    """A source that tells how far it was read."""

    def __init__(self, source: Source, seen: Callable[[int], None], *, seen_bytes: int = 0) -> None:
        self.path = source.path
        self.size_bytes = source.size_bytes
        self._source = source
        self._seen = seen
        self.seen_bytes = seen_bytes

    def read(self, offset: int, length: int) -> bytes:
        data = self._source.read(offset, length)
        is_peek = length <= _PEEK_BYTES  # At a header ahead.
        if not is_peek and offset + len(data) > self.seen_bytes and offset <= self.seen_bytes + CHUNK_BYTES:
            new, self.seen_bytes = offset + len(data) - self.seen_bytes, offset + len(data)
            self._seen(new)
        return data

    def close(self) -> None:
        self._source.close()


def is_remote(path: str) -> bool:
    return "://" in path


def open_source(path: str, *, version: str = "", size_bytes: int | None = None, set_bytes: int = 0) -> Source:
    """`version` and `size_bytes` of an object as they were when it was found: another one is refused."""
    if not is_remote(path):
        return LocalSource(path)
    return StoredSource(
        path, version=version, size_bytes=size_bytes if version else None, set_bytes=set_bytes
    )


def find(path: str | os.PathLike[str], suffixes: tuple[str, ...] = ()) -> list[FileRef]:
    """The files that `path` names, sorted by path. A directory or prefix gives those with one of `suffixes`,
    at any depth, without hidden ones. Raises `DataError` where there is none."""
    text = os.fspath(path).removeprefix("file://")
    found = sorted(_find_stored(text) if is_remote(text) else _find_local(text), key=lambda ref: ref.path)
    if len(found) == 1 and found[0].path == text:
        return found  # Named outright: whatever its suffix.
    matching = [ref for ref in found if not suffixes or ref.path.lower().endswith(suffixes)]
    if not matching:
        wanted = f" with {' or '.join(suffixes)}" if found and suffixes else ""
        raise DataError.at(
            text,
            f"there is no such file{wanted}"
            if found or _has_magic(text)
            else "there is no such file or directory",
            hint="Pass a file, a directory, a glob like 'data/*.jsonl', or s3://bucket/prefix.",
        )
    return matching


def put_object(url: str, data: bytes) -> None:
    """Write an object that describes a dataset, beside it."""
    store, key = _client(url)
    try:
        store.put(key, data)
    except StoreError as error:
        raise DataError.at(url, error.message, hint=error.hint) from error


def is_visible(path: str) -> bool:
    """Whether this process can see any file there."""
    try:
        return bool(find(path))
    except DataError:
        return False


def chunks(source: Source, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The file from `start` on, as (offset, bytes)."""
    while data := source.read(start, CHUNK_BYTES):
        yield start, data
        start += len(data)


def refuse_compressed(source: Source) -> None:
    """A sample in the middle of a compressed file cannot be reached without reading all before it."""
    head = source.read(0, 6)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise DataError.at(
                source.path,
                f"it is compressed with {name}, and cannot be read from the middle",
                hint="Decompress it first, or convert it to parquet.",
            )


def _find_local(text: str) -> Iterator[FileRef]:
    path = Path(text)
    if path.is_dir():
        names = (Path(folder) / name for folder, _, files in os.walk(path) for name in files)
        candidates = [p for p in names if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    elif path.exists():
        candidates = [path]
    else:
        candidates = [Path(name) for name in glob.glob(text, recursive=True)]
    for candidate in candidates:
        if candidate.is_file():
            stat = candidate.stat()
            yield FileRef(path=str(candidate), size_bytes=stat.st_size, modified_s=stat.st_mtime)


def _find_stored(url: str) -> Iterator[FileRef]:
    store, key = _client(url)
    fixed = key
    for magic in "*?[":
        fixed = fixed.split(magic)[0]
    try:
        for blob in store.list(fixed):
            inside = blob.key == key or blob.key.startswith(key.rstrip("/") + "/" if key else "")
            if fnmatch.fnmatchcase(blob.key, key) if _has_magic(key) else inside:
                yield FileRef(
                    path=f"{_split_url(url)[0]}/{blob.key}",
                    size_bytes=blob.size_bytes,
                    modified_s=blob.modified_s,
                    version=blob.version,
                )
    except StoreError as error:
        raise DataError.at(url, error.message, hint=error.hint) from error


def _client(url: str) -> tuple[Store, str]:
    """The store that holds a URL, and the key there."""
    if _FORKED_WITH_CLIENT:
        raise DataError.at(
            url,
            "this process was forked from one that uses object storage, whose client does not survive a fork",
            hint="Pass multiprocessing_context='spawn' to the loader; ElasticLoader does so by itself.",
        )
    bucket, key = _split_url(url)
    try:
        return _store_of(bucket), key
    except InvalidStoreURL as error:
        raise DataError.at(
            url, "no store of this kind is known", hint="Use a path, or s3://, gs:// or az://."
        ) from error


@functools.lru_cache(maxsize=16)
def _store_of(bucket: str) -> Store:
    return open_store(bucket)


_FORKED_WITH_CLIENT = False


def _note_fork() -> None:
    """A request of an inherited client would wait for ever: its threads stayed in the parent."""
    global _FORKED_WITH_CLIENT
    _FORKED_WITH_CLIENT = "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_fork)


def _split_url(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return f"{scheme}://{bucket}", key


def _has_magic(text: str) -> bool:
    return any(c in text for c in "*?[")


def _missing(path: str) -> DataError:
    return DataError.at(
        path,
        "there is no such file",
        hint="Was it moved or deleted since it was registered?",
        command_hint="Was it moved or deleted meanwhile? List the files: strata data stat URL.",
    )


def _unreadable(path: str, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return _missing(path)
    return DataError.at(path, f"{error.strerror or error}", hint="Check that this user may read it.")
