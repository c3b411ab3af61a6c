"""What other users of the machine can read, and what they can take beforehand: nothing."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strata import shared_memory
from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.copying.staging import find_snapshots
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.files import write_file
from strata.stores.local import LocalStore
from tests.strangers import STRANGER, as_stranger, needs_root, open_folder
from tests.support import Coordinator

folder = pytest.fixture(open_folder)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The usual one: others may read."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def readable(top: str) -> list[str]:
    """All files below a folder that this user can read."""
    found = []
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            try:
                with open(path, "rb") as file:
                    file.read(1)
                found.append(path)
            except OSError:
                continue
    return found


@needs_root
def test_nobody_else_reads_the_coordinators_files(folder: Path) -> None:
    for data_dir in (folder / "new", folder / "shared"):
        if data_dir.name == "shared":
            data_dir.mkdir(mode=0o755)
        coordinator = Coordinator(data_dir).start()
        try:
            names = {path.name for path in data_dir.iterdir()}
            assert {"journal.sqlite", "logs.sqlite", "serving.json"} <= names
            assert as_stranger(readable, str(data_dir)) == []
        finally:
            coordinator.stop()
    assert mode(folder / "new") == 0o700
    assert mode(folder / "shared") == 0o755  # As its user made it; what is in it is private all the same.


def test_a_data_directory_of_an_earlier_version_is_closed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    SqliteJournal(folder).close()
    assert "chmod 700" in caplog.text
    for path in (folder, folder / "journal.sqlite"):
        path.chmod(0o755)
    SqliteJournal(folder).close()
    assert (mode(folder), mode(folder / "journal.sqlite")) == (0o700, 0o600)
    assert "fixed now" in caplog.text


@needs_root
def test_checkpoints_are_private_unless_their_folder_was_shared(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir(mode=0o755)
    for place in (folder / "runs" / "own", shared):
        with CheckpointManager([LocalStore(place)]) as manager:
            manager.save({"weight": torch.ones(4)}, step=1).result(60)
    assert as_stranger(readable, str(folder / "runs")) == []
    assert (mode(folder / "runs"), mode(folder / "runs" / "own")) == (0o700, 0o700)
    assert as_stranger(readable, str(shared))


@needs_root
def test_a_name_in_shared_memory_that_a_stranger_took_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder / "shm"
    root.mkdir()
    root.chmod(0o1777)
    home = folder / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(root))
    usual = str(shared_memory.images_folder())
    as_stranger(os.mkdir, usual, 0o777)
    as_stranger(os.mkdir, str(shared_memory.run_folder("job").parent), 0o777)
    assert os.lstat(usual).st_uid == STRANGER

    def own() -> list[Path]:
        return [path for path in root.iterdir() if path.lstat().st_uid == os.getuid()]

    with CheckpointManager([], memory=Memory(job="job")) as manager:
        manager.save({"weight": torch.ones(4)}, step=3).result(60)
        assert own()
        assert all(mode(path) == 0o700 for path in own())
        assert as_stranger(readable, str(root)) == []
        os.rmdir(usual)  # Who used the other name continues to.
        assert shared_memory.images_folder() in own()
        as_stranger(os.mkdir, usual, 0o777)
        assert [snapshot.manifest.step for snapshot in find_snapshots("job")] == [3]
    assert mode(home / ".strata" / "folder-key") == 0o600
    assert own() == []
    assert os.listdir(usual) == []


@needs_root
def test_a_link_in_place_of_the_folder_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "nowhere"))
    trap = folder / "trap"
    trap.mkdir()
    usual = shared_memory.images_folder(folder)
    usual.symlink_to(trap)
    os.chown(usual, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="belongs to") as refused:
        shared_memory.make_private(usual / "job", inside=usual)
    assert refused.value.filename == str(usual)
    assert list(trap.iterdir()) == []


def test_own_folders_that_are_open_are_closed(folder: Path) -> None:
    usual = shared_memory.images_folder(folder)
    usual.mkdir(mode=0o755)
    shared_memory.make_private(usual / "job", inside=usual)
    assert (mode(usual), mode(usual / "job")) == (0o700, 0o700)


def test_files_are_private_unless_they_are_meant_for_others(tmp_path: Path) -> None:
    write_file(tmp_path / "own", "secret", durable=False)
    write_file(tmp_path / "shared", "index", durable=False, mode=0o666)
    assert (mode(tmp_path / "own"), mode(tmp_path / "shared")) == (0o600, 0o644)
