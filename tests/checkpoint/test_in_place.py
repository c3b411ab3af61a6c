"""Loading in place: one pass over the bytes, from memory, disk and S3, torn only where that is allowed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.checkpoint import (
    CheckpointManager,
    CheckpointNotFound,
    Damaged,
    LoadFailed,
    Memory,
    StateMismatch,
)
from strata.checkpoint.copying.staging import find_snapshots
from strata.checkpoint.image.in_place import WINDOW_BYTES, Intake, NotOwn, load_mapped
from strata.stores import Store, open_store
from strata.stores.faulty import Fault, FaultyStore, Operation
from strata.stores.protocol import NotFound, PartReader, Truncated, Unavailable
from tests.checkpoint.states import assert_same, every_kind

CHUNK_BYTES = 16 << 20


def large_state(seed: int) -> dict[str, Any]:
    """More than two chunks, in tensors that begin and end anywhere in them; one of many windows, one of a few bytes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [5, 3 * WINDOW_BYTES // 4, WINDOW_BYTES + 7, 5 * WINDOW_BYTES, 1, 4096, 4_200_001]
    base = torch.randn(1000, generator=generator)
    return {
        "model": {f"p{n}": torch.randn(size, generator=generator) for n, size in enumerate(sizes)},
        "strided": torch.randn(300, 200, generator=generator).t(),
        "views": [base[10:500], base[400:]],
        "half": torch.randn(77, generator=generator).bfloat16(),
        "step": seed,
    }


def targets() -> dict[str, Any]:
    state = large_state(0)
    return {
        "model": {key: torch.zeros_like(tensor) for key, tensor in state["model"].items()},
        "strided": torch.zeros(200, 300),
        "half": torch.zeros(77),  # Of another type.
    }


@pytest.mark.parametrize("tear_ok", [False, True])
@pytest.mark.parametrize("where", ["memory", "disk", "s3"])
def test_every_byte_arrives_from_every_tier(
    where: str, tear_ok: bool, folder: Path, memory: Memory, request: pytest.FixtureRequest
) -> None:
    store: Any = request.getfixturevalue("s3") if where == "s3" else folder
    state = large_state(4)
    with CheckpointManager(store, memory=memory) as manager:
        info = manager.save(state, step=4).result()
        tier = {"memory": "MEMORY", "disk": "NVME", "s3": "S3"}[where]
        into = targets()
        restored = manager.restore(checkpoint_id=info.checkpoint_id, into=into, tiers=[tier], tear_ok=tear_ok)
        assert restored.tier == tier
    found = restored.state
    assert_same(into["model"], state["model"])
    assert all(found["model"][key] is into["model"][key] for key in state["model"])
    assert found["strided"] is into["strided"]
    assert_same(into["strided"].t().contiguous(), state["strided"].t().contiguous())
    assert_same(into["half"].bfloat16(), state["half"])
    first, second = found["views"]
    assert_same([first, second], [view.clone() for view in state["views"]])
    assert found["step"] == 4
    if where == "memory" or tear_ok:
        first[390] = 42.0
        assert second[0] == 42.0, "what shared memory shares it again"


@pytest.mark.parametrize("tear_ok", [False, True])
@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_a_state_of_every_kind_comes_back_without_targets(
    folder: Path, memory: Memory, tier: str, tear_ok: bool
) -> None:
    state = every_kind()
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result()
        assert_same(manager.restore(into={}, tiers=[tier], tear_ok=tear_ok).state, state)
        assert_same(manager.load(tiers=[tier]), state)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [2000, CHUNK_BYTES + 5_000_000])
