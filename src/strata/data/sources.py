"""Files of a dataset, on disk or in object storage, read by range.

`find` turns what a user wrote (a file, a directory, a glob, a URL) into the files it names, in a stable order.
A `Source` reads any range of one of them. Local reads use positions of their own, so that processes which
inherit a file from their parent do not disturb each other. Never writes.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.data.errors import DataError
from strata.stores import InvalidStoreURL, Store, StoreError, open_store

CHUNK_BYTES = 4 * 2**20
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A file that exists, and what tells whether it has changed since."""

    path: str
    size_bytes: int
    modified_s: float


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
    """An object in S3, GCS or Azure."""

    def __init__(self, url: str) -> None:
        self.path = url
        self._store, self._key = _client(url)
        try:
            blob = self._store.stat(self._key)
        except StoreError as error:
            raise DataError.at(url, error.message, hint=error.hint) from error
        if blob is None:
            raise _missing(url)
        self.size_bytes = blob.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        try:
            return self._store.read(self._key, offset=offset, length=length)
        except StoreError as error:
            raise DataError.at(self.path, error.message, hint=error.hint) from error

    def close(self) -> None:
        pass


def is_remote(path: str) -> bool:
    return "://" in path


def open_source(path: str) -> Source:
    return StoredSource(path) if is_remote(path) else LocalSource(path)


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
            hint="Give a file, a directory, a glob like 'data/*.jsonl', or s3://bucket/prefix.",
        )
    return matching


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
                )
    except StoreError as error:
        raise DataError.at(url, error.message, hint=error.hint) from error


def _client(url: str) -> tuple[Store, str]:
    """The store that holds a URL, and the key there."""
    if _FORKED_WITH_CLIENT:
        raise DataError.at(
            url,
            "this process was forked from one that uses object storage, whose client does not survive a fork",
            hint="Give the loader multiprocessing_context='spawn'; ElasticLoader does so by itself.",
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
        path, "there is no such file", hint="Was it moved or deleted since it was registered?"
    )


def _unreadable(path: str, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return _missing(path)
    return DataError.at(path, f"{error.strerror or error}", hint="Check that this user may read it.")
