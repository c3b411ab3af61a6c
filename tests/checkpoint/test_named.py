"""Checkpoints under names that somebody has chosen, files that others have made, and a step saved tier by tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.naming import step_of, step_stem
from strata.checkpoint.catalog.retention import newest_first, remove_named, remove_older
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed
from strata.checkpoint.pipeline import Policy
from strata.stores import open_store
from strata.stores.deferred import open_deferred
from strata.stores.faulty import Fault
from strata.stores.protocol import NoCredentials, Store
from tests.checkpoint.states import assert_is_step, small_state
from tests.checkpoint.test_policies import failing


@pytest.fixture
def manager(folder: Path, memory: Memory) -> Iterator[CheckpointManager]:
    with CheckpointManager(folder, memory=memory, keep_count=2, stem=step_stem, adopt=step_of) as manager:
        yield manager


def plain(folder: Path, step: int, *, at_s: float | None = None) -> Path:
    """A file of plain `torch.save`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"checkpoint_step_{step:08d}.pt"
    torch.save(small_state(step), path)
    if at_s is not None:
        os.utime(path, (at_s, at_s))
    return path


# Names


def test_what_has_the_name_is_replaced_and_retention_leaves_it_alone(
    manager: CheckpointManager, folder: Path
) -> None:
    for step in (1, 2):
        handle = manager.save(small_state(step), step=step, name="best.pt")
        assert handle.path == str(folder / "best.pt")
        handle.result(30)
        assert_is_step(manager.load(name="best.pt"), step)
    restored = manager.restore(name="best.pt")
    assert restored.info.step == 2
    for step in range(3, 8):
        manager.save(small_state(step), step=step).result(30)
    names = {path.name for path in folder.glob("*.pt")}
    assert names == {"best.pt", "checkpoint_step_00000006.pt", "checkpoint_step_00000007.pt"}
    with pytest.raises(CheckpointNotFound, match=r"There is no checkpoint 'other\.pt'"):
        manager.load(name="other.pt")


@pytest.mark.parametrize(
    ("operation", "fault", "kept"),
    [("write", Fault.NO_SPACE, 1), ("commit", Fault.REFUSED, 1), ("commit", Fault.LOST_REPLY, 2)],
)
def test_a_name_never_has_the_manifest_of_other_bytes_where_a_save_fails(
    folder: Path, job: str, operation: str, fault: Fault, kept: int
) -> None:
    store = open_store(folder)
    with CheckpointManager(store, memory=Memory(job=job)) as manager:
        manager.save(small_state(1), step=1, name="last.pt").result(30)
    faulty = failing(store, fault, times=1, operation=operation)
    with CheckpointManager(faulty, memory=Memory(job=job), policy=Policy(on_error="warn")) as manager:
        assert manager.save(small_state(2), step=2, name="last.pt").exception(30) is not None
        assert_is_step(manager.load(name="last.pt"), kept)
        manager.save(small_state(3), step=3, name="last.pt").result(30)
        assert_is_step(manager.load(name="last.pt"), 3)


def test_a_manifest_of_another_file_proves_nothing(manager: CheckpointManager, folder: Path) -> None:
    manager.save(small_state(1), step=1, name="a.pt").result(30)
    (folder / "b.pt").write_bytes((folder / "a.pt").read_bytes())
    (folder / "b.manifest.json").write_bytes((folder / "a.manifest.json").read_bytes())
    with pytest.raises(LoadFailed, match=r"not the manifest of b\.pt"):
        manager.load(name="b.pt")


def test_the_path_of_a_save_is_known_when_it_starts(manager: CheckpointManager, folder: Path) -> None:
    first = manager.save(small_state(1), step=1)
    first.result(30)
    again = manager.save(small_state(1), step=1)
    assert first.path == str(folder / "checkpoint_step_00000001.pt")
    assert again.path == str(folder / f"checkpoint_step_00000001-{again.checkpoint_id}.pt")
    assert again.result(30).path == again.path


# Files without a manifest