@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_damage_raises_its_type_and_no_target_is_torn_unless_allowed(
    folder: Path, memory: Memory, tier: str, at: int
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        info = manager.save(large_state(4), step=4).result()
        path = find_snapshots(str(memory.job))[0].path if tier == "MEMORY" else next(folder.rglob("*.pt"))
        flip(path, at)
        into = targets()
        for tear_ok in (False, True):
            with pytest.raises(LoadFailed) as caught:
                manager.restore(checkpoint_id=info.checkpoint_id, into=into, tiers=[tier], tear_ok=tear_ok)
            assert not isinstance(caught.value, StateMismatch | CheckpointNotFound)
            (cause,) = caught.value.causes
            assert isinstance(cause, Damaged)
            if not tear_ok:
                assert_same(into, targets())
        # The job loads the next best candidate into the same targets.
        other = "NVME" if tier == "MEMORY" else "MEMORY"
        manager.restore(checkpoint_id=info.checkpoint_id, into=into, tiers=[other], tear_ok=True)
    assert_same(into["model"], large_state(4)["model"])


@pytest.mark.parametrize(
    ("into", "name"),
    [
        ({"rows": [torch.zeros(2), torch.zeros(2), torch.zeros(2)]}, "rows.2"),
        ({"rows": [torch.zeros(2), torch.zeros(2), {"deep": torch.zeros(2)}]}, "rows.2.deep"),
        ({"rows": {"0": torch.zeros(2)}}, "rows.0"),
        ({"one": [torch.zeros(2)]}, "one.0"),
        ({"number": (torch.zeros(2),)}, "number.0"),
        ({"missing": torch.zeros(2)}, "missing"),
    ],
)
@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_no_target_is_left_unfilled_silently(
    folder: Path, memory: Memory, into: dict[str, Any], name: str, tier: str
) -> None:
    state: dict[str, Any] = {"rows": [torch.ones(2), torch.ones(2)], "one": torch.ones(2), "number": 5}
    into = {"one": torch.zeros(2), **copy.deepcopy(into)}
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result(60)
        with pytest.raises(StateMismatch, match=f"'{name}' is not in the checkpoint"):
            manager.restore(into=into, tiers=[tier])


def test_targets_may_be_fewer_than_what_was_saved(folder: Path, memory: Memory) -> None:
    """And an entry that nobody saved, such as an optimizer's before its first step, leaves its targets alone."""
    state: dict[str, Any] = {"rows": [torch.ones(2), torch.ones(2)], "optimizer": {"state": {}}}
    into: dict[str, Any] = {
        "rows": [torch.zeros(2)],
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
    }
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result(60)
        restored = manager.restore(into=into).state
    assert into["rows"][0].tolist() == [1, 1]
    assert restored["rows"][0] is into["rows"][0]
    assert restored["rows"][1].tolist() == [1, 1]
    assert restored["optimizer"] == {"state": {}}


def test_a_payload_that_is_missing_or_cut_short_is_damaged(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(large_state(4), step=4).result()
        payload = next(folder.rglob("*.pt"))
        for hurt in (lambda: payload.write_bytes(payload.read_bytes()[:-1]), payload.unlink):
            hurt()
            with pytest.raises(LoadFailed) as caught:
                manager.restore(into=targets(), tiers=["NVME"], tear_ok=True)
            assert [type(cause) for cause in caught.value.causes] == [Damaged]


def test_a_bit_that_flips_on_the_way_from_a_store_is_noticed(folder: Path, memory: Memory) -> None:
    def choose(operation: Operation, _: object) -> Fault | None:
        return Fault.BIT_FLIP if operation.name == "read" and operation.size_bytes > CHUNK_BYTES else None

    with CheckpointManager(FaultyStore(open_store(str(folder)), choose=choose), memory=memory) as manager:
        manager.save(large_state(4), step=4).result()
        with pytest.raises(LoadFailed) as caught:
            manager.restore(into=targets(), tiers=["NVME"], tear_ok=True)
        assert isinstance(caught.value.causes[0], Damaged)


def test_a_store_that_does_not_answer_is_not_an_empty_one(folder: Path, memory: Memory) -> None:
    def choose(operation: Operation, _: object) -> Fault | None:
        return Fault.REFUSED if operation.name == "list" else None

    with CheckpointManager(FaultyStore(open_store(str(folder)), choose=choose), memory=memory) as manager:
        with pytest.raises(LoadFailed, match="unknown whether") as caught:
            manager.load()
        assert not isinstance(caught.value, CheckpointNotFound)
        assert isinstance(caught.value.causes[0], Unavailable)


def test_one_that_is_asked_for_is_not_replaced_by_another(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(large_state(1), step=1).result()
        info = manager.save(large_state(2), step=2).result()
        next(path for path in folder.rglob("*.pt") if info.checkpoint_id in str(path)).unlink()
        with pytest.raises(LoadFailed, match=info.checkpoint_id):
            manager.restore(checkpoint_id=info.checkpoint_id, into=targets(), tiers=["NVME"], tear_ok=True)


# --- other processes of the machine ---


@pytest.mark.parametrize("verify", [True, False])
def test_an_image_of_another_process_is_mapped_and_loaded(memory: Memory, verify: bool) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(large_state(4), step=4).result()
        (snapshot,) = find_snapshots(str(memory.job))
        before = snapshot.path.read_bytes()
        into = targets()
        loaded = load_mapped(snapshot.path, snapshot.manifest, into=into, verify=verify)
        assert_same(into["model"], large_state(4)["model"])
        loaded["views"][0].zero_()
        into["model"]["p3"].zero_()
        assert snapshot.path.read_bytes() == before


def test_an_image_that_is_missing_empty_short_or_changed_is_damaged(memory: Memory, tmp_path: Path) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(large_state(4), step=4).result()
        (snapshot,) = find_snapshots(str(memory.job))
        data = bytearray(snapshot.path.read_bytes())
    path = tmp_path / "archive.pt"
    with pytest.raises(Damaged, match="cannot be read"):
        load_mapped(path, snapshot.manifest, into={}, verify=True)
    for content in (b"", bytes(data[:-1]), bytes(len(data))):
        path.write_bytes(content)
        with pytest.raises(Damaged):
            load_mapped(path, snapshot.manifest, into={}, verify=True)
    data[CHUNK_BYTES + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged):
        load_mapped(path, snapshot.manifest, into={}, verify=True)


def test_what_only_torch_can_open_is_left_to_torch(memory: Memory) -> None:
    state = {"set": {1, 2}, "x": torch.ones(3)}
    with CheckpointManager([], memory=memory) as manager:
        manager.save(state, step=1).result()
        (snapshot,) = find_snapshots(str(memory.job))
        part = snapshot.manifest.parts[0]
        with pytest.raises(NotOwn):
            Intake(part, snapshot.manifest, path="x").open(snapshot.path.read_bytes(), {})
        into = {"x": torch.zeros(3)}
        assert_same(load_mapped(snapshot.path, snapshot.manifest, into=into, verify=True), state)
        assert_same(into["x"], state["x"])


def test_many_load_at_once(memory: Memory) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(large_state(4), step=4).result()
        (snapshot,) = find_snapshots(str(memory.job))

        def load(_: int) -> dict[str, Any]:
            into = targets()
            load_mapped(snapshot.path, snapshot.manifest, into=into, verify=False)
            return into

        with ThreadPoolExecutor(3) as pool:
            for into in pool.map(load, range(3)):
                assert_same(into["model"], large_state(4)["model"])


def test_parts_of_any_size_add_up_to_the_value(s3: Store, folder: Path) -> None:
    data = bytes(range(256)) * 40_000
    for store in (s3, open_store(str(folder))):
        assert isinstance(store, PartReader)
        store.put("k", data)
        for part_bytes in (1 << 20, 1_000_003, len(data), 2 * len(data)):
            found = bytearray(len(data))

            def take(start: int, view: memoryview, found: bytearray = found) -> None:
                found[start : start + len(view)] = view

            store.read_parts("k", take, size_bytes=len(data), part_bytes=part_bytes)
            assert found == data


def test_parts_of_a_value_that_is_missing_or_of_another_size_are_refused(s3: Store, folder: Path) -> None:
    def take(start: int, view: memoryview) -> None:
        raise AssertionError("nothing may be handed out")

    def refuse(start: int, view: memoryview) -> None:
        raise ValueError(f"part {start} is refused")

    for store in (s3, open_store(str(folder))):
        assert isinstance(store, PartReader)
        with pytest.raises(NotFound):
            store.read_parts("nothing", take, size_bytes=3, part_bytes=1)
        store.put("k", b"abc")
        for size_bytes in (2, 4):
            with pytest.raises(Truncated):
                store.read_parts("k", take, size_bytes=size_bytes, part_bytes=1)
        with pytest.raises(ValueError, match="is refused"):
            store.read_parts("k", refuse, size_bytes=3, part_bytes=1)
