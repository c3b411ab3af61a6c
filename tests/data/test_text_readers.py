"""Lines of JSON and of CSV: the same samples however the bytes are cut, and every bad line named or counted."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.errors import DataError
from strata.data.reader import DatasetReader, discover
from strata.data.streaming import sources

lines = st.lists(
    st.one_of(
        st.builds(lambda text: json.dumps({"t": text}).encode(), st.text(max_size=40)),
        st.just(b""),
        st.just(b"   \t"),
    ),
    max_size=90,
)


@settings(max_examples=80)
@given(
    lines,
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 7, 64, 1_000, 2**20]),
    st.data(),
)
def test_line_ends_marks_blank_lines_and_chunks_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory,
    content: list[bytes],
    end: bytes,
    mark: bool,
    last_end: bool,
    chunk_bytes: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + end.join(content) + (end if last_end else b""))
    expected = [json.loads(line) for line in content if line.strip()]
    with patch.object(sources, "CHUNK_BYTES", chunk_bytes):
        for on_bad in ("raise", "skip"):
            reader = DatasetReader(path, on_bad=on_bad)
            assert len(reader) == len(expected)
            wanted = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20)) if expected else []
            assert reader.read(wanted) == [expected[i] for i in wanted]


fields = st.text('ab ,"\n\r', max_size=6)


@settings(max_examples=60)
@given(st.lists(st.tuples(fields, fields), min_size=1, max_size=70), st.sampled_from([1, 5, 100, 2**20]))
def test_quoted_fields_hold_anything_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([("first", "second"), *(("x" + a, "y" + b) for a, b in rows)])
    with patch.object(sources, "CHUNK_BYTES", chunk_bytes):
        reader = DatasetReader(path)
        assert reader.read(range(len(reader))) == [{"first": "x" + a, "second": "y" + b} for a, b in rows]


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=120), st.data())
def test_skipped_records_leave_the_good_ones_in_order(
    tmp_path_factory: pytest.TempPathFactory, good: list[bool], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("bad") / "x.jsonl"
    filler = "x" * data.draw(st.integers(0, 9_000))  # Blocks end by rows or by bytes.
    path.write_text(
        "".join(json.dumps({"i": i, "f": filler}) + "\n" if ok else "{broken\n" for i, ok in enumerate(good))
    )
    expected = [i for i, ok in enumerate(good) if ok]
    reader = DatasetReader(path, on_bad="skip")
    assert (len(reader), reader.bad) == (len(expected), len(good) - len(expected))
    assert [r["i"] for r in reader.read(range(len(expected)))] == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1\n', "not valid JSON"),
        (b'{"a": "\xff"}\n', "not valid UTF-8 (byte 0xff at column 8)"),
        (b"[1, 2]\n", "is a JSON list, not an object"),
        (b'{"a": 1', "not valid JSON"),
        (b"[" * 100_000 + b"\n", "JSON"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line_or_skipped_and_counted(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 0}\n\n{"a": 1}\n' + content)
    reader = DatasetReader(path)
    assert reader[1] == {"a": 1}
    with pytest.raises(DataError) as caught:
        reader.read([2])
    assert (caught.value.path, caught.value.line) == (str(path), 4)
    assert f"'{path}', line 4: " in str(caught.value)
    assert reason in str(caught.value)
    skipped = DatasetReader(path, on_bad="skip")
    assert (len(skipped), skipped.bad) == (2, 1)


def test_python_json_with_nan_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": NaN}\n')
    assert np.isnan(DatasetReader(tmp_path / "x.jsonl")[0]["a"])


def test_a_huge_line_is_refused_with_its_position_and_never_read_in_full(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 0}\n')
        file.write(b'{"a": "' + b"x" * 100_000_000 + b'"}\n')
        file.write(b'{"a": 2}\n')
    with pytest.raises(
        DataError, match=r"line 2: the record is 100,000,010 bytes long, more than 67,108,864"
    ):
        discover(path)
    reader = DatasetReader(path, on_bad="skip")
    assert (len(reader), reader.bad) == (2, 1)
    assert reader.read([0, 1]) == [{"a": 0}, {"a": 2}]
    assert len(DatasetReader(path, max_record_bytes=2**27)) == 3


def test_what_is_not_lines_of_json_says_so(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text('[\n{"a": 1}\n]')
    with pytest.raises(DataError, match="one JSON array"):
        discover(tmp_path / "array.json")
    (tmp_path / "z.jsonl").write_bytes(b"\x1f\x8b rest")
    with pytest.raises(DataError, match="compressed with gzip"):
        discover(tmp_path / "z.jsonl")
    (tmp_path / "u.jsonl").write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        discover(tmp_path / "u.jsonl")


def test_csv_rows_that_do_not_fit_the_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "".join(f"{i},{i}\n" for i in range(50)) + "only one\n" + "60,60\n")
    reader = DatasetReader(path)
    assert reader.read([0, 49, 51]) == [{"a": 0, "b": 0}, {"a": 49, "b": 49}, {"a": 60, "b": 60}]
    with pytest.raises(DataError, match=r"line 52: .*Expected 2 columns, got 1"):
        reader.read([49, 50])
    skipped = DatasetReader(path, on_bad="skip")
    assert (len(skipped), skipped.bad, skipped[50]) == (51, 1, {"a": 60, "b": 60})


def test_csv_types_hold_for_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,s\n" + "".join(f"{i},0{i}x\n" for i in range(200_000)) + ",end\nword,end\n")
    reader = DatasetReader(path)
    assert reader[200_000] == {"n": None, "s": "end"}
    with pytest.raises(DataError, match="line 200,003"):
        reader.read([200_001])


def test_csv_corner_cases(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n")
    assert len(DatasetReader(path)) == 0
    path.write_text("")
    assert len(DatasetReader(path)) == 0
    path.write_text('a,b\n"never closed,1\n2,3\n')
    with pytest.raises(DataError, match="never closed"):
        discover(path)
    path.write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match="same name"):
        discover(path)
