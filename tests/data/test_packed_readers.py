"""Compressed lines and tars, and MDS shards: any sample by its number."""

from __future__ import annotations

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from benchmarks.mds_writer import KINDS, SAMPLES
from benchmarks.mds_writer import sample as mosaicml_sample
from strata.data import DataError, DatasetReader, discover
from tests.support_datasets import in_members, lines, mds, tar, zstd

ROWS = [
    {"id": i, "text": "".join(random.Random(i).choices("abcdefgh ", k=200 + i % 700))} for i in range(12_000)
]


@pytest.fixture(scope="module")
def packed() -> dict[str, bytes]:
    data = lines(ROWS)
    return {
        "one.jsonl.gz": gzip.compress(data, 5),
        "members.jsonl.gz": in_members(data, 700_000, "gz"),
        "one.jsonl.zst": zstd(data),
        "frames.jsonl.zst": in_members(data, 300_000, "zst"),
    }


@pytest.mark.parametrize("name", ["one.jsonl.gz", "members.jsonl.gz", "one.jsonl.zst", "frames.jsonl.zst"])
def test_lines_of_compressed_files_are_read_by_number(
    tmp_path: Path, packed: dict[str, bytes], name: str
) -> None:
    (tmp_path / name).write_bytes(packed[name])
    reader = DatasetReader(tmp_path)
    assert (reader.found.format, len(reader)) == ("jsonl", len(ROWS))
    wanted = random.Random(1).sample(range(len(ROWS)), 40)
    for again in (reader, DatasetReader(tmp_path)):  # The second one finds the index that the first one kept.
        assert again.read(wanted) == [ROWS[i] for i in wanted]
    assert reader.read([len(ROWS) - 1, 0]) == [ROWS[-1], ROWS[0]]
    if name != "one.jsonl.zst":
        assert len(reader.found.indexes[0].arrays["span_entries"]) > 2


def test_a_compressed_file_that_is_cut_short_or_damaged_is_named(
    tmp_path: Path, packed: dict[str, bytes]
) -> None:
    for name, data in packed.items():
        path = tmp_path / name
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(DataError, match=name):
            discover(path)
        if name.endswith(".zst"):
            continue  # Frames without a checksum do not tell what they held.
        path.write_bytes(data[:1000] + bytes(3000) + data[4000:])
        with pytest.raises(DataError, match=name):
            DatasetReader(path).read([0, len(ROWS) - 1])
    (tmp_path / "not.jsonl.gz").write_bytes(b'{"id": 1}\n')
    with pytest.raises(DataError, match="neither gzip nor zstd"):
        discover(tmp_path / "not.jsonl.gz")


def test_a_file_that_changed_after_it_was_indexed_is_refused(
    tmp_path: Path, packed: dict[str, bytes]
) -> None:
    path = tmp_path / "one.jsonl.gz"
    path.write_bytes(packed["one.jsonl.gz"])
    found = discover(path)
    path.write_bytes(packed["one.jsonl.gz"][:-9])
    with pytest.raises(DataError, match="when it was counted"):
        DatasetReader(found).read([0])


def test_samples_of_a_compressed_tar_are_read_by_number(tmp_path: Path) -> None:
    samples = [{"txt": f"sample {i} ".encode() * 500, "cls": str(i).encode()} for i in range(900)]
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar(samples)))
    reader = DatasetReader(tmp_path)
    assert len(reader) == 900
    assert [row["cls"] for row in reader.read([899, 3, 450])] == [899, 3, 450]
    assert reader[77]["txt"] == samples[77]["txt"].decode()


COLUMNS = {
    "text": ("str", None),
    "number": ("int", 8),
    "small": ("uint16", 2),
    "array": ("ndarray:int32:2,2", 16),
}


