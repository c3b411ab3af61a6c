"""Random access to records that end with a newline.

The index keeps the offset of a block of a few dozen records, not of each, so that a billion lines cost a few
hundred megabytes less than a number each would. Blank lines are not records. CRLF and a UTF-8 byte order mark are
accepted; a last line without its newline is a record like any other. Memory stays bounded whatever the length
of a line: what is longer than `max_record_bytes` is a bad record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.data.errors import DataError
from strata.data.readers.base import FileIndex, ReadOptions, Row, Unfinished, group_rows
from strata.data.streaming.sources import Source, chunks, refuse_compressed

BLOCK_ROWS = 32
BLOCK_BYTES = 256 * 1024
_NEWLINE, _QUOTE, _SPACE = 0x0A, 0x22, 0x20
_BLANK = bytes(range(_SPACE + 1))
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

Parse = Callable[[bytes], Any]
"""Raises ValueError with the reason where the record is bad."""


def scan(source: Source, options: ReadOptions, *, quoted: bool = False) -> FileIndex:
    """Find the records. With `quoted`, a newline between double quotes is part of its record."""
    refuse_compressed(source)
    starts, lengths = _records(source, quoted=quoted, unfinished=options.unfinished)
    too_long = lengths > options.max_record_bytes
    bad = np.stack([starts, starts + lengths], axis=1)[too_long]
    if len(bad) and options.on_bad == "raise":
        length = int(lengths[too_long][0])
        raise bad_record(
            source,
            int(bad[0, 0]),
            f"the record is {length:,} bytes long, more than {options.max_record_bytes:,}",
        )
    return _blocks(starts, bad)


def _records(
    source: Source, *, quoted: bool, unfinished: Unfinished | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of every record that is not blank."""
    line_start = at = data_start(source)
    has_content, quotes = False, 0  # Of the line that a chunk ends in: it continues in the next.
    starts, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    if unfinished is not None and "lines_at" in unfinished.arrays:
        at, line_start, content, quotes = unfinished.arrays["lines_at"].tolist()
        has_content = bool(content)
        starts, lengths = [unfinished.arrays["line_starts"]], [unfinished.arrays["line_lengths"]]
    for offset, chunk in chunks(source, at):
        if unfinished is not None and unfinished.is_due():  # What was found before this chunk.
            starts, lengths = [np.concatenate(starts)], [np.concatenate(lengths)]
            here = np.array([offset, line_start, has_content, quotes], np.int64)
            unfinished.keep({"lines_at": here, "line_starts": starts[0], "line_lengths": lengths[0]})
        ends, quotes = _line_ends(chunk, quotes if quoted else None)
        if len(ends):
            first = bool(has_content or _visible(chunk[: ends[0]]))
            keep = _not_blank(chunk, ends, first=first)
            line_starts = np.r_[line_start, offset + ends[:-1]]
            starts.append(line_starts[keep])
            lengths.append((offset + ends - line_starts)[keep])
            line_start, has_content = offset + int(ends[-1]), False
            chunk = chunk[ends[-1] :]
        has_content = has_content or _visible(chunk)
    if quotes % 2:
        raise DataError.at(
            source.path,
            "a quoted field is never closed",
            hint="Escape quotes inside fields by doubling them.",
        )
    if has_content:
        starts.append(np.array([line_start]))
        lengths.append(np.array([source.size_bytes - line_start]))
    return np.concatenate(starts), np.concatenate(lengths)


def _line_ends(chunk: bytes, quotes: int | None) -> tuple[NDArray[np.int64], int]:
    """Offsets after each newline, and the number of quotes so far. With `quotes`, how many came before this chunk, a
    newline between quotes ends nothing."""
    data = np.frombuffer(chunk, np.uint8)
    ends = np.flatnonzero(data == _NEWLINE) + 1
    if quotes is None:
        return ends, 0
    marks = np.flatnonzero(data == _QUOTE)
    before = np.searchsorted(marks, ends) + quotes
    return ends[before % 2 == 0], quotes + len(marks)


def _not_blank(chunk: bytes, ends: NDArray[np.int64], *, first: bool) -> NDArray[np.bool_]:
    """Which lines of a chunk hold anything; the first may have started before it."""
    keep = np.ones(len(ends), np.bool_)
    keep[0] = first
    begins = ends[:-1]
    suspects = np.flatnonzero(np.frombuffer(chunk, np.uint8)[begins] <= _SPACE) + 1
    for line in suspects.tolist():
        keep[line] = _visible(chunk[ends[line - 1] : ends[line]])
    return keep


def _visible(text: bytes) -> bool:
    return bool(text.translate(None, _BLANK))


