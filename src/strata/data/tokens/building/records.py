"""From the bytes of a chunk to texts, with the place each came from; and from bad bytes to a named record.

A line belongs to the chunk in which it begins, so chunks can be read in any order by any process and give
together what one reader would give. Blank lines and empty texts are no records. CRLF line ends, a byte order
mark and a last line without its end are fine. Anything else that is not a text is bad: it raises an error
with file and line, or is skipped and counted.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from strata.data.tokens.building.sources import Chunk, Source, open_parquet, read_fully
from strata.data.tokens.errors import BadRecord, MissingTextKey, SourceUnreadable

_strict_json: Callable[[bytes], Any] | None
try:
    from orjson import loads as _strict_json
except ImportError:  # several times as fast as Python's own parser, and that is all
    _strict_json = None

OnBad = Literal["raise", "skip"]

DEFAULT_MAX_RECORD_BYTES = 256 << 20
GROUP_RECORDS = 512
"""How many records are handed on at once: enough to use a tokenizer's batch call well."""
TEXT_RECORD_BYTES = 4096
"""Plain text is cut into records of whole lines of at least this size. Part of the format."""
STREAM_BYTES = 8 << 20
BAD_SAMPLES = 5

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Records:
    """Some consecutive records of one file."""

    texts: list[str]
    places: list[int]
    """Where each begins: a byte offset (of the unpacked stream, if gzipped), in parquet a row number."""


