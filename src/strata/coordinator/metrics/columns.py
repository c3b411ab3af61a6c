"""Columns of numbers as bytes, exactly and as small as is cheap.

Steps that follow at equal distances are two numbers, a column of one value is one, and doubles that are exactly single
precision, as most of what a training loop computes is, take four bytes. What cannot be read raises `ValueError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from strata.core.telemetry.downsampling import FACTOR, Buckets

_HEAD = struct.Struct("<BI")
_RANGE = struct.Struct("<qq")
_RANGED, _INTS, _SAME, _SINGLE, _DOUBLE = range(5)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def pack(level: int, buckets: Buckets) -> bytes:
    """Buckets of one level: of level 0 the values themselves."""
    columns = (
        (_ints(buckets.first), _floats(buckets.final))
        if level == 0
        else (
            _ints(buckets.first),
            _ints(buckets.last),
            _ints(buckets.bad),
            _floats(buckets.low),
            _floats(buckets.high),
            _floats(buckets.mean),
            _floats(buckets.final),
        )
    )
    return b"".join(_HEAD.pack(kind, len(body)) + body for kind, body in columns)


def unpack(level: int, count: int, data: bytes) -> Buckets:
    columns = _columns(data, count)
    if level == 0:
        steps, values = columns
        return Buckets.of(steps, values)
    first, last, bad, low, high, mean, final = columns
    counts = np.full(count, FACTOR**level, np.int64)
    return Buckets(first, last, counts, bad, low, high, mean, final)  # type: ignore[arg-type]


def _ints(column: Ints) -> tuple[int, bytes]:
    stride = int(column[1] - column[0]) if len(column) > 1 else 0
    if (np.diff(column) == stride).all():
        return _RANGED, _RANGE.pack(int(column[0]), stride)
    return _INTS, column.astype("<i8").tobytes()


def _floats(column: Floats) -> tuple[int, bytes]:
    bits = np.ascontiguousarray(column, "<f8").view("<i8")
    if (bits == bits[0]).all():
        return _SAME, bits[:1].tobytes()
    with np.errstate(over="ignore"):
        single = column.astype("<f4")
    if np.array_equal(single.astype("<f8"), column, equal_nan=True):
        return _SINGLE, single.tobytes()
    return _DOUBLE, bits.tobytes()


def _columns(data: bytes, count: int) -> Iterator[Ints | Floats]:
    at = 0
    while at < len(data):
        kind, size = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        column: Ints | Floats
        if kind == _RANGED:
            start, stride = _RANGE.unpack(body)
            column = start + stride * np.arange(count, dtype=np.int64)
        elif kind == _INTS:
            column = np.frombuffer(body, "<i8").astype(np.int64)
        elif kind == _SAME:
            column = np.full(count, np.frombuffer(body, "<f8")[0])
        elif kind in (_SINGLE, _DOUBLE):
            column = np.frombuffer(body, "<f4" if kind == _SINGLE else "<f8").astype(np.float64)
        else:
            raise ValueError(f"there is no column of kind {kind}")
        if len(column) != count:
            raise ValueError(f"a column has {len(column)} numbers instead of {count}")
        yield column
