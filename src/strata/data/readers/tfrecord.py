"""TFRecord files, without TensorFlow.

Lengths are checked against their checksum while indexing, contents against theirs when read. A record that is a
`tf.train.Example` becomes its features; anything else is given as it is, under `record`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row
from strata.data.readers.crc32c import masked_crc32c
from strata.data.streaming.sources import CHUNK_BYTES, Source, refuse_compressed

_HEADER_BYTES, _FOOTER_BYTES = 12, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TFRecordFormat:
    name: str = "tfrecord"
    suffixes: tuple[str, ...] = (".tfrecord", ".tfrecords", ".tfrec")

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        refuse_compressed(source)
        places: list[tuple[int, int]] = []
        bad = 0
        try:
            for number, (offset, length) in enumerate(_frames(source), start=1):
                reason = _problem(source, offset, length, options)
                if reason is None:
                    places.append((offset, length))
                elif options.on_bad == "raise":
                    raise _bad(source, number, reason)
                else:
                    bad += 1
        except _Broken as error:
            # Without a length the next record cannot be found: what follows is lost.
            if options.on_bad == "raise":
                raise _bad(source, len(places) + bad + 1, str(error)) from error
            bad += 1
        return FileIndex(
            rows=len(places), bad=bad, arrays={"places": np.array(places, np.int64).reshape(-1, 2)}
        )

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _TFRecords(source, index)


class _TFRecords:
    def __init__(self, source: Source, index: FileIndex) -> None:
        self._source = source
        self._places = index.arrays["places"]

    def read(self, rows: Sequence[int]) -> list[Row]:
        return [self._record(row) for row in rows]

    def _record(self, row: int) -> Row:
        offset, length = self._places[row].tolist()
        data = _checked(self._source, offset, length)
        if data is None:
            raise _bad(self._source, row + 1, "the content does not match its checksum")
        return parse_example(data)

    def close(self) -> None:
        self._source.close()


class _Broken(Exception):
    """The chain of lengths ends here."""


def _frames(source: Source) -> Iterator[tuple[int, int]]:
    """Offset and length of each record's content. Headers are read in large chunks where records are small."""
    at, chunk, chunk_at = 0, b"", 0
    while at < source.size_bytes:
        if not chunk_at <= at <= chunk_at + len(chunk) - _HEADER_BYTES:
            chunk, chunk_at = source.read(at, CHUNK_BYTES), at
        header = chunk[at - chunk_at : at - chunk_at + _HEADER_BYTES]
        if len(header) < _HEADER_BYTES:
            raise _Broken("the file is cut off in a record's header")
        length, checksum = struct.unpack("<QI", header)
        if masked_crc32c(header[:8]) != checksum:
            raise _Broken("the record's length does not match its checksum")
        if at + _HEADER_BYTES + length + _FOOTER_BYTES > source.size_bytes:
            raise _Broken("the file is cut off in the record")
        yield at + _HEADER_BYTES, length
        at += _HEADER_BYTES + length + _FOOTER_BYTES


def _problem(source: Source, offset: int, length: int, options: ReadOptions) -> str | None:
    if length > options.max_record_bytes:
        return f"the record is {length:,} bytes long, more than {options.max_record_bytes:,}"
    if options.on_bad == "skip" and _checked(source, offset, length) is None:
        return "the content does not match its checksum"
    return None


def _checked(source: Source, offset: int, length: int) -> bytes | None:
    data = source.read(offset, length + _FOOTER_BYTES)
    content = data[:length]
    return content if struct.pack("<I", masked_crc32c(content)) == data[length:] else None


def _bad(source: Source, number: int, reason: str) -> DataError:
    return DataError.at(
        source.path,
        reason,
        line=number,
        unit="record",
        hint="Restore the file, or pass on_bad='skip'.",
        command_hint="Restore the file, or skip and count such records with --on-bad skip.",
    )


def parse_example(data: bytes) -> Row:
    """The features of a `tf.train.Example`; a record that is none comes back as `{"record": data}`."""
    try:
        features = [value for field, value in _fields(data) if field == 1]
        entries = [value for message in features for field, value in _fields(message) if field == 1]
        row = dict(_feature(entry) for entry in entries)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError, TypeError):
        return {"record": data}
    return row or {"record": data}


def _feature(entry: Any) -> tuple[str, Any]:
    fields = dict(_fields(entry))
    kind, values = next(iter(_fields(fields[2])), (0, b""))
    return fields[1].decode(), _values(kind, values)


def _values(kind: int, data: Any) -> Any:
    """A list of bytes, floats or integers; one alone without the list around it."""
    found: list[Any] = []
    for field, value in _fields(data):
        if field != 1:
            continue
        if kind == 1:
            found.append(value)
        elif kind == 2:
            packed = value if isinstance(value, bytes) else struct.pack("<I", value)
            found.extend(np.frombuffer(packed, "<f4").tolist())
        elif kind == 3:
            numbers = _varints(value) if isinstance(value, bytes) else [value]
            found.extend(n - 2**64 if n >= 2**63 else n for n in numbers)
    return found[0] if len(found) == 1 else found


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: bytes for the length-delimited, integers for the others."""
    if not isinstance(data, bytes):
        raise TypeError("not a message")
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
            case 2:
                length, at = _varint(data, at)
                if at + length > len(data):
                    raise ValueError("a field goes beyond its message")
                yield tag >> 3, data[at : at + length]
                at += length
            case 5:
                yield tag >> 3, struct.unpack_from("<I", data, at)[0]
                at += 4
            case 1:
                yield tag >> 3, struct.unpack_from("<Q", data, at)[0]
                at += 8
            case kind:
                raise ValueError(f"unknown wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _varints(data: bytes) -> list[int]:
    numbers, at = [], 0
    while at < len(data):
        number, at = _varint(data, at)
        numbers.append(number)
    return numbers


TFRECORD = TFRecordFormat()
