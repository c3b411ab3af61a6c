"""Every format gives any sample by number, counts without loading, and says where bad input is."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from strata.data.errors import DataError
from strata.data.reader import DatasetReader, discover
from strata.data.readers.crc32c import crc32c, masked_crc32c
from strata.data.streaming import index_cache

N = 100


def row(i: int) -> dict[str, Any]:
    return {"id": i, "text": f"sample {i}, with a comma and “quotes”"}


def table(n: int = N) -> pa.Table:
    return pa.table({"id": list(range(n)), "text": [row(i)["text"] for i in range(n)]})


def tfrecord(*contents: bytes) -> bytes:
    frames = []
    for content in contents:
        length = struct.pack("<Q", len(content))
        frames.append(
            length
            + struct.pack("<I", masked_crc32c(length))
            + content
            + struct.pack("<I", masked_crc32c(content))
        )
    return b"".join(frames)


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128 * 128
    size = (
        bytes([len(content)])
        if len(content) < 128
        else bytes([len(content) & 0x7F | 0x80, len(content) >> 7])
    )
    return bytes([number << 3 | 2]) + size + content


def example(i: int) -> bytes:
    """A tf.train.Example with an integer, a text and two floats, written by hand from the wire format."""

    def entry(name: str, feature: bytes) -> bytes:
        return field(1, field(1, name.encode()) + field(2, feature))

    return field(
        1,
        entry("id", field(3, field(1, bytes([i]))))
        + entry("text", field(1, field(1, row(i)["text"].encode())))
        + entry("xy", field(2, field(1, struct.pack("<ff", i, 0.5)))),
    )


def write_tar(path: Path, n: int = N) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(n):
            for suffix, content in (
                ("json", json.dumps(row(i)).encode()),
                ("cls", str(i % 10).encode()),
                ("seg.png", b"\x89PNG" + bytes([i])),
            ):
                member = tarfile.TarInfo(f"./train/{i:04d}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def write_csv(path: Path) -> None:
    lines = ["id,text", *(f'{i},"{row(i)["text"]}\nsecond ""line"""' for i in range(N))]
    path.write_text("\r\n".join(lines) + "\r\n", newline="")


WRITERS: dict[str, tuple[Callable[[Path], Any], Callable[[int], dict[str, Any]]]] = {
    "data.parquet": (lambda p: pa.parquet.write_table(table(), p, row_group_size=7), row),
    "data.feather": (lambda p: pa.feather.write_feather(table(), str(p), chunksize=9), row),
    "data.jsonl": (lambda p: p.write_text("".join(json.dumps(row(i)) + "\n" for i in range(N))), row),
    "data.csv": (write_csv, lambda i: {"id": i, "text": row(i)["text"] + '\nsecond "line"'}),
    "data.tsv": (
        lambda p: p.write_text("id\ttext\n" + "".join(f"{i}\t{i / 2}\n" for i in range(N))),
        lambda i: {"id": i, "text": i / 2},
    ),
    "data.txt": (
        lambda p: p.write_text("".join(f"line {i}\n" for i in range(N))),
        lambda i: {"text": f"line {i}"},
    ),
    "data.tar": (
        write_tar,
        lambda i: {
            "__key__": f"./train/{i:04d}",
            "json": row(i),
            "cls": i % 10,
            "seg.png": b"\x89PNG" + bytes([i]),
        },
    ),
    "data.tfrecord": (
        lambda p: p.write_bytes(tfrecord(*(example(i) for i in range(N)))),
        lambda i: {"id": i, "text": row(i)["text"].encode(), "xy": [float(i), 0.5]},
    ),
}


@pytest.fixture(params=sorted(WRITERS))
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[int], dict[str, Any]]]:
    write, expected = WRITERS[request.param]
    path = tmp_path / request.param
    write(path)
    return path, expected


def test_any_sample_by_number_in_any_order(dataset: tuple[Path, Callable[[int], dict[str, Any]]]) -> None:
    path, expected = dataset
    reader = DatasetReader(path)
    assert len(reader) == N
    wanted = [99, 0, 50, 3, 3, 98, 31, 32, 33]
    assert reader.read(wanted) == [expected(i) for i in wanted]
    assert [reader[i] for i in range(N)] == [expected(i) for i in range(N)]
    assert reader.read([]) == []
    with pytest.raises(IndexError):
        reader.read([N])
    reader.close()


