"""Parquet and Arrow files through pyarrow.

Rows are counted from metadata alone. A row is read by reading the row group or record batch it is in, of which
a bounded number stays in memory; local Arrow files are mapped, so that theirs cost nothing. Files whose row
groups are large are slow to read in a shuffled order: write them with row groups of a few thousand rows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row, arrow, group_rows
from strata.data.streaming.sources import LocalSource, Source
from strata.files import RangeFile

Place = Callable[[int], tuple[int, int]]
Pieces = tuple[list[int], Callable[[int], Any], Place | None]
"""Rows of each piece of a file, how to read one as a table, and where in the file it is: offset and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnarFormat:
    name: str
    suffixes: tuple[str, ...]
    pieces: Callable[[Source], Pieces]

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        sizes, _, _ = _opened(self, source)
        bounds = np.r_[0, np.cumsum(sizes)].astype(np.int64)
        return FileIndex(rows=int(bounds[-1]), arrays={"first": bounds[:-1]})

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Columnar(self, source, index, cache)


class _Columnar:
    def __init__(self, format: ColumnarFormat, source: Source, index: FileIndex, cache: Cache) -> None:
        self.source = source
        self._cache = cache
        self._first = index.arrays["first"]
        _, self._load, self._place = _opened(format, source)

    def read(self, rows: Sequence[int]) -> list[Row]:
        answer: list[Row] = [{}] * len(rows)
        for piece, wanted in group_rows(rows, self._first).items():
            table = self._cache.get((self.source.path, piece), partial(self._piece, piece), _size_bytes)
            for (place, _), row in zip(
                wanted, table.take([row for _, row in wanted]).to_pylist(), strict=True
            ):
                answer[place] = row
        return answer

    def ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return [self._place(piece) for piece in group_rows(rows, self._first)] if self._place else []

    def _piece(self, number: int) -> Any:
        pa = arrow("Parquet and Arrow files")
        try:
            return self._load(number)
        except MemoryError:  # Arrow's own is one of its exceptions too, and says nothing about the file.
            raise
        except (pa.ArrowException, OSError) as error:
            raise DataError.at(
                self.source.path, f"damaged ({error})", line=number + 1, unit="row group"
            ) from error

    def close(self) -> None:
        self.source.close()


def _size_bytes(table: Any) -> int:
    return int(table.nbytes)


def _opened(format: ColumnarFormat, source: Source) -> Pieces:
    pa = arrow("Parquet and Arrow files")
    try:
        return format.pieces(source)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError.at(source.path, f"not a readable {format.name} file ({error})") from error


def _parquet(source: Source) -> Pieces:
    arrow("Parquet files")
    from pyarrow import parquet

    # Pages that were written with a checksum are compared with it when they are read.
    file = parquet.ParquetFile(_file(source), page_checksum_verification=True)
    metadata = file.metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def place(number: int) -> tuple[int, int]:
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        starts = [c.dictionary_page_offset or c.data_page_offset for c in columns]
        stops = [s + c.total_compressed_size for s, c in zip(starts, columns, strict=True)]
        return min(starts, default=0), max(stops, default=0) - min(starts, default=0)

    return sizes, lambda number: file.read_row_group(number, use_threads=False), place


def _ipc(source: Source) -> Pieces:
    """The file format has a footer; the stream format, which `datasets` writes, is read through once."""
    pa = arrow("Arrow files")
    try:
        reader = pa.ipc.open_file(_file(source))
    except pa.ArrowInvalid:
        batches = list(pa.ipc.open_stream(_file(source)))
        return [b.num_rows for b in batches], lambda number: pa.Table.from_batches([batches[number]]), None
    sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    return sizes, lambda number: pa.Table.from_batches([reader.get_batch(number)]), None


def _file(source: Source) -> Any:
    pa = arrow("Parquet and Arrow files")
    if isinstance(source, LocalSource) and source.size_bytes:
        # Through the file that is open, not its path: that may lead elsewhere by now.
        return pa.BufferReader(pa.py_buffer(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)))
    return pa.PythonFile(RangeFile(source.read, source.size_bytes), mode="r")


PARQUET = ColumnarFormat(name="parquet", suffixes=(".parquet", ".pq"), pieces=_parquet)
ARROW = ColumnarFormat(name="arrow", suffixes=(".arrow", ".feather", ".ipc"), pieces=_ipc)