def sample(i: int) -> dict[str, bytes]:
    return {
        "text": f"text {i}".encode(),
        "number": np.int64(i - 50).tobytes(),
        "small": np.uint16(i).tobytes(),
        "array": np.full((2, 2), i, "<i4").tobytes(),
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz"])
def test_mds_shards_are_read_by_number(tmp_path: Path, compression: str | None) -> None:
    files = mds([sample(i) for i in range(100)], COLUMNS, shard_samples=33, compression=compression)
    if compression == "zstd:7":  # The level is part of the setting, not of the name.
        files = {
            name.replace("zstd:7", "zstd"): data.replace(b"mds.zstd:7", b"mds.zstd")
            for name, data in files.items()
        }
    reader = DatasetReader(write(tmp_path / "train", files))
    assert (reader.found.format, len(reader), len(reader.files)) == ("mds", 100, 4)
    for i, row in zip([99, 0, 33, 32], reader.read([99, 0, 33, 32]), strict=True):
        assert (row["text"], row["number"], row["small"]) == (f"text {i}", i - 50, i)
        assert np.array_equal(row["array"], np.full((2, 2), i))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_format_s_own_writer_wrote_is_read(kind: str) -> None:
    folder = Path(__file__).parent / "written_by_mosaicml" / kind
    reader = DatasetReader(folder)
    assert (reader.found.format, len(reader), len(reader.files)) == ("mds", SAMPLES, 3)
    numbers = random.Random(kind).sample(range(SAMPLES), SAMPLES)
    for i, row in zip(numbers, reader.read(numbers), strict=True):
        expected = mosaicml_sample(i)
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_equal(row[name], value)
            assert getattr(row[name], "dtype", None) == (
                value.dtype if isinstance(value, np.ndarray) else None
            )
    compared = [reader.compare_digests(number) for number in range(3)]
    assert compared == [{"raw": 2, "zstd": 2, "gz": 2}.get(kind, 0)] * 3


def test_mds_encodings(tmp_path: Path) -> None:
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    values = {
        "any": ("ndarray", bytes([34, 2 << 2, 2, 3]) + array.tobytes(), array),
        "shaped": (
            "ndarray:float32",
            bytes([2 << 2 | 1]) + np.array([2, 3], "<u2").tobytes() + array.tobytes(),
            array,
        ),
        "json": ("json", b'{"a": [1]}', {"a": [1]}),
        "decimal": ("str_decimal", b"1.10", Decimal("1.10")),
        "digits": ("str_int", b"123456789012345678901", 123456789012345678901),
        "real": ("float64", np.float64(0.5).tobytes(), 0.5),
        "raw": ("bytes", b"\x00\x01", b"\x00\x01"),
        "jpeg": ("jpeg", b"\xff\xd8\xff", b"\xff\xd8\xff"),
    }
    columns = {name: (encoding, None) for name, (encoding, _, _) in values.items()}
    files = mds([{name: data for name, (_, data, _) in values.items()}], columns, shard_samples=1)
    row = DatasetReader(write(tmp_path, files))[0]
    for name, (_, _, expected) in values.items():
        assert (
            np.array_equal(row[name], expected) if isinstance(expected, np.ndarray) else row[name] == expected
        )


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_damaged_mds_shard_is_named(tmp_path: Path, compression: str | None) -> None:
    files = mds([sample(i) for i in range(40)], COLUMNS, shard_samples=20, compression=compression)
    name = next(iter(files))
    write(tmp_path, files | {name: files[name][:30] + b"XXXX" + files[name][34:]})
    with pytest.raises(DataError, match=r"shard\.00000"):
        DatasetReader(tmp_path).read(range(20))
    write(tmp_path, {name: files[name][:-1]})
    with pytest.raises(DataError, match=r"shard\.00000.*index\.json says"):
        discover(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"shard\.00000.*the file is missing"):
        discover(tmp_path)


def test_what_mds_must_not_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", mds([{"x": b"\x80\x04."}], {"x": ("pkl", None)}, shard_samples=1))
    with pytest.raises(DataError, match="'pkl' are not read") as refused:
        DatasetReader(tmp_path / "a")[0]
    assert "run code" in refused.value.hint
    (tmp_path / "a" / "index.json").write_text(json.dumps({"shards": [{"format": "csv"}]}))
    with pytest.raises(DataError, match="not the index of an MDS dataset"):
        discover(tmp_path / "a")
