"""NumPy `.npy` arrays: the first axis counts samples. Rows are read by range, nothing is mapped or unpickled."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row
from strata.data.streaming.sources import Source

_HEADER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyFormat:
    name: str = "npy"
    suffixes: tuple[str, ...] = (".npy",)

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        shape, dtype, start = _header(source)
        needed = start + math.prod(shape) * dtype.itemsize
        if source.size_bytes < needed:
            raise DataError.at(source.path, f"the file is cut off: {source.size_bytes:,} of {needed:,} bytes")
        return FileIndex(rows=shape[0])

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Npy(source)


class _Npy:
    def __init__(self, source: Source) -> None:
        self._source = source
        shape, self._dtype, self._start = _header(source)
        self._shape = shape[1:]
        self._row_bytes = math.prod(self._shape) * self._dtype.itemsize

    def read(self, rows: Sequence[int]) -> list[Row]:
        return [{"data": self._row(row)} for row in rows]

    def _row(self, row: int) -> Any:
        data = self._source.read(self._start + row * self._row_bytes, self._row_bytes)
        array = np.frombuffer(data, self._dtype).reshape(self._shape).copy()
        return array if self._shape else array.item()

    def close(self) -> None:
        self._source.close()


def _header(source: Source) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    file = io.BytesIO(source.read(0, _HEADER_BYTES))
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except ValueError as error:
        raise DataError.at(source.path, f"not a readable .npy file ({error})") from error
    if dtype.hasobject:
        raise DataError.at(
            source.path, "it holds pickled objects, which are never loaded", hint="Save an array of numbers."
        )
    if fortran_order or not shape:
        raise DataError.at(
            source.path,
            "its samples do not lie one after the other" if shape else "it is a single number",
            hint="Save it with np.save(path, np.ascontiguousarray(array)).",
        )
    return shape, dtype, file.tell()


NPY = NpyFormat()
