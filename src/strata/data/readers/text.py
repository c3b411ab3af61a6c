"""JSON lines and plain text: one record per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row
from strata.data.readers.lines import Blocks, data_start, read_rows, scan, without_bad
from strata.data.streaming.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """A format whose rows are single lines."""

    name: str
    suffixes: tuple[str, ...]
    parse: Callable[[bytes], Row]

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        index = scan(source, options)
        if self.name == "jsonl":
            _refuse_array(source)
        return without_bad(source, index, self.parse) if options.on_bad == "skip" else index

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Lines(Blocks(source, index), self.parse)


class _Lines:
    def __init__(self, blocks: Blocks, parse: Callable[[bytes], Row]) -> None:
        self._blocks = blocks
        self._parse = parse

    def read(self, rows: Sequence[int]) -> list[Row]:
        return read_rows(self._blocks, rows, self._parse)

    @property
    def source(self) -> Source:
        return self._blocks.source

    def ranges(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        return self._blocks.ranges(rows)

    def close(self) -> None:
        self._blocks.source.close()


def parse_json(record: bytes) -> Row:
    value = _loads(record)
    if not isinstance(value, dict):
        raise ValueError(f"the line is a JSON {type(value).__name__}, not an object")
    return value


def parse_text(record: bytes) -> Row:
    try:
        return {"text": record.decode()}
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None


def _loads(record: bytes) -> object:
    try:
        import orjson
    except ImportError:
        orjson = None  # type: ignore[assignment]
    if orjson is not None:
        try:
            return orjson.loads(record)
        except orjson.JSONDecodeError:
            pass  # It refuses NaN and Infinity, which Python writes: let Python have the last word.
    try:
        return json.loads(record)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not valid UTF-8 (byte 0x{error.object[error.start]:02x} at column {error.start + 1})"


def _refuse_array(source: Source) -> None:
    if source.read(data_start(source), 1024).lstrip()[:1] == b"[":
        raise DataError.at(
            source.path,
            "it is one JSON array, not one JSON object per line",
            hint="Convert it: jq -c '.[]' file.json > file.jsonl",
        )


JSONL = LineFormat(name="jsonl", suffixes=(".jsonl", ".ndjson", ".json"), parse=parse_json)
TEXT = LineFormat(name="text", suffixes=(".txt", ".text"), parse=parse_text)
