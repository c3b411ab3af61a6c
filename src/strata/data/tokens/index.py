"""Reading a token index: any token in constant time, in memory that does not grow with the index.

`TokenIndex` maps the file and reads no more than its header until asked. Whether the index still fits its
sources is the business of `freshness`; in which order training reads it, that of `sequences`.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from strata.data.streaming.sources import Source, is_remote, open_source
from strata.data.tokens.errors import IndexNotFound, InvalidIndex
from strata.data.tokens.format import TOKENS_AT, IndexEntry, IndexHeader, IndexMeta, identity_of

Tokens = NDArray[np.uint16] | NDArray[np.uint32]

RESIDENT_LIMIT_BYTES = 64 << 20
"""How much of the mapping a long reader keeps in its own page table before it lets go of it."""

FAULT_BYTES = 64 << 10
"""What the kernel maps around one touched page: the cost of reading one sequence at random."""


class RemoteBytes:
    """Slices of an object, as of a mapped file."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.source.size_bytes)
        return self.source.read(start, stop - start)

    def close(self) -> None:
        self.source.close()


class RemoteArray:
    """Slices and single values of an array in an object: what readers ask of a mapped one."""

    def __init__(self, source: Source, at: int, count: int, dtype: np.dtype[Any]) -> None:
        self._source = source
        self._at = at
        self._count = count
        self.dtype = dtype

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int]:
        return (self._count,)

    def __getitem__(self, part: int | slice) -> Any:
        size = self.dtype.itemsize
        if isinstance(part, slice):
            start, stop, step = part.indices(self._count)
            data = self._source.read(self._at + start * size, max(stop - start, 0) * size)
            return np.frombuffer(data, self.dtype)[::step]
        number = range(self._count)[part]
        return np.frombuffer(self._source.read(self._at + number * size, size), self.dtype)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)