def test_files_are_restored_by_step_and_what_is_saved_next_continues_them(
    manager: CheckpointManager, folder: Path
) -> None:
    for step in (30, 10, 20):
        plain(folder, step)
    (folder / "other.pt").write_bytes(b"no checkpoint")
    assert [info.step for info in manager.all_checkpoints()] == [30, 20, 10]
    restored = manager.restore()
    assert_is_step(restored.state, 30)
    manager.save(small_state(15), step=15).result(30)
    (entry,) = Catalog(open_store(folder)).list().entries
    assert entry.manifest.parent == "checkpoint_step_00000030.pt"
    assert [info.step for info in manager.all_checkpoints()] == [15, 30, 20, 10]
    assert len(list(folder.glob("*.pt"))) == 5  # Retention is not for what others have made.


def test_a_file_counts_by_its_age_among_checkpoints_of_later_generations(
    folder: Path, memory: Memory
) -> None:
    with CheckpointManager(folder, memory=memory, stem=step_stem, adopt=step_of) as manager:
        manager.fence(5)
        saved = manager.save(small_state(20), step=20).result(30)
        plain(folder, 10, at_s=saved.created_at - 60)
        plain(folder, 21, at_s=saved.created_at + 60)
        assert [info.step for info in manager.all_checkpoints()] == [21, 20, 10]


def test_files_of_others_are_not_looked_at_unless_asked(folder: Path, memory: Memory) -> None:
    plain(folder, 10)
    with (
        CheckpointManager(folder, memory=memory) as manager,
        pytest.raises(CheckpointNotFound),
    ):
        manager.load()


def test_an_image_without_its_manifest_is_loaded_by_name_only(
    manager: CheckpointManager, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        manager.save(small_state(step), step=step).result(30)
    manager.drop_snapshots()
    (folder / "checkpoint_step_00000002.manifest.json").unlink()
    assert_is_step(manager.load(), 1)
    assert "could not load step 2 in NVME" in caplog.text
    assert_is_step(manager.load(name="checkpoint_step_00000002.pt"), 2)


# What to accept, and a step in every tier


def test_what_is_not_accepted_is_passed_over(manager: CheckpointManager) -> None:
    for step in (1, 2):
        manager.save(small_state(step), step=step).result(30)

    def accept(state: Any, path: str) -> int:
        if state["step"] == 2:
            raise LoadFailed("not this one")
        return int(state["step"])

    restored = manager.restore(accept=accept)
    assert restored.state == 1
    assert any("not this one" in reason for reason in restored.reasons)


def test_the_nearest_of_a_step_is_taken_where_each_tier_was_saved_by_itself(
    tmp_path: Path, memory: Memory
) -> None:
    near, far = open_store(tmp_path / "near"), Renamed(open_store(tmp_path / "far"))
    with CheckpointManager([near, far], memory=memory) as manager:
        for tier in ("NVME", "FAR"):
            manager.save(small_state(1), step=1, tiers=[tier]).result(30)
        durable = ["NVME", "FAR"]
        assert manager.restore(tiers=durable).tier == "FAR"
        assert manager.restore(tiers=durable, nearest_of_step=True).tier == "NVME"
        manager.save(small_state(2), step=2, tiers=["FAR"]).result(30)
        assert manager.restore(tiers=durable, nearest_of_step=True).tier == "FAR"


class Renamed:
    """A store that calls its tier by another name."""

    tier = "FAR"

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


# Removing by name and age


def test_cleaning_by_age_counts_what_looks_intact(manager: CheckpointManager, folder: Path) -> None:
    store = open_store(folder)
    for step in range(1, 5):
        manager.save(small_state(step), step=step, name=f"{step}.pt").result(30)
    os.truncate(folder / "4.pt", 100)
    assert newest_first(store) == ["4.pt", "3.pt", "2.pt", "1.pt"]
    assert remove_older(store, keep_count=2) == ["1.pt"]
    remove_named(store, "3.pt")
    remove_named(store, "3.pt")
    assert sorted(path.name for path in folder.glob("*.pt")) == ["2.pt", "4.pt"]


def test_a_store_that_cannot_be_opened_says_why_when_it_is_used() -> None:
    error = NoCredentials("no key", tier="S3", key="", reason="NoCredentialsError")

    def refuse() -> Store:
        raise error

    store = open_deferred(refuse, url="s3://bucket")
    assert (store.tier, store.url, store.free_bytes()) == ("S3", "s3://bucket", None)
    with pytest.raises(NoCredentials):
        store.stat("a")