class _Unusable(Exception):
    """The verdict on one record; `found` are the keys it has when the text key is missing. Stays in here."""

    def __init__(self, reason: str, found: tuple[str, ...] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.found = found


class ChunkReader:
    """Reads one chunk. Afterwards `bad_records` and `bad_samples` tell what was skipped."""

    def __init__(self, chunk: Chunk, *, text_key: str, on_bad: OnBad, max_record_bytes: int) -> None:
        self.chunk = chunk
        self.source = chunk.source
        self.text_key = text_key
        self.on_bad = on_bad
        self.max_record_bytes = max_record_bytes
        self.bad_records = 0
        self.bad_samples: list[tuple[int, str]] = []

    def __iter__(self) -> Iterator[Records]:
        if self.source.size_bytes == 0:
            self._reject_file("is empty")
            return
        match self.source.kind:
            case "parquet":
                yield from self._parquet()
            case "jsonl":
                for block, place in self._line_blocks():
                    yield from self._jsonl(block, place)
            case "text":
                for block, place in self._line_blocks():
                    yield from self._text(block, place)

    # Whole lines ------------------------------------------------------------------------------------------

    def _line_blocks(self) -> Iterator[tuple[bytes, int]]:
        """Blocks of whole lines, with the place of each. Only a file's very last line may lack its end."""
        return self._gzip_blocks() if self.source.gzipped else self._plain_blocks()

    def _plain_blocks(self) -> Iterator[tuple[bytes, int]]:
        start, stop = self.chunk.start, self.chunk.stop
        with self.source.path.open("rb", buffering=0) as file:
            fd = file.fileno()
            begin = max(start - 1, 0)  # a line begins at `start` if the byte before it ends one
            block = read_fully(fd, stop - begin, begin)
            if start:
                first_end = block.find(b"\n")
                if first_end < 0:
                    return  # in the middle of a line that began in an earlier chunk
                block, start = block[first_end + 1 :], begin + first_end + 1
            if not block:
                return
            pieces = [block]
            last_line_bytes = len(block) - block.rfind(b"\n") - 1
            at = stop
            while not pieces[-1].endswith(b"\n"):
                piece = read_fully(fd, STREAM_BYTES, at)
                if not piece:
                    break
                end = piece.find(b"\n") + 1
                pieces.append(piece[:end] if end else piece)
                at += len(piece)
                last_line_bytes += len(pieces[-1])
                if last_line_bytes > self.max_record_bytes:
                    line_at = block.rfind(b"\n") + 1
                    if line_at:
                        yield block[:line_at], start
                    self._reject(start + line_at, _too_long(self.max_record_bytes))
                    return
            yield b"".join(pieces), start

    def _gzip_blocks(self) -> Iterator[tuple[bytes, int]]:
        rest, at, dropping = b"", 0, False
        try:
            with gzip.open(self.source.path) as stream:
                while data := stream.read(STREAM_BYTES):
                    if dropping:  # the end of a line that was too long
                        end = data.find(b"\n") + 1
                        at += end or len(data)
                        if not end:
                            continue
                        data, dropping = data[end:], False
                    rest += data
                    cut = rest.rfind(b"\n") + 1
                    if cut:
                        yield rest[:cut], at
                        rest, at = rest[cut:], at + cut
                    if len(rest) > self.max_record_bytes:
                        self._reject(at, _too_long(self.max_record_bytes))
                        rest, at, dropping = b"", at + len(rest), True
        except (OSError, EOFError, zlib.error) as error:
            raise SourceUnreadable(
                self.source.path, f"is damaged or cut short ({error})", hint="Check with: gzip -t"
            ) from None
        if rest:
            yield rest, at

    # JSON lines -------------------------------------------------------------------------------------------

    def _jsonl(self, block: bytes, place: int) -> Iterator[Records]:
        lines = block.split(b"\n")
        places = list(accumulate((len(line) + 1 for line in lines), initial=place))
        complete = not lines[-1]
        if complete:
            lines.pop()
        for first in range(0, len(lines), GROUP_RECORDS):
            group = lines[first : first + GROUP_RECORDS]
            group_places = places[first : first + len(group)]
            texts = self._all_texts(group) if len(block) <= self.max_record_bytes else None
            if texts is None:
                cut_short = not complete and first + len(group) == len(lines)
                texts, group_places = self._usable_texts(group, group_places, cut_short=cut_short)
            yield _without_empty(texts, group_places)

    def _all_texts(self, lines: Sequence[bytes]) -> list[str] | None:
        """The fast way, for lines that are all as they should be."""
        key, loads = self.text_key, _strict_json
        if loads is None:
            return None
        try:
            texts = [loads(line)[key] for line in lines]
        except (ValueError, KeyError, TypeError):
            return None
        return texts if all(type(text) is str for text in texts) else None

    def _usable_texts(
        self, lines: Sequence[bytes], places: Sequence[int], *, cut_short: bool
    ) -> tuple[list[str], list[int]]:
        """Line by line, to tell the bad ones from the good."""
        texts, kept = [], []
        for i, (line, place) in enumerate(zip(lines, places, strict=True)):
            if not line.strip():
                continue
            try:
                if len(line) > self.max_record_bytes:
                    raise _too_long(self.max_record_bytes)
                text = self._text_of(line, cut_short=cut_short and i == len(lines) - 1)
            except _Unusable as verdict:
                self._reject(place, verdict)
            else:
                texts.append(text)
                kept.append(place)
        return texts, kept

    def _text_of(self, line: bytes, *, cut_short: bool) -> str:
        line = line.removeprefix(BOM)
        record = _tolerant_json(line, cut_short=cut_short)
        if not isinstance(record, dict):
            raise _Unusable(f"expected an object with the key {self.text_key!r}, found {_json_type(record)}")
        if self.text_key not in record:
            # Keys that do hold a text first: one of them is the likely one.
            raise _Unusable("", found=tuple(sorted(record, key=lambda key: not isinstance(record[key], str))))
        return _as_text(record[self.text_key], self.text_key)

    # Plain text -------------------------------------------------------------------------------------------

    def _text(self, block: bytes, place: int) -> Iterator[Records]:
        texts: list[str] = []
        places: list[int] = []
        at = 0
        while at < len(block):
            end = block.find(b"\n", at + TEXT_RECORD_BYTES) + 1 or len(block)
            piece = block[at:end]
            try:
                texts.append(_decoded(piece, place + at))
            except UnicodeDecodeError:
                texts.append(self._good_lines(piece, place + at))
            places.append(place + at)
            at = end
            if len(texts) == GROUP_RECORDS:
                yield _without_empty(texts, places)
                texts, places = [], []
        yield _without_empty(texts, places)

    def _good_lines(self, piece: bytes, place: int) -> str:
        good = []
        for line in piece.splitlines(keepends=True):
            try:
                good.append(_decoded(line, place))
            except UnicodeDecodeError as error:
                self._reject(place, _Unusable(_utf8_reason(line, error)))
            place += len(line)
        return "".join(good)

    # Parquet ----------------------------------------------------------------------------------------------

    def _parquet(self) -> Iterator[Records]:
        import pyarrow as pa

        with open_parquet(self.source.path) as file:
            group = self.chunk.start
            if group >= file.num_row_groups:
                self._reject_file("has no rows")
                return
            row = sum(file.metadata.row_group(i).num_rows for i in range(group))
            names = file.schema_arrow.names
            if self.text_key not in names:
                rows = file.metadata.row_group(group).num_rows
                self._reject(row, _Unusable("", found=tuple(names)), count=rows)
                return
            try:
                for batch in file.iter_batches(GROUP_RECORDS, row_groups=[group], columns=[self.text_key]):
                    yield self._column(batch.column(0), row)
                    row += len(batch)
            except (pa.ArrowInvalid, OSError) as error:
                raise SourceUnreadable(
                    self.source.path, f"row group {group} is damaged ({str(error).splitlines()[0]})"
                ) from None

    def _column(self, values: Any, row: int) -> Records:
        texts, places = [], []
        for i, value in enumerate(values):
            try:
                text = _as_text(value.as_py(), self.text_key)
            except UnicodeDecodeError:
                self._reject(row + i, _Unusable("not valid UTF-8"))
            except _Unusable as verdict:
                self._reject(row + i, verdict)
            else:
                texts.append(text)
                places.append(row + i)
        return _without_empty(texts, places)

    # Bad records ------------------------------------------------------------------------------------------

    def _reject(self, place: int, verdict: _Unusable, *, count: int = 1) -> None:
        if self.on_bad == "raise":
            number = number_at(self.source, place)
            unit = unit_of(self.source)
            if verdict.found is not None:
                raise MissingTextKey(self.source.path, number, self.text_key, verdict.found, unit=unit)
            raise BadRecord(self.source.path, number, verdict.reason, unit=unit)
        self.bad_records += count
        if len(self.bad_samples) < BAD_SAMPLES:
            reason = verdict.reason if verdict.found is None else f"KeyError: {self.text_key!r}"
            self.bad_samples.append((place, reason))

    def _reject_file(self, reason: str) -> None:
        if self.on_bad == "raise":
            raise SourceUnreadable(
                self.source.path,
                reason,
                hint="Leave it out, or skip and count such files with --on-bad skip.",
            )
        self.bad_records += 1
        self.bad_samples.append((0, reason))


def number_at(source: Source, place: int) -> int:
    """The line (or row) number, from one, of a place. Reads the file up to there: for error messages only."""
    if source.kind == "parquet":
        return place + 1
    lines = 1
    with gzip.open(source.path) if source.gzipped else source.path.open("rb") as stream:
        while place > 0 and (data := stream.read(min(place, STREAM_BYTES))):
            lines += data.count(b"\n")
            place -= len(data)
    return lines


def unit_of(source: Source) -> str:
    return "row" if source.kind == "parquet" else "line"


def _decoded(piece: bytes, place: int) -> str:
    if place == 0:
        piece = piece.removeprefix(BOM)
    return piece.decode().replace("\r\n", "\n")


def _without_empty(texts: list[str], places: list[int]) -> Records:
    if all(texts):
        return Records(texts, places)
    kept = [(text, place) for text, place in zip(texts, places, strict=True) if text]
    return Records([text for text, _ in kept], [place for _, place in kept])


def _tolerant_json(line: bytes, *, cut_short: bool) -> object:
    """Also takes what the strict parser refuses but Python writes, NaN and Infinity. Bad JSON gets its reason."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Unusable(_utf8_reason(line, error)) from None
    except json.JSONDecodeError as error:
        if cut_short:
            raise _Unusable("the last line is cut short: its JSON and its line end are missing") from None
        raise _Unusable(
            f"not valid JSON ({error.msg} at column {error.colno}); one object per line is expected"
        ) from None
    except RecursionError:
        raise _Unusable("JSON nested too deeply") from None


def _as_text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise _Unusable(f"the value of {key!r} is {_json_type(value)}, not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unusable(f"the value of {key!r} holds half a surrogate pair, which is not text") from None
    return value


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a text"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"


def _utf8_reason(data: bytes, error: UnicodeDecodeError) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "the file is UTF-16; convert it to UTF-8"
    return f"not valid UTF-8 (byte 0x{data[error.start]:02x} at column {error.start + 1})"


def _too_long(limit_bytes: int) -> _Unusable:
    return _Unusable(f"longer than {limit_bytes:,} bytes without a line end; one record per line is expected")
