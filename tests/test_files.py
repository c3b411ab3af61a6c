"""Files are there with all of their content or not at all."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from strata.files import RangeFile, fresh_file, is_on_network, move_into_place, sync_folder, write_file


@pytest.mark.parametrize("durable", [False, True])
def test_content_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "note.json"
    write_file(path, b"old", durable=durable)
    write_file(path, "néw", durable=durable)
    assert path.read_text(encoding="utf-8") == "néw"
    assert os.listdir(tmp_path) == ["note.json"]


def test_unfinished_files_are_not_visible(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")
    with fresh_file(path, durable=True) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")

    def fail() -> None:
        with fresh_file(path, durable=False) as file:
            file.write(b"new")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["note"]


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_durable_is_flushed_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path, flushed, fsync = tmp_path / "note", [], os.fsync

    def watched(fd: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else os.fstat(fd).st_size
        flushed.append((kind, path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write_file(path, b"12345", durable=durable)
    assert flushed == ([(5, False), ("folder", True)] if durable else [])


def test_a_finished_file_replaces_another(tmp_path: Path) -> None:
    (tmp_path / "fresh").write_bytes(b"new")
    (tmp_path / "note").write_bytes(b"old")
    move_into_place(tmp_path / "fresh", tmp_path / "note", durable=True)
    assert (tmp_path / "note").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["note"]


def test_errors_are_those_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "note", b"", durable=True)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")


def test_what_is_read_by_ranges_reads_like_a_file() -> None:
    content = bytes(range(256)) * 10
    file = io.BufferedReader(RangeFile(lambda start, size: content[start : start + size], len(content)), 100)
    assert file.read(3) == content[:3]
    assert file.seek(-5, os.SEEK_END) == len(content) - 5
    assert file.read() == content[-5:]
    assert file.seek(1000) == file.tell() == 1000
    assert file.read(777) == content[1000:1777]
    assert file.seek(len(content) + 9) == len(content) + 9
    assert file.read(1) == b""
    with pytest.raises(ValueError, match="before the start"):
        file.seek(-1)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/local/checkpoints", False),
        ("/shared/team/run", True),
        ("/shared", True),
        ("/shared/scratch/run", False),
        ("/sharedness/run", False),
        ("/with space/run", True),
        ("s3://bucket/run", False),
    ],
)
def test_files_of_another_machine_are_known_by_their_file_system(
    tmp_path: Path, path: str, expected: bool
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/nvme0 / ext4 rw 0 0\n"
        "filer:/x /shared nfs4 rw 0 0\n"
        "/dev/nvme1 /shared/scratch xfs rw 0 0\n"
        "filer:/y /with\\040space lustre rw 0 0\n"
    )
    assert is_on_network(path, mounts=str(mounts)) is expected
    assert not is_on_network(path, mounts=str(tmp_path / "missing"))