def test_loader_processes_read_a_dataset_they_were_given(
    dataset: tuple[Path, Callable[[int], dict[str, Any]]],
) -> None:
    path, expected = dataset
    reader = DatasetReader(path)
    assert reader[5] == expected(5)  # Open in the parent before the children are forked.
    loader: DataLoader[Any] = DataLoader(reader, batch_size=10, num_workers=2, collate_fn=list)  # type: ignore[arg-type]
    assert [sample for batch in loader for sample in batch] == [expected(i) for i in range(N)]
    assert pickle.loads(pickle.dumps(reader))[7] == expected(7)
    reader.close()


def test_arrow_streams_and_npy_arrays_work_too(tmp_path: Path) -> None:
    with pa.ipc.new_stream(str(tmp_path / "s.arrow"), table().schema) as writer:
        for batch in table().to_batches(max_chunksize=8):
            writer.write_batch(batch)
    assert DatasetReader(tmp_path / "s.arrow").read([99, 8]) == [row(99), row(8)]
    array = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(DatasetReader(tmp_path / "a.npy")[7]["data"], array[7])
    np.save(tmp_path / "one.npy", np.arange(5))
    assert DatasetReader(tmp_path / "one.npy")[3] == {"data": 3}


def test_directories_globs_and_empty_files_are_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden.jsonl").write_text('{"id": -1}\n')
    (tmp_path / "README.md").write_text("not data")
    for name, ids in (("a.jsonl", [0, 1]), ("b.jsonl", []), ("sub/c.jsonl", [2, 3, 4]), ("z.jsonl", [])):
        (tmp_path / name).write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))
    found = discover(tmp_path)
    assert [f.samples for f in found.files] == [2, 0, 3, 0]
    reader = DatasetReader(found)
    assert [reader[i]["id"] for i in range(5)] == [0, 1, 2, 3, 4]
    assert reader.files_of(1, 3) == [str(tmp_path / "a.jsonl"), str(tmp_path / "sub/c.jsonl")]
    assert reader.files_of(3, 5) == [str(tmp_path / "sub/c.jsonl")]
    assert discover(f"{tmp_path}/*.jsonl").total == 2
    assert discover(f"{tmp_path}/**/*.jsonl").total == 5
    assert discover(f"file://{tmp_path}/a.jsonl").total == 2


def test_crc32c_matches_published_values() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


@given(st.binary(max_size=5_000))
@settings(max_examples=50)
def test_crc32c_agrees_with_the_bitwise_definition(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


def test_flipped_and_cut_tfrecords_are_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    whole = tfrecord(b"first", b"second", b"third")
    flipped = bytearray(whole)
    flipped[whole.index(b"second")] ^= 1
    path.write_bytes(flipped)
    reader = DatasetReader(path)
    assert reader.read([0, 2]) == [{"record": b"first"}, {"record": b"third"}]
    with pytest.raises(DataError, match="record 2: the content does not match its checksum"):
        reader.read([1])
    skipped = DatasetReader(path, on_bad="skip")
    assert (len(skipped), skipped.bad) == (2, 1)

    path.write_bytes(whole[:-6])
    with pytest.raises(DataError, match="record 3: the file is cut off in the record"):
        discover(path)
    assert (discover(path, on_bad="skip").total, discover(path, on_bad="skip").bad) == (2, 1)
    broken_length = bytearray(whole)
    broken_length[len(tfrecord(b"first"))] ^= 1
    path.write_bytes(broken_length)
    with pytest.raises(DataError, match="record 2: the record's length does not match its checksum"):
        discover(path)


def test_example_numbers_below_zero_and_bytes_that_are_no_example(tmp_path: Path) -> None:
    minus_one = field(1, field(1, field(1, b"n") + field(2, field(3, field(1, b"\xff" * 9 + b"\x01")))))
    (tmp_path / "x.tfrecord").write_bytes(tfrecord(minus_one, b"\xff\xff\xff", b""))
    assert DatasetReader(tmp_path / "x.tfrecord").read([0, 1, 2]) == [
        {"n": -1},
        {"record": b"\xff\xff\xff"},
        {"record": b""},
    ]


def test_a_tar_whose_member_ends_before_the_start_of_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, 1)
    header = tarfile.TarInfo("a.txt")
    header.size = -5000
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + path.read_bytes())
    with pytest.raises(DataError, match="damaged or not a tar file"):
        DatasetReader(path)