class TokenIndex:
    """One index file, mapped. Use as a context manager, or leave it to the garbage collector."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.url = os.fspath(path) if is_remote(os.fspath(path)) else ""
        """Where it is, if it is in object storage: then it is read in place, through this machine's cache."""
        self._touched_bytes = 0
        self.header: IndexHeader
        if self.url:
            self._map: Any = self._open_remote()
            self.tokens: Tokens = self._section(TOKENS_AT, self.header.total_tokens, self._token_type)
            return
        try:
            with self.path.open("rb") as file:
                self.header = IndexHeader.from_bytes(file.read(IndexHeader.SIZE))
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes != self.header.file_bytes:
                    raise InvalidIndex(
                        f"is cut short or grown: {size_bytes:,} bytes where {self.header.file_bytes:,} belong.",
                        hint="Build it again.",
                    )
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise IndexNotFound(self.path) from None
        except IsADirectoryError:
            raise InvalidIndex(
                f"{self.path} is a folder, not a token index.",
                hint="Name the file that `strata index` has written.",
            ) from None
        except InvalidIndex as error:
            raise InvalidIndex(f"{self.path}: {error.message}", hint=error.hint) from None
        # Sequences are read in shuffled order: reading ahead would fetch what was not asked for.
        self._map.madvise(mmap.MADV_RANDOM)
        self.tokens = self._section(TOKENS_AT, self.header.total_tokens, self._token_type)

    @property
    def is_remote(self) -> bool:
        return bool(self.url)

    @property
    def _token_type(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.header.token_bytes == 2 else "<u4")

    def _open_remote(self) -> RemoteBytes:
        source = open_source(self.url)
        try:
            self.header = IndexHeader.from_bytes(source.read(0, IndexHeader.SIZE))
        except InvalidIndex as error:
            raise InvalidIndex(f"{self.url}: {error.message}", hint=error.hint) from None
        if source.size_bytes != self.header.file_bytes:
            raise InvalidIndex(
                f"{self.url}: is cut short or grown: {source.size_bytes:,} bytes where {self.header.file_bytes:,} belong.",
                hint="Upload it again.",
            )
        return RemoteBytes(source)

    def _section(self, at: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        if isinstance(self._map, RemoteBytes):
            return cast(NDArray[Any], RemoteArray(self._map.source, at, count, dtype))
        return np.frombuffer(self._map, dtype, count=count, offset=at)

    @property
    def total_tokens(self) -> int:
        return self.header.total_tokens

    @property
    def num_files(self) -> int:
        return self.header.num_files

    @property
    def identity(self) -> str:
        """Equal for two indexes exactly when they hold the same tokens from the same sources."""
        return self.header.identity.hex()

    @cached_property
    def meta(self) -> IndexMeta:
        data = self._map[self.header.meta_at : self.header.meta_at + self.header.meta_bytes]
        if identity_of(data) != self.header.identity:
            raise InvalidIndex(f"{self.path}: metadata is damaged: digest differs.", hint="Build it again.")
        return IndexMeta.from_bytes(data)

    @property
    def source(self) -> Source | None:
        """Where it is read from in place; None where it is mapped."""
        return self._map.source if isinstance(self._map, RemoteBytes) else None

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """Offset and length of tokens [start, stop) in the file."""
        size = self.header.token_bytes
        return TOKENS_AT + start * size, max(min(stop, self.total_tokens) - start, 0) * size

    def entry(self, number: int) -> IndexEntry:
        """Landmark `number`: the record that holds token `number * entry_interval`."""
        if not 0 <= number < self.header.num_entries:
            raise IndexError(f"entry {number} of {self.header.num_entries}")
        at = self.header.entries_at + number * IndexEntry.SIZE
        return IndexEntry.from_bytes(self._map[at : at + IndexEntry.SIZE])

    def find_position(self, token: int) -> tuple[int, int, int]:
        """Where a token comes from: source file, place of its record there, tokens into that record."""
        if token < 0:
            raise ValueError(f"Token position {token} is negative")
        if token >= self.total_tokens:
            raise ValueError(f"Token position {token} exceeds total tokens ({self.total_tokens})")
        interval = token // self.header.entry_interval
        if interval >= self.header.num_entries:
            raise self._damaged("landmarks are missing")
        lo = self.entry(interval).record
        last = interval + 1 >= self.header.num_entries
        hi = self.header.num_records if last else self.entry(interval + 1).record + 1
        if not lo < hi <= self.header.num_records:
            raise self._damaged("a landmark is out of place")
        record = bisect_right(self._starts, token, lo, hi) - 1
        file_index = bisect_right(self.meta.files, record, key=lambda file: file.first_record) - 1
        if record < lo or file_index < 0:
            raise self._damaged("a record starts out of place")
        return file_index, int(self._places[record]), token - int(self._starts[record])

    def _damaged(self, what: str) -> InvalidIndex:
        return InvalidIndex(f"{self.path}: is damaged: {what}.", hint="Build it again.")

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """The first token of each record of the sources, in their order."""
        return np.asarray(self._starts).view(np.int64)

    @cached_property
    def _starts(self) -> NDArray[np.uint64]:
        return self._section(self.header.starts_at, self.header.num_records, np.dtype("<u8"))

    @cached_property
    def _places(self) -> NDArray[np.uint64]:
        return self._section(self.header.places_at, self.header.num_records, np.dtype("<u8"))

    def let_go(self, read_bytes: int) -> None:
        """Note that `read_bytes` more were read. From time to time, the mapped pages are dropped from this process
        (they stay in the page cache), so that its memory does not grow towards the size of the index."""
        self._touched_bytes += read_bytes
        if not self.url and self._touched_bytes >= RESIDENT_LIMIT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched_bytes = 0

    def close(self) -> None:
        """Unmap the file. Views of `tokens` that are still held keep it mapped until they go."""
        self.tokens = np.empty(0, np.uint16)
        self.__dict__.pop("_starts", None)
        self.__dict__.pop("document_starts", None)
        self.__dict__.pop("_places", None)
        with suppress(BufferError):  # a caller still holds a view; the map goes with it
            self._map.close()

    def __enter__(self) -> TokenIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (
            self.url or self.path.absolute(),
            self.header.identity,
        )  # a loader process maps the file itself


def _reopened(path: Path | str, identity: bytes) -> TokenIndex:
    index = TokenIndex(path)
    if index.header.identity != identity:
        raise InvalidIndex(
            f"{path}: was replaced by another index while in use.", hint="Start training again."
        )
    return index
