"""Verification reads everything and says which tensor a damaged byte belongs to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

from strata.checkpoint import CheckpointInfo, CheckpointManager, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.retention import LastGood, remove_chosen
from strata.checkpoint.copying.digest import CHUNK_BYTES
from strata.checkpoint.dcp import StrataStorageWriter
from strata.checkpoint.errors import CheckpointNotFound
from strata.checkpoint.sharded.layout import named_spans
from strata.checkpoint.verify import Verified, verify_store
from strata.cli.checkpoint import app
from strata.stores import open_store
from tests.checkpoint.dcp_actor import run_world
from tests.checkpoint.states import small_state

LAYER_BYTES = 5_000_000 * 4


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def saved(folder: Path, memory: Memory) -> CheckpointInfo:
    """Three tensors of 20 MB, so that chunks of 16 MiB tell them apart."""
    with CheckpointManager(folder, memory=memory) as manager:
        return manager.save(small_state(1, tensors=3, elements=5_000_000), step=1).result(60)


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same, as parts; the one part there is."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(
            small_state(2, tensors=3, elements=5_000_000), storage_writer=StrataStorageWriter(folder, step=2)
        )
    (part,) = (folder / "parts").iterdir()
    return part


def verified(folder: Path) -> list[Verified]:
    return list(verify_store(open_store(folder)))


def test_intact_checkpoints_verify(folder: Path, saved: CheckpointInfo, sharded: Path) -> None:
    found = verified(folder)
    assert [(each.step, each.format, each.is_intact) for each in found] == [
        (2, "sharded", True),
        (1, "image", True),
    ]
    assert found[1].name == saved.checkpoint_id
    assert found[1].size_bytes == saved.size_bytes


def test_a_changed_byte_is_reported_with_its_tensor_and_both_ranges(
    folder: Path, saved: CheckpointInfo
) -> None:
    payload = Path(saved.path)
    flip(payload, payload.stat().st_size - 70_000)  # The end of the last tensor.
    (one,) = verified(folder)
    (damage,) = one.damages
    assert damage.path == str(payload)
    assert damage.start_bytes % CHUNK_BYTES == 0
    assert damage.start_bytes <= payload.stat().st_size - 70_000 < damage.end_bytes
    (tensor,) = damage.tensors
    assert tensor.name == "model.layer2.weight"
    assert tensor.end_bytes - tensor.start_bytes == LAYER_BYTES
    assert f"model.layer2.weight (bytes {tensor.start_bytes} to {tensor.end_bytes})" in str(damage)


def test_every_damaged_chunk_is_reported(folder: Path, saved: CheckpointInfo) -> None:
    payload = Path(saved.path)
    for offset in range(0, payload.stat().st_size, CHUNK_BYTES):
        flip(payload, offset)
    (one,) = verified(folder)
    assert [damage.start_bytes for damage in one.damages] == list(
        range(0, payload.stat().st_size, CHUNK_BYTES)
    )
    named = {tensor.name for damage in one.damages for tensor in damage.tensors}
    assert named == {f"model.layer{n}.weight" for n in range(3)}


def test_damage_of_a_part_names_the_tensor(folder: Path, sharded: Path) -> None:
    flip(sharded, 2 * LAYER_BYTES + CHUNK_BYTES)
    (one,) = verified(folder)
    (damage,) = one.damages
    assert damage.tensors[0].name == "model.layer2.weight"
    assert "model.layer0.weight" not in str(damage)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_of_one_rank_s_part_names_that_part_and_its_tensors_alone(tmp_path: Path, damage: str) -> None:
    """Two ranks with shards of the same tensors, one part each."""
    run_world(2, save_rows, tmp_path)
    manifest = Catalog(open_store(tmp_path)).list().entries[0].manifest
    spans = {(name, span.part): span for name, span in named_spans(manifest, path="")}
    part = tmp_path / manifest.parts[1].key
    middle = spans["1.weight", 1]
    if damage == "flipped":
        flip(part, middle.offset_bytes + 5)
    elif damage == "cut":
        os.truncate(part, middle.offset_bytes + 5)
    else:
        part.unlink()
    (one,) = verified(tmp_path)
    (found,) = one.damages
    assert found.path == str(part)
    named = {tensor.name: (tensor.start_bytes, tensor.end_bytes) for tensor in found.tensors}
    expected = {"flipped": {"1.weight"}, "cut": {"1.weight", "2.weight"}}
    assert set(named) == expected.get(damage, {"0.weight", "1.weight", "2.weight"})
    assert named["1.weight"] == (middle.offset_bytes, middle.end_bytes)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    said = "".join(result.output.split())
    assert part.name in said
    assert "1.weight" in said
    assert Path(manifest.parts[0].key).name not in said


def save_rows(rank: int, world: int, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    state = {
        f"{number}.weight": distribute_tensor(torch.randn(1 << 10, 1 << 10), mesh, [Shard(0)])
        for number in range(3)
    }
    dcp.save(state, storage_writer=StrataStorageWriter(folder, step=1))
    return {}


@pytest.mark.parametrize("damage", ["cut", "grown", "gone"])
def test_a_file_of_the_wrong_length_names_what_is_lost(
    folder: Path, saved: CheckpointInfo, damage: str
) -> None:
    payload = Path(saved.path)
    if damage == "cut":
        with payload.open("r+b") as file:
            file.truncate(2 * LAYER_BYTES + CHUNK_BYTES)
    elif damage == "grown":
        with payload.open("ab") as file:
            file.write(b"x")
    else:
        payload.unlink()
    (one,) = verified(folder)
    assert not one.is_intact
    said = str(one.damages[0])
    assert ("missing" if damage == "gone" else "its manifest says") in said
    if damage == "cut":
        assert [tensor.name for tensor in one.damages[0].tensors] == ["model.layer2.weight"]
    if damage == "gone":
        assert len(one.damages[0].tensors) == 3


def test_a_manifest_that_cannot_be_read_is_reported(folder: Path, saved: CheckpointInfo) -> None:
    (manifest,) = folder.glob("*.manifest.json")
    flip(manifest, 200)
    (unreadable,) = verified(folder)
    assert not unreadable.is_intact
    assert manifest.name in str(unreadable.damages[0])


def test_files_of_torch_save_are_checked_by_their_own_checksums(folder: Path) -> None:
    folder.mkdir()
    path = folder / "old.pt"
    torch.save(small_state(1), path)
    (one,) = verified(folder)
    assert (one.format, one.name, one.is_intact, one.note) == ("file", "old.pt", True, "")
    flip(path, 30_000)
    (one,) = verified(folder)
    assert not one.is_intact
    assert "not intact" in str(one.damages[0])


def test_a_file_without_checksums_says_so(folder: Path) -> None:
    folder.mkdir()
    torch.save(small_state(1), folder / "older.pt", _use_new_zipfile_serialization=False)
    (one,) = verified(folder)
    assert one.is_intact
    assert "nothing to compare with" in one.note


def test_an_unfinished_save_is_not_taken_for_a_foreign_file(folder: Path) -> None:
    folder.mkdir()
    torch.save(small_state(1), folder / "checkpoint_step_00000001.pt")
    (folder / "checkpoint_step_00000001.claim").write_text("somebody")
    assert verified(folder) == []


# Removal


def test_removal_takes_the_manifest_and_every_part(folder: Path, memory: Memory, sharded: Path) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(3), step=3).result(30)
    store = open_store(folder)
    (removed,) = remove_chosen(store, ["2"])
    assert removed.step == 2
    assert not sharded.exists()
    assert [each.step for each in verify_store(store)] == [3]


def test_the_last_good_one_stays_unless_forced(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        infos = [manager.save(small_state(step), step=step).result(30) for step in (1, 2)]
    store = open_store(folder)
    flip(Path(infos[1].path), 50_000)
    with pytest.raises(LastGood, match=infos[0].checkpoint_id):
        remove_chosen(store, ["1"])
    with pytest.raises(LastGood):
        remove_chosen(store, ["1", "2"])
    assert len(verified(folder)) == 2
    remove_chosen(store, [infos[1].checkpoint_id])  # The damaged one may go.
    remove_chosen(store, ["1"], force=True)
    assert verified(folder) == []
    assert not [path for path in folder.iterdir() if path.is_file()]


@pytest.mark.parametrize("name", ["7", "nothing", "../x"])
def test_removing_what_is_not_there_removes_nothing(folder: Path, memory: Memory, name: str) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step)
    with pytest.raises(CheckpointNotFound, match="Nothing was removed"):
        remove_chosen(open_store(folder), ["1", name])
    assert len(verified(folder)) == 2


def test_a_crash_half_way_through_removal_leaves_nothing_that_could_be_found(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step)
    store: Any = open_store(folder)
    deleted: list[str] = []

    def die(key: str) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(key)
        (folder / key).unlink()

    monkeypatch.setattr(store, "delete", die)
    with pytest.raises(KeyboardInterrupt):
        remove_chosen(store, ["1"])
    assert deleted[0].endswith(".manifest.json")
    with CheckpointManager(folder, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints()] == [2]
