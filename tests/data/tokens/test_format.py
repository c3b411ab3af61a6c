"""The bytes of an index: what goes in comes out, and anything else is refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.data.tokens.errors import IndexNotFound, InvalidIndex
from strata.data.tokens.format import IndexEntry, IndexHeader
from strata.data.tokens.index import TokenIndex
from tests.data.tokens.corpora import WordTokenizer, build, texts, write_jsonl

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(
    st.sampled_from([2, 4]),
    u32,
    st.integers(1, 2**32 - 1),
    u64,
    u64,
    u64,
    u64,
    st.binary(min_size=16, max_size=16),
)
def test_header_survives_its_bytes(
    width: int,
    files: int,
    interval: int,
    entries: int,
    records: int,
    tokens: int,
    meta: int,
    identity: bytes,
) -> None:
    header = IndexHeader(
        token_bytes=width,
        num_files=files,
        entry_interval=interval,
        num_entries=entries,
        num_records=records,
        total_tokens=tokens,
        meta_bytes=meta,
        identity=identity,
    )
    assert len(header.to_bytes()) == IndexHeader.SIZE
    assert IndexHeader.from_bytes(header.to_bytes()) == header


@given(u64, u64, u64, u64)
def test_entry_survives_its_bytes(
    file_index: int, byte_offset: int, cumulative_tokens: int, record: int
) -> None:
    entry = IndexEntry(
        file_index=file_index, byte_offset=byte_offset, cumulative_tokens=cumulative_tokens, record=record
    )
    assert len(entry.to_bytes()) == IndexEntry.SIZE
    assert IndexEntry.from_bytes(entry.to_bytes()) == entry


def test_wrong_magic_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="bad magic number"):
        IndexHeader.from_bytes(b"BADMAGIC" + bytes(40))


def test_every_flipped_byte_of_a_header_is_noticed() -> None:
    good = IndexHeader(total_tokens=7, num_files=1).to_bytes()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises(InvalidIndex):
            IndexHeader.from_bytes(bytes(bad))


def test_short_header_and_entry_are_refused() -> None:
    with pytest.raises(InvalidIndex, match="cut short"):
        IndexHeader.from_bytes(IndexHeader().to_bytes()[:-1])
    with pytest.raises(InvalidIndex, match="cut short"):
        IndexEntry.from_bytes(b"\0" * (IndexEntry.SIZE - 1))


@pytest.fixture
def index_path(tmp_path: Path) -> Path:
    path = tmp_path / "a.index"
    build(path, [write_jsonl(tmp_path / "a.jsonl", texts(50))])
    return path


def test_other_version_is_refused_with_both_versions(index_path: Path) -> None:
    data = bytearray(index_path.read_bytes())
    struct.pack_into("<I", data, 8, 9)
    index_path.write_bytes(data)
    with pytest.raises(InvalidIndex, match=r"a\.index.*version 9.*reads up to version 1"):
        TokenIndex(index_path)


@pytest.mark.parametrize("content", [b"", b"STRA", b"plain text, no index at all" * 10])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(InvalidIndex, match=r"other\.bin.*bad magic number"):
        TokenIndex(path)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidIndex, match=f"{tmp_path} is a folder, not a token index"):
        TokenIndex(tmp_path)


def test_missing_index_is_also_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        TokenIndex(tmp_path / "none.index")
    assert isinstance(caught.value, IndexNotFound)
    assert "Token index file not found" in str(caught.value)
    assert "strata index" in str(caught.value)


@pytest.mark.parametrize("change", [-1, 1])
def test_cut_or_grown_index_is_refused(index_path: Path, change: int) -> None:
    data = index_path.read_bytes()
    index_path.write_bytes(data[:change] if change < 0 else data + b"\0")
    with pytest.raises(InvalidIndex, match="cut short or grown"):
        TokenIndex(index_path)


def test_damaged_metadata_is_refused(index_path: Path) -> None:
    data = bytearray(index_path.read_bytes())
    data[-3] ^= 1
    index_path.write_bytes(data)
    with TokenIndex(index_path) as index, pytest.raises(InvalidIndex, match="metadata is damaged"):
        _ = index.meta


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_every_token_is_found_where_it_came_from(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], interval: int
) -> None:
    folder = tmp_path_factory.mktemp("find")
    paths, expected = [], []
    for i, words in enumerate(files):
        lines = [" ".join(["w"] * count) for count in words]
        paths.append(write_jsonl(folder / f"{i}.jsonl", lines))
        place = 0
        for line, encoded in zip(lines, paths[-1].read_bytes().splitlines(keepends=True), strict=True):
            expected += [(i, place, offset) for offset in range(len(line.split()))]
            place += len(encoded)
    if not expected:
        return
    path = folder / "x.index"
    header = build(path, paths, tokenizer=WordTokenizer(), entry_interval=interval).header
    assert header.num_entries == -(-len(expected) // interval)
    with TokenIndex(path) as index:
        assert [index.find_position(token) for token in range(index.total_tokens)] == expected
        for wrong in (len(expected), len(expected) + 1000):
            with pytest.raises(ValueError, match=f"{wrong} exceeds total tokens"):
                index.find_position(wrong)
        with pytest.raises(ValueError, match="negative"):
            index.find_position(-1)


def test_index_travels_to_another_process_by_path(index_path: Path) -> None:
    with TokenIndex(index_path) as index, pickle.loads(pickle.dumps(index)) as copy:
        assert copy.tokens.tolist() == index.tokens.tolist()
        assert len(pickle.dumps(index)) < 1000


def test_index_replaced_while_in_use_is_noticed(index_path: Path, tmp_path: Path) -> None:
    with TokenIndex(index_path) as index:
        travelling = pickle.dumps(index)
    build(index_path, [write_jsonl(tmp_path / "a.jsonl", texts(50, seed=1))])
    with pytest.raises(InvalidIndex, match="replaced by another index"):
        pickle.loads(travelling)


def test_reading_everything_does_not_keep_everything_resident(tmp_path: Path) -> None:
    index = TokenIndex(_large_index(tmp_path, tokens=100_000_000))
    before = _resident_file_bytes()
    step = 1 << 20
    for at in range(0, index.total_tokens, step):
        index.tokens[at : at + step].sum()
        index.let_go(2 * step)
    assert _resident_file_bytes() - before < 100 << 20  # 200 MB were read
    index.close()


def _large_index(folder: Path, *, tokens: int) -> Path:
    """A sparse index without records: only its tokens are read."""
    path = folder / "large.index"
    header = IndexHeader(token_bytes=2, num_files=1, total_tokens=tokens)
    with path.open("wb") as file:
        file.write(header.to_bytes())
        file.truncate(header.file_bytes)
    return path


def _resident_file_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssFile in /proc/self/status")
