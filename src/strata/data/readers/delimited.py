"""CSV and TSV through pyarrow, read from the middle.

The first record names the columns. Types are inferred from the first megabyte and hold for the whole file: a
value that does not fit is a bad record, with its line. Quoted fields may hold newlines.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.data.errors import DataError
from strata.data.readers.base import Cache, FileIndex, OpenFile, ReadOptions, Row, arrow
from strata.data.readers.lines import Blocks, bad_record, scan, without_bad
from strata.data.streaming.sources import Source

_SAMPLE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DelimitedFormat:
    name: str
    suffixes: tuple[str, ...]
    delimiter: str

    def index(self, source: Source, options: ReadOptions) -> FileIndex:
        arrow("CSV files")
        everything = scan(source, options, quoted=True)
        if not everything.rows:  # Not even a header.
            return FileIndex(
                rows=0, bad=everything.bad, arrays={**everything.arrays, "schema": np.empty(0, np.uint8)}
            )
        index, header = _without_header(source, everything)
        schema = self._infer(source, index, header)
        arrays = {**index.arrays, "schema": np.frombuffer(schema.serialize(), np.uint8)}
        index = FileIndex(rows=index.rows, bad=index.bad, arrays=arrays)
        if options.on_bad == "skip":
            index = without_bad(source, index, lambda record: self.parse([record], schema), quoted=True)
        return index

    def open(self, source: Source, index: FileIndex, cache: Cache) -> OpenFile:
        return _Delimited(self, Blocks(source, index, quoted=True), index)

    def parse(self, records: Sequence[bytes], schema: Any) -> list[Row]:
        """The rows of whole records; ValueError where one does not fit the columns."""
        table = self._table(
            b"\n".join(records) + b"\n", schema.names, dict(zip(schema.names, schema.types, strict=True))
        )
        if table.num_rows != len(records):
            raise ValueError(f"{len(records)} records read as {table.num_rows} rows")
        rows: list[Row] = table.to_pylist()
        return rows

    def _infer(self, source: Source, index: FileIndex, header: bytes) -> Any:
        names = self._names(source, header)
        blocks, sample = Blocks(source, index, quoted=True), b""
        for number in range(len(blocks)):
            if len(sample) >= _SAMPLE_BYTES:
                break
            sample += b"".join(line.rstrip(b"\r\n") + b"\n" for _, line in blocks.lines(number))
        if not sample:
            return arrow("CSV files").schema([(name, arrow("CSV files").null()) for name in names])
        try:
            return self._table(sample, names, None, skip_bad=True).schema
        except ValueError as error:
            raise DataError.at(source.path, str(error)) from error

    def _names(self, source: Source, header: bytes) -> list[str]:
        try:
            table = self._table(header + b"\n", None, None)
        except ValueError as error:
            raise DataError.at(
                source.path, f"the first line does not name columns ({error})", line=1
            ) from error
        names = [str(name) for name in table.column_names]
        if len(set(names)) < len(names):
            raise DataError.at(source.path, f"two columns have the same name: {names}", line=1)
        return names

    def _table(
        self, data: bytes, names: list[str] | None, types: dict[str, Any] | None, *, skip_bad: bool = False
    ) -> Any:
        pa = arrow("CSV files")
        from pyarrow import csv

        try:
            return csv.read_csv(
                io.BytesIO(data),
                read_options=csv.ReadOptions(
                    column_names=names, use_threads=False, block_size=max(len(data), 1) + 1
                ),
                parse_options=csv.ParseOptions(
                    delimiter=self.delimiter,
                    newlines_in_values=True,
                    invalid_row_handler=(lambda row: "skip") if skip_bad else None,
                ),
                convert_options=csv.ConvertOptions(column_types=types) if types else None,
            )
        except pa.ArrowInvalid as error:
            raise ValueError(str(error).removeprefix("CSV parse error: ").removeprefix("In CSV ")) from None


class _Delimited:
    def __init__(self, format: DelimitedFormat, blocks: Blocks, index: FileIndex) -> None:
        self._format = format
        self._blocks = blocks
        pa = arrow("CSV files")
        self._schema = pa.ipc.read_schema(pa.py_buffer(index.arrays["schema"].tobytes()))

    def read(self, rows: Sequence[int]) -> list[Row]:
        answer: list[Row] = [{}] * len(rows)
        for wanted in self._blocks.read(rows):
            try:
                values = self._format.parse([record for _, _, record in wanted], self._schema)
            except ValueError:
                values = [self._one(offset, record) for _, offset, record in wanted]
            for (place, _, _), row in zip(wanted, values, strict=True):
                answer[place] = row
        return answer

    def _one(self, offset: int, record: bytes) -> Row:
        try:
            return self._format.parse([record], self._schema)[0]
        except ValueError as error:
            raise bad_record(self._blocks.source, offset, str(error)) from error

    def close(self) -> None:
        self._blocks.source.close()


def _without_header(source: Source, index: FileIndex) -> tuple[FileIndex, bytes]:
    """The index of the rows after the first record, and that record."""
    found = next(Blocks(source, index, quoted=True).lines(0), None)
    if found is None:
        raise DataError.at(
            source.path, "it changes while it is read", hint="Data must not change: copy it to a plain file."
        )
    offset, header = found
    first, starts = index.arrays["first"], index.arrays["offset"].copy()
    starts[0] = offset + len(header)
    return (
        FileIndex(
            rows=index.rows - 1,
            bad=index.bad,
            arrays={**index.arrays, "first": np.maximum(first - 1, 0), "offset": starts},
        ),
        header.rstrip(b"\r\n"),
    )


CSV = DelimitedFormat(name="csv", suffixes=(".csv",), delimiter=",")
TSV = DelimitedFormat(name="tsv", suffixes=(".tsv", ".tab"), delimiter="\t")
