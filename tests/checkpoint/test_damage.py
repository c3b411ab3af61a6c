"""One changed bit anywhere, a short file, a missing one: noticed, named, and something whole is loaded instead."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint import CheckpointInfo, CheckpointManager, Damaged, LoadFailed, Memory
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import Manifest, decode
from strata.checkpoint.catalog.naming import manifest_key
from strata.checkpoint.copying.staging import find_snapshots
from strata.checkpoint.image.reading import fetched
from strata.stores import open_store
from tests.checkpoint.states import assert_is_step, small_state

SEED = 20


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def saved(near: Path, far: Path, memory: Memory) -> CheckpointInfo:
    """Steps 1 and 2, each in two stores; the info of step 2."""
    with CheckpointManager([near, far], memory=memory) as manager:
        manager.save(small_state(1), step=1)
        return manager.save(small_state(2), step=2).result(30)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def manifest_of(payload: Path) -> Path:
    return payload.with_name(manifest_key(payload.stem))


def regions(manifest: Manifest, size_bytes: int) -> Iterator[tuple[str, range]]:
    """Every kind of place in an image."""
    first = min(entry.offset_bytes for entry in manifest.tensors)
    last = max(entry.offset_bytes + entry.size_bytes for entry in manifest.tensors)
    yield "the first header", range(64)
    yield "the pickle", range(4096, 6000)
    yield "the space after the pickle", range(40_000, 41_000)
    yield "a header between", range(first - 200, first)
    yield "tensor bytes", range(first, last)
    yield "the central directory", range(last, size_bytes - 22)
    yield "the end record", range(size_bytes - 22, size_bytes)


def test_one_changed_bit_anywhere_in_the_payload_is_noticed(saved: CheckpointInfo, near: Path) -> None:
    payload, store = Path(saved.path), open_store(near)
    manifest = Catalog(store).read(manifest_of(payload).name)
    whole = payload.read_bytes()
    chance = random.Random(SEED)
    for region, offsets in regions(manifest, len(whole)):
        for _ in range(20):
            offset = chance.choice(offsets)
            flip(payload, offset, chance.randrange(8))
            with pytest.raises(Damaged, match="bytes changed"), fetched(store, manifest.parts[0], manifest):
                pytest.fail(f"{region}: byte {offset} was changed and nobody noticed")
            payload.write_bytes(whole)
    with fetched(store, manifest.parts[0], manifest):
        pass  # The unchanged one is fine.


def test_one_changed_bit_anywhere_in_the_manifest_is_noticed(saved: CheckpointInfo) -> None:
    path = manifest_of(Path(saved.path))
    whole = path.read_bytes()
    decode(whole, path=str(path), keys=None)
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << (offset % 8)
        with pytest.raises(Damaged):
            decode(bytes(damaged), path=str(path), keys=None)


def test_a_damaged_tensor_is_named(near: Path, memory: Memory) -> None:
    large = small_state(1, tensors=3, elements=5_000_000)  # 20 MB each: chunks of 16 MiB tell them apart.
    with CheckpointManager(near, memory=memory) as manager:
        info = manager.save(large, step=1).result(60)
    payload, store = Path(info.path), open_store(near)
    manifest = Catalog(store).read(manifest_of(payload).name)
    entry = manifest.tensors[2]
    assert entry.name == "model.layer2.weight"
    flip(payload, entry.offset_bytes + entry.size_bytes - 1)
    with (
        pytest.raises(Damaged, match=r"model\.layer2\.weight") as caught,
        fetched(store, manifest.parts[0], manifest),
    ):
        pass
    assert caught.value.tensors == ("model.layer2.weight",)


def damage_payload(payload: Path) -> str:
    flip(payload, payload.stat().st_size // 2)
    return "bytes changed"


def truncate_payload(payload: Path) -> str:
    payload.write_bytes(payload.read_bytes()[:-1])
    return "its manifest says"


def lengthen_payload(payload: Path) -> str:
    payload.write_bytes(payload.read_bytes() + b"x")
    return "its manifest says"


def remove_payload(payload: Path) -> str:
    payload.unlink()
    return "payload is missing"


def damage_manifest(payload: Path) -> str:
    flip(manifest_of(payload), 100)
    return "manifest"


def truncate_manifest(payload: Path) -> str:
    path = manifest_of(payload)
    path.write_bytes(path.read_bytes()[:-10])
    return "manifest"


def empty_manifest(payload: Path) -> str:
    manifest_of(payload).write_bytes(b"")
    return "manifest"


DAMAGES = [
    damage_payload,
    truncate_payload,
    lengthen_payload,
    remove_payload,
    damage_manifest,
    truncate_manifest,
    empty_manifest,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_replaced_by_the_next_tier(
    saved: CheckpointInfo,
    near: Path,
    far: Path,
    memory: Memory,
    damage: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = damage(Path(saved.path))  # type: ignore[operator]
    with CheckpointManager([near, far], memory=memory) as manager, caplog.at_level(logging.WARNING):
        restored = manager.restore()
        found = [info.step for info in manager.all_checkpoints()]
    assert_is_step(restored.state, 2)
    assert len(restored.reasons) == 1
    assert expected in restored.reasons[0]
    assert str(near) in restored.reasons[0]
    assert expected in caplog.text
    assert found == [2, 1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_no_other_copy_the_step_before_is_loaded(
    saved: CheckpointInfo, near: Path, memory: Memory, damage: object
) -> None:
    expected = damage(Path(saved.path))  # type: ignore[operator]
    with CheckpointManager(near, memory=memory) as manager:
        restored = manager.restore()
        assert_is_step(restored.state, 1)
        assert expected in restored.reasons[0]
        with pytest.raises(LoadFailed):
            manager.load(step=2)


def test_without_its_manifest_a_payload_is_no_checkpoint(
    saved: CheckpointInfo, near: Path, memory: Memory
) -> None:
    manifest_of(Path(saved.path)).unlink()
    with CheckpointManager(near, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints()] == [1]
        assert_is_step(manager.load(), 1)


def test_a_damaged_memory_image_is_replaced_by_the_disk(near: Path, memory: Memory, job: str) -> None:
    with CheckpointManager(near, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        (snapshot,) = find_snapshots(job)
        flip(snapshot.path, snapshot.manifest.tensors[0].offset_bytes)
        restored = manager.restore()
    assert_is_step(restored.state, 1)
    assert restored.tier == "NVME"
    assert "MEMORY" in restored.reasons[0]


def test_when_everything_is_damaged_the_error_says_what_was_tried(
    saved: CheckpointInfo, near: Path, memory: Memory
) -> None:
    for payload in near.glob("*.pt"):
        damage_payload(payload)
    with CheckpointManager(near, memory=memory) as manager, pytest.raises(LoadFailed) as caught:
        manager.load()
    assert len(caught.value.reasons) == 2
    assert "step 2" in str(caught.value)
    assert "step 1" in str(caught.value)
