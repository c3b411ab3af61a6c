"""Texts out of files that are not as they should be: the right text, or the right file and line."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.tokens.building import records
from strata.data.tokens.building.records import ChunkReader
from strata.data.tokens.building.sources import cut_into_chunks, find_sources
from strata.data.tokens.errors import BadRecord, MissingTextKey, NothingToIndex, SourceUnreadable
from strata.data.tokens.index import TokenIndex
from tests.data.tokens.corpora import build, text_of, texts, write_jsonl


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def good(text: str = "ok") -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


GOOD_BYTES = {
    "crlf": (b'{"text": "a"}\r\n{"text": "b"}\r\n', "ab"),
    "blank lines": (b'\n{"text": "a"}\n\n  \t\r\n\n{"text": "b"}\n\n', "ab"),
    "bom": (b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n', "ab"),
    "bom before a later line": (b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n', "ab"),
    "no end of the last line": (b'{"text": "a"}\n{"text": "b"}', "ab"),
    "empty text": (b'{"text": ""}\n{"text": "b"}\n', "b"),
    "not a number": (b'{"score": NaN, "text": "a"}\n', "a"),
    "escapes": (b'{"text": "\\u00fc\\n\\ud83e\\udd8a"}\n', "ü\n🦊"),
    "spaces around": (b'  {"text": "a"}  \n', "a"),
}


@pytest.mark.parametrize("case", GOOD_BYTES)
def test_odd_but_good_lines_give_their_text(tmp_path: Path, case: str) -> None:
    data, expected = GOOD_BYTES[case]
    report = build(tmp_path / "x.index", [write(tmp_path / "a.jsonl", data)])
    assert text_of(report.path) == expected
    assert report.meta.bad_records == 0


BAD_BYTES = {
    "no json": (b"hello\n", "not valid JSON"),
    "json array": (b"[1, 2]\n", "expected an object with the key 'text', found a list"),
    "bare text": (b'"text"\n', "found a text"),
    "null": (b'{"text": null}\n', "the value of 'text' is null, not a text"),
    "number": (b'{"text": 7}\n', "is a number, not a text"),
    "object": (b'{"text": {}}\n', "is an object, not a text"),
    "invalid utf-8": (b'{"text": "a\xff"}\n', "not valid UTF-8 (byte 0xff at column 12)"),
    "half a surrogate": (b'{"text": "\\ud83e"}\n', "half a surrogate pair"),
    "utf-16": ('{"text": "a"}'.encode("utf-16") + b"\n", "UTF-16"),
    "unclosed": (b'{"text": "a"\n', "not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_BYTES)
def test_bad_line_is_named_with_file_and_line(tmp_path: Path, case: str) -> None:
    data, reason = BAD_BYTES[case]
    path = write(tmp_path / "a.jsonl", good() + b"\n" + good() + data + good())
    with pytest.raises(BadRecord) as caught:
        build(tmp_path / "x.index", [path])
    assert f"{path}, line 4: " in str(caught.value)
    assert reason in str(caught.value)
    assert "--on-bad skip" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]  # nothing is left behind


@pytest.mark.parametrize("case", BAD_BYTES)
def test_bad_line_can_be_skipped_and_is_counted(tmp_path: Path, case: str) -> None:
    data, reason = BAD_BYTES[case]
    path = write(tmp_path / "a.jsonl", good("x") + data + good("y") + data)
    report = build(tmp_path / "x.index", [path], on_bad="skip")
    assert text_of(report.path) == "xy"
    assert report.meta.bad_records == report.meta.files[0].bad_records == 2
    assert report.bad_samples[0].startswith(f"{path}, line 2: ")
    assert reason in report.bad_samples[0]
    assert report.bad_samples[1].startswith(f"{path}, line 4: ")


def test_python_s_own_json_parser_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [data for data, _ in GOOD_BYTES.values()] + [data for data, _ in BAD_BYTES.values()]
    path = write(tmp_path / "a.jsonl", b"\n".join(lines))
    fast = build(tmp_path / "x.index", [path], on_bad="skip")
    monkeypatch.setattr(records, "_strict_json", None)
    slow = build(tmp_path / "y.index", [path], on_bad="skip")
    assert fast.meta.bad_records == slow.meta.bad_records == len(BAD_BYTES)
    assert fast.path.read_bytes() == slow.path.read_bytes()


def test_missing_text_key_says_which_keys_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", good() + b'{"id": 3, "content": "x"}\n')
    with pytest.raises(MissingTextKey) as caught:
        build(tmp_path / "x.index", [path])
    assert (caught.value.line, caught.value.key, set(caught.value.found)) == (2, "text", {"id", "content"})
    assert "KeyError: 'text'" in str(caught.value)
    assert "--text-key content" in str(caught.value)  # the key that does hold a text
    assert text_of(build(tmp_path / "x.index", [path], text_key="content", on_bad="skip").path) == "x"


def test_truncated_last_line_is_distinguished_from_plain_bad_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", good() + b'{"text": "half a rec')
    with pytest.raises(BadRecord, match="line 2: the last line is cut short"):
        build(tmp_path / "x.index", [path])
    report = build(tmp_path / "x.index", [path], on_bad="skip")
    assert (text_of(report.path), report.meta.bad_records) == ("ok", 1)


def test_empty_file_is_an_error_or_counted(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl", b"")
    full = write_jsonl(tmp_path / "full.jsonl", ["a"])
    with pytest.raises(SourceUnreadable, match=r"empty\.jsonl: is empty"):
        build(tmp_path / "x.index", [full, empty])
    report = build(tmp_path / "x.index", [empty, full], on_bad="skip")
    assert (text_of(report.path), [file.bad_records for file in report.meta.files]) == ("a", [1, 0])


@pytest.mark.parametrize("data", [b"\n\n \n", b'{"text": ""}\n'])
def test_files_without_text_are_nothing_to_index(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(NothingToIndex):
        build(tmp_path / "x.index", [write(tmp_path / "a.jsonl", data)])
    assert not (tmp_path / "x.index").exists()


def test_hundred_megabyte_line_is_read_in_full(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(good("before"))
        file.write(b'{"text": "' + b"x" * 100_000_000 + b'"}\n')
        file.write(good("after"))
    report = build(tmp_path / "x.index", [path], workers=2)
    assert report.header.total_tokens == 100_000_000 + len("beforeafter")
    with TokenIndex(report.path) as index:
        assert index.header.num_records == 3
        assert bytes(index.tokens[-7:].tolist()) == b"xxafter"[-7:]
        assert index.find_position(50_000_000) == (0, len(good("before")), 50_000_000 - 6)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_line_beyond_the_limit_is_a_bad_record(tmp_path: Path, name: str) -> None:
    data = good("a") + good("x" * 20_000_000) + good("b")
    path = write(tmp_path / name, gzip.compress(data, 1) if name.endswith("gz") else data)
    with pytest.raises(BadRecord, match="line 2: longer than 5,000,000 bytes"):
        build(tmp_path / "x.index", [path], max_record_bytes=5_000_000)
    report = build(tmp_path / "x.index", [path], max_record_bytes=5_000_000, on_bad="skip")
    assert (text_of(report.path), report.meta.bad_records) == ("ab", 1)


def test_first_bad_line_is_reported_whatever_the_processes(tmp_path: Path) -> None:
    lines = texts(4000)
    data = b"".join(good(line) for line in lines)
    path = write(tmp_path / "a.jsonl", data + b"bad one\n" + data + b"bad two\n")
    for workers in (1, 2, 3):
        with pytest.raises(BadRecord, match="line 4001: "):
            build(tmp_path / "x.index", [path], workers=workers, chunk_bytes=50_000)


line = st.one_of(
    st.text(alphabet='aü🦊\n\\"', max_size=12).map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from([b"", b" ", b"bad", b'{"text": 1}', b'{"t": ""}', b"\xff"]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(line, st.sampled_from([b"\n", b"\r\n"])), min_size=1),
    st.booleans(),
    st.integers(1, 60),
)
def test_chunks_give_together_what_one_reader_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[bytes, bytes]], ended: bool, chunk_bytes: int
) -> None:
    data = b"".join(line + end for line, end in lines)
    data = data if ended else data.rstrip(b"\r\n")
    path = write(tmp_path_factory.getbasetemp() / "chunks.jsonl", data or b"\n")

    def read(size: int) -> tuple[list[tuple[str, int]], int]:
        found, bad = list[tuple[str, int]](), 0
        for chunk in cut_into_chunks(find_sources([path]), chunk_bytes=size):
            reader = ChunkReader(chunk, text_key="text", on_bad="skip", max_record_bytes=1 << 20)
            for some in reader:
                found += zip(some.texts, some.places, strict=True)
            bad += reader.bad_records
        return found, bad

    whole, bad = read(1 << 20)
    assert read(chunk_bytes) == (whole, bad)
    for text, place in whole:  # each place is where its line begins
        assert json.loads(data[place:].split(b"\n")[0])["text"] == text


def test_gzipped_lines_read_like_plain_ones(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", texts(300))
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress(plain.read_bytes()))
    a, b = build(tmp_path / "a.index", [plain]), build(tmp_path / "b.index", [packed])
    assert text_of(a.path) == text_of(b.path)
    cut = write(tmp_path / "cut.jsonl.gz", packed.read_bytes()[:-20])
    with pytest.raises(SourceUnreadable, match=r"cut\.jsonl\.gz: is damaged or cut short.*gzip -t"):
        build(tmp_path / "c.index", [cut])


def test_plain_text_keeps_every_character_and_ends_once(tmp_path: Path) -> None:
    text = "\n\n".join(texts(2000)) + "\n"
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    for chunk_bytes in (1 << 20, 5000):
        report = build(tmp_path / "x.index", [path], chunk_bytes=chunk_bytes, force=True)
        assert text_of(report.path) == text
    report = build(
        tmp_path / "eos.index", [path, write(tmp_path / "b.txt", b"tail")], eos=256, chunk_bytes=5000
    )
    with TokenIndex(report.path) as index:
        ends = [i for i, token in enumerate(index.tokens.tolist()) if token == 256]
    assert ends == [len(text.encode()), report.header.total_tokens - 1]


def test_bad_bytes_in_plain_text_are_named_or_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo\xfe\nthree\n")
    with pytest.raises(
        BadRecord, match=re.escape(f"{path}, line 2: not valid UTF-8 (byte 0xfe at column 4)")
    ):
        build(tmp_path / "x.index", [path])
    report = build(tmp_path / "x.index", [path], on_bad="skip")
    assert (text_of(report.path), report.meta.bad_records) == ("one\nthree\n", 1)


def parquet(path: Path, values: Sequence[str | None], *, key: str = "text", rows: int = 3) -> Path:
    table = pa.table({key: pa.array(values, pa.string()), "n": list(range(len(values)))})
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    lines = texts(10)
    report = build(tmp_path / "x.index", [parquet(tmp_path / "a.parquet", lines)], workers=2)
    assert text_of(report.path) == "".join(lines)
    with TokenIndex(report.path) as index:
        assert index.find_position(len("".join(lines[:7]).encode())) == (0, 7, 0)


def test_bad_parquet_is_named_by_row_column_and_file(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["a", "b", "c", "d", None])
    with pytest.raises(BadRecord, match="row 5: the value of 'text' is null"):
        build(tmp_path / "x.index", [path])
    assert build(tmp_path / "x.index", [path], on_bad="skip").meta.bad_records == 1
    with pytest.raises(MissingTextKey) as caught:
        build(tmp_path / "y.index", [path], text_key="body")
    assert caught.value.found == ("text", "n")
    with pytest.raises(BadRecord, match="row 1: the value of 'n' is a number"):
        build(tmp_path / "y.index", [path], text_key="n")
    broken = write(tmp_path / "b.parquet", path.read_bytes()[:40])
    with pytest.raises(SourceUnreadable, match=r"b\.parquet: is not a readable parquet file"):
        build(tmp_path / "y.index", [broken])


def test_format_is_recognized_without_a_suffix(tmp_path: Path) -> None:
    jsonl = write(tmp_path / "one", good("a"))
    text = write(tmp_path / "two", b"b")
    columns = parquet(tmp_path / "three", ["c"])
    assert text_of(build(tmp_path / "x.index", [jsonl, text, columns]).path) == "abc"


def test_missing_folder_repeated_and_unmatched_files_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    for files, reason in (
        ([tmp_path / "none.jsonl"], "No such file"),
        ([tmp_path], "is a folder"),
        ([path, tmp_path / "." / "a.jsonl"], "listed twice"),
        ([tmp_path / "*.nothing"], "no file matches"),
    ):
        with pytest.raises(SourceUnreadable, match=reason):
            build(tmp_path / "x.index", files)
    with pytest.raises(ValueError, match="at least one data file"):
        build(tmp_path / "x.index", [])


def test_patterns_are_expanded_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    assert text_of(build(tmp_path / "x.index", [tmp_path / "*.jsonl"]).path) == "abc"