def test_a_cut_tar_is_named_or_its_last_sample_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    write_tar(path, 5)
    path.write_bytes(path.read_bytes()[: 512 * 2 * 3 * 4 + 512 + 3])
    with pytest.raises(DataError, match="damaged or not a tar file"):
        discover(path)
    reader = DatasetReader(path, on_bad="skip")
    assert (len(reader), reader.bad) == (4, 1)
    assert reader[3]["cls"] == 3


def test_damaged_files_are_typed_errors_that_name_them(tmp_path: Path) -> None:
    for name, content in (
        ("x.parquet", b"PAR1 nonsense"),
        ("e.parquet", b""),
        ("x.arrow", b"ARROW1 nonsense"),
        ("x.tar", b"nonsense" * 200),
        ("x.npy", b"nonsense"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            discover(tmp_path / name)
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="pickled objects"):
        discover(tmp_path / "o.npy")


def test_a_path_that_names_nothing_says_what_to_give(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path / "*.jsonl", tmp_path):
        with pytest.raises(DataError, match="there is no such file"):
            discover(path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"several formats \(csv, jsonl\)"):
        discover(tmp_path)
    assert discover(tmp_path, "csv").total == 1
    with pytest.raises(DataError, match="'petastorm' is not known"):
        discover(tmp_path, "petastorm")
    with pytest.raises(DataError, match=r"with \.parquet"):
        discover(tmp_path, "parquet")
    (tmp_path / "odd.name").write_text('{"a": 1}\n')
    assert discover(tmp_path / "odd.name", "jsonl").total == 1
    with pytest.raises(DataError, match="format cannot be determined"):
        discover(tmp_path / "odd.name")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        discover(tmp_path)


def test_a_file_that_changed_since_it_was_counted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')
    found = discover(path)
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(DataError, match="it has 18 bytes now and had 9"):
        DatasetReader(found).read([0])
    path.unlink()
    with pytest.raises(DataError, match="no such file"):
        DatasetReader(found).read([0])


def test_an_index_is_kept_used_and_forgotten_when_the_file_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "WORTH_KEEPING_BYTES", 1)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"a": {i}}}\n' for i in range(100)))
    first = discover(path)
    (entry,) = (own_cache / "index").iterdir()
    scans = []
    monkeypatch.setattr("strata.data.readers.text.scan", lambda *a, **k: scans.append(1))
    assert DatasetReader(discover(path)).read([50]) == [{"a": 50}]
    assert not scans
    monkeypatch.undo()
    monkeypatch.setenv("STRATA_CACHE_DIR", str(own_cache))
    entry.write_bytes(b"damaged")
    assert discover(path) == first
    with path.open("a") as file:
        file.write('{"a": 100}\n')
    assert discover(path).total == 101


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "WORTH_KEEPING_BYTES", 1)
    monkeypatch.setenv("STRATA_CACHE_DIR", "/proc/nowhere")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    assert discover(tmp_path).total == 1


def test_memory_for_parquet_row_groups_is_bounded(tmp_path: Path) -> None:
    big = pa.table({"x": np.arange(400_000)})
    pa.parquet.write_table(big, tmp_path / "x.parquet", row_group_size=10_000)
    reader = DatasetReader(tmp_path / "x.parquet")
    reader._cache._budget_bytes = 200_000
    for i in range(0, 400_000, 10_000):
        assert reader[i + 7] == {"x": i + 7}
    assert reader._cache._used_bytes <= 200_000


def test_a_page_of_parquet_that_is_not_what_its_checksum_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = pa.table({"x": list(range(1_000))})
    pa.parquet.write_table(rows, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    at = data.index((500).to_bytes(8, "little"))
    data[at] ^= 1  # Any number is a number: only the checksum tells.
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.parquet.*damaged"):
        DatasetReader(path)[500]