def _blocks(starts: NDArray[np.int64], bad: NDArray[np.int64]) -> FileIndex:
    """Group records; a block ends after so many rows or bytes, whichever comes first."""
    new_rows = np.diff(np.arange(len(starts)) // BLOCK_ROWS, prepend=-1) > 0
    new_bytes = np.diff(starts // BLOCK_BYTES, prepend=-1) > 0
    begins = np.flatnonzero(new_rows | new_bytes)
    bad_before = np.searchsorted(bad[:, 0], starts[begins])
    return FileIndex(
        rows=len(starts) - len(bad),
        bad=len(bad),
        arrays={"first": begins - bad_before, "offset": starts[begins], "bad": bad},
    )


def without_bad(source: Source, index: FileIndex, parse: Parse, *, quoted: bool = False) -> FileIndex:
    """The index with every record left out that does not parse. Reads the whole file once more."""
    blocks = Blocks(source, index, quoted=quoted)
    good, bad = [0], [*index.arrays["bad"].tolist()]
    for number in range(len(blocks)):
        good.append(0)
        for offset, line in blocks.lines(number):
            try:
                parse(line.rstrip(b"\r\n"))
                good[-1] += 1
            except ValueError:
                bad.append([offset, offset + len(line)])
    return FileIndex(
        rows=sum(good),
        bad=len(bad),
        arrays={
            **index.arrays,
            "first": np.cumsum(good[: len(blocks)], dtype=np.int64),
            "bad": np.array(sorted(bad), np.int64).reshape(-1, 2),
        },
    )


class Blocks:
    """The blocks of an indexed file, split into records."""

    def __init__(self, source: Source, index: FileIndex, *, quoted: bool = False) -> None:
        self.source = source
        self._quoted = quoted
        self._first = index.arrays["first"]
        self._offset = index.arrays["offset"]
        self._bad = index.arrays["bad"]

    def __len__(self) -> int:
        return len(self._offset)

    def lines(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each good record of a block. Bad ones may be huge: they are not even read."""
        start = int(self._offset[number])
        stop = int(self._offset[number + 1]) if number + 1 < len(self) else self.source.size_bytes
        low, high = np.searchsorted(self._bad[:, 0], [start, stop])
        for bad_start, bad_stop in [*self._bad[low:high].tolist(), (stop, stop)]:
            for line in _split(self.source.read(start, bad_start - start), quoted=self._quoted):
                if _visible(line):
                    yield start, line
                start += len(line)
            start = bad_stop

    def ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """What of the file will be read for these rows: offset and length of each."""
        found = []
        for number in group_rows(rows, self._first):
            start = int(self._offset[number])
            stop = int(self._offset[number + 1]) if number + 1 < len(self) else self.source.size_bytes
            found.append((start, stop - start))
        return found

    def read(self, rows: Sequence[int]) -> Iterator[list[tuple[int, int, bytes]]]:
        """Block by block the rows asked for, as (place in the answer, offset, record)."""
        for number, wanted in group_rows(rows, self._first).items():
            lines = list(self.lines(number))
            yield [(place, lines[row][0], lines[row][1].rstrip(b"\r\n")) for place, row in wanted]


def _split(data: bytes, *, quoted: bool) -> list[bytes]:
    """Lines with their ends; the last may have none."""
    ends, _ = _line_ends(data, 0 if quoted else None)
    return [data[a:b] for a, b in pairwise([0, *ends.tolist(), len(data)]) if b > a]


def data_start(source: Source) -> int:
    """Where the text begins, after a UTF-8 byte order mark."""
    head = source.read(0, 3)
    if head.startswith(_UTF16_MARKS):
        raise DataError.at(source.path, "the text is UTF-16", hint="Convert it: iconv -f UTF-16 -t UTF-8")
    return len(_UTF8_MARK) if head == _UTF8_MARK else 0


def bad_record(source: Source, offset: int, reason: str) -> DataError:
    """The error of a bad record. Counting lines takes a pass over what is before it: only on this path."""
    line = 1
    for start, chunk in chunks(source):
        if start >= offset:
            break
        line += chunk[: offset - start].count(b"\n")
    return DataError.at(
        source.path,
        reason,
        line=line,
        hint="Correct it, or pass on_bad='skip' to skip and count such records.",
        command_hint="Correct it, or skip and count such records with --on-bad skip.",
    )


def read_rows(blocks: Blocks, rows: Sequence[int], parse: Callable[[bytes], Row]) -> list[Row]:
    """Rows of a format that parses one record at a time."""
    answer: list[Row] = [{}] * len(rows)
    for wanted in blocks.read(rows):
        for place, offset, record in wanted:
            try:
                answer[place] = parse(record)
            except ValueError as error:
                raise bad_record(blocks.source, offset, str(error)) from error
    return answer
