"""Files are there with all of their content or not at all."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from strata.files import (
    RangeFile,
    fresh_file,
    fresh_folder,
    is_on_network,
    make_folder,
    move_into_place,
    sync_folder,
    write_file,
)


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


def test_content_of_a_file_that_must_be_absent_is_that_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_file(path, b"first", durable=True, if_absent=True)
    with pytest.raises(FileExistsError):
        write_file(path, b"second", durable=True, if_absent=True)
    assert path.read_bytes() == b"first"
    assert path.stat().st_nlink == 1
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("there_is", ["nothing", "an empty folder"])
def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path, there_is: str) -> None:
    path = tmp_path / "above" / "made"
    if there_is == "an empty folder":
        path.mkdir(parents=True)
    with fresh_folder(path) as fresh:
        (fresh / "inner").mkdir()
        (fresh / "inner" / "file").write_bytes(b"x")
        assert not list(path.parent.glob("made/*"))
    assert [str(found.relative_to(path)) for found in path.rglob("*")] == ["inner", "inner/file"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["made"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_has_a_folders_name_is_replaced_only_when_asked(
    tmp_path: Path, kind: str, overwrite: bool
) -> None:
    path, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in [elsewhere, *([path] if kind == "folder" else [])]:
        folder.mkdir(exist_ok=True)
        (folder / "old").touch()
    if kind == "file":
        path.touch()
    elif kind == "link":
        path.symlink_to(elsewhere)

    def make() -> None:
        with fresh_folder(path, overwrite=overwrite) as fresh:
            (fresh / "new").touch()

    if overwrite:
        make()
        assert os.listdir(path) == ["new"]
    else:
        with pytest.raises(OSError, match=r"Not a directory|not empty"):
            make()
        assert kind == "file" or os.listdir(path) == ["old"]
    assert os.listdir(elsewhere) == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "made"]


def test_a_folder_that_is_not_completed_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old").touch()

    def fail() -> None:
        with fresh_folder(tmp_path / "made", overwrite=True) as fresh:
            (fresh / "new").touch()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")] == ["made", "made/old"]


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


def test_folder_is_made_while_another_process_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b"
    mkdir = os.mkdir
    was_there: list[str] = []

    def removed_after_the_first_look(path: str, mode: int = 0o777) -> None:
        if Path(path) == folder and not was_there:
            was_there.append(path)
            raise FileExistsError(path)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", removed_after_the_first_look)
    make_folder(folder)
    assert was_there
    assert folder.is_dir()
    make_folder(folder)


def test_what_is_no_folder_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
