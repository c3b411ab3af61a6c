from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from strata.checkpoint import (
    CheckpointManager,
    CheckpointNotFound,
    InvalidSave,
    ManagerClosed,
    Memory,
    StateMismatch,
)
from tests.checkpoint.states import assert_is_step, assert_same, every_kind, same_bits, small_state


def test_a_state_comes_back_bit_for_bit_from_memory_and_from_disk(folder: Path, memory: Memory) -> None:
    state = every_kind()
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.save(state, step=3).result(30).tiers == ("MEMORY", "NVME")
        from_memory = manager.restore()
    assert from_memory.tier == "MEMORY"
    assert_same(from_memory.state, state)
    with CheckpointManager(folder, memory=memory) as manager:
        from_disk = manager.restore()
    assert from_disk.tier == "NVME"
    assert_same(from_disk.state, state)


def test_the_payload_opens_with_plain_torch_load(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        info = manager.save(small_state(7), step=7).result(30)
        assert_is_step(torch.load(info.path, weights_only=True, mmap=True), 7)


def test_bytes_are_stored_unchanged(folder: Path, memory: Memory) -> None:
    data = bytes(range(256)) * 1000
    with CheckpointManager(folder, memory=memory) as manager:
        info = manager.save(data, step=5000, epoch=2, metadata={"loss": 0.5}).result(30)
        assert Path(info.path).read_bytes() == data
        assert manager.load() == data
        latest = manager.get_latest()
    assert latest is not None
    assert (latest.step, latest.epoch, latest.size_bytes) == (5000, 2, len(data))
    assert latest.metadata == {"loss": 0.5}
    assert latest.checkpoint_id == info.checkpoint_id


def test_a_mutable_buffer_may_be_reused_as_soon_as_save_returns(folder: Path, memory: Memory) -> None:
    data = bytearray(b"before" * 1000)
    with CheckpointManager(folder, memory=memory) as manager:
        handle = manager.save(data, step=1)
        data[:] = b"after!" * 1000
        handle.result(30)
        assert manager.load() == b"before" * 1000


def test_tensors_may_change_as_soon_as_save_returns(folder: Path, memory: Memory) -> None:
    state = small_state(1)
    with CheckpointManager(folder, memory=memory) as manager:
        handle = manager.save(state, step=1)
        for tensor in state["model"].values():
            tensor.zero_()
        handle.result(30)
        assert_is_step(manager.load(), 1)


def test_an_empty_destination_has_no_latest_and_nothing_to_load(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.get_latest() is None
        assert manager.all_checkpoints() == []
        assert manager.get_by_step(3) is None
        with pytest.raises(CheckpointNotFound):
            manager.load()


def test_any_checkpoint_can_be_loaded_by_step_or_id(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        infos = [manager.save(small_state(step), step=step).result(30) for step in (10, 20, 30)]
        assert [info.step for info in manager.all_checkpoints()] == [30, 20, 10]
        assert_is_step(manager.load(step=10), 10)
        assert_is_step(manager.load(checkpoint_id=infos[1].checkpoint_id), 20)
        found = manager.get_by_step(20)
        assert found is not None
        assert found.checkpoint_id == infos[1].checkpoint_id
        with pytest.raises(CheckpointNotFound, match="step 11"):
            manager.load(step=11)


def test_only_keep_count_checkpoints_stay(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, keep_count=2, memory=memory) as manager:
        for step in range(5):
            manager.save(b"x", step=step)
        assert manager.wait_pending(30)
        assert [info.step for info in manager.all_checkpoints()] == [4, 3]
    assert len([path for path in folder.iterdir() if path.is_file()]) == 4


@pytest.mark.parametrize("arguments", [{"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1, "epoch": -2}])
def test_impossible_numbers_are_refused_and_change_nothing(
    folder: Path, memory: Memory, arguments: dict[str, object]
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        with pytest.raises(InvalidSave):
            manager.save(b"data", **arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidSave):
            manager.save(b"", step=1)
        with pytest.raises(InvalidSave, match=r"metadata\.bad"):
            manager.save(b"data", step=1, metadata={"bad": object()})  # type: ignore[dict-item]
        assert manager.all_checkpoints() == []


def test_a_tier_that_is_not_there_is_refused(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        with pytest.raises(InvalidSave, match="no tier S3"):
            manager.save(small_state(1), step=1, tiers=["S3"])
        with pytest.raises(InvalidSave, match="Bytes are saved to stores"):
            manager.save(b"data", step=1, tiers=["MEMORY"])
        assert manager.wait_pending(0)


def test_an_error_in_the_block_leaves_the_memory_tier_to_the_next_process(memory: Memory) -> None:
    def crash() -> None:
        with CheckpointManager([], memory=memory) as manager:
            manager.save(small_state(5), step=5)
            raise RuntimeError("a peer was lost")

    with pytest.raises(RuntimeError, match="peer"):
        crash()
    with CheckpointManager([], memory=memory) as manager:
        assert_is_step(manager.load(), 5)


def test_a_closed_manager_says_so(folder: Path, memory: Memory) -> None:
    manager = CheckpointManager(folder, memory=memory)
    manager.close()
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.save(b"x", step=1)


async def test_saving_and_loading_can_be_awaited(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        info = await manager.save_async(small_state(4), step=4)
        assert info.step == 4
        assert_is_step(await manager.load_async(), 4)


@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_loading_into_a_state_fills_its_tensors_in_place(folder: Path, memory: Memory, tier: str) -> None:
    model = torch.nn.Linear(5, 3)
    with CheckpointManager(folder, memory=memory) as manager:
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        manager.save({"model": model.state_dict(), "step": 8}, step=8).result(30)
        place = model.weight.data_ptr()
        with torch.no_grad():
            model.weight.zero_()
        loaded = manager.load(into={"model": model.state_dict()}, tiers=[tier])
    assert loaded["step"] == 8
    assert model.weight.data_ptr() == place == loaded["model"]["weight"].data_ptr()
    assert torch.equal(model.weight, wanted["weight"])


@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_every_kind_of_tensor_is_filled_in_place(folder: Path, memory: Memory, tier: str) -> None:
    state = every_kind()
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result(30)
        target = {
            "model": {name: torch.zeros_like(tensor).detach() for name, tensor in state["model"].items()}
        }
        loaded = manager.load(into=target, tiers=[tier])
    for name, tensor in state["model"].items():
        assert same_bits(target["model"][name], tensor), name
        assert any(loaded["model"][name] is filled for filled in target["model"].values())
    loaded["model"] = state["model"]
    assert_same(loaded, state)


@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_targets_of_any_form_are_filled_in_place(folder: Path, memory: Memory, tier: str) -> None:
    targets = {
        "plain": torch.zeros(6, 4),
        "transposed": torch.zeros(4, 6).t(),
        "every_second": torch.zeros(6, 8)[:, ::2],
        "other_type": torch.zeros(6, 4, dtype=torch.float64),
        "negated": torch._neg_view(torch.zeros(6, 4)),
        "parameter": torch.nn.Parameter(torch.zeros(6, 4)),
    }
    places = {name: target.data_ptr() for name, target in targets.items()}
    state = {name: torch.randn(6, 4) for name in targets} | {"empty": torch.empty(0, 3)}
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result(30)
        loaded = manager.load(into={**targets, "empty": torch.empty(0, 3)}, tiers=[tier])
    for name, target in targets.items():
        assert loaded[name] is target, name
        assert target.data_ptr() == places[name], name
        assert torch.equal(target.detach().float(), state[name]), name


def test_what_is_returned_beside_the_target_does_not_change_with_later_saves(
    job: str, memory: Memory
) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        target = small_state(0)
        rest = target["model"].popitem()[0]
        loaded = manager.load(into=target)
        whole = manager.load()
        for step in range(2, 6):
            manager.save(small_state(step), step=step).result(30)
    assert_is_step(loaded, 1)
    assert_is_step(whole, 1)
    assert rest in loaded["model"]


@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_a_parameter_that_the_target_has_no_place_for_comes_as_one(
    folder: Path, memory: Memory, tier: str
) -> None:
    state = {"known": torch.ones(3), "new": torch.nn.Parameter(torch.ones(3))}
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=1).result(30)
        loaded = manager.load(into={"known": torch.zeros(3)}, tiers=[tier])
    assert isinstance(loaded["new"], torch.nn.Parameter)
    assert loaded["new"].is_leaf
    assert loaded["new"].requires_grad


def test_a_target_that_does_not_fit_is_named_and_left_alone(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        target = small_state(0)
        target["model"]["layer3.weight"] = torch.zeros(7)
        with pytest.raises(StateMismatch, match=r"model\.layer3\.weight"):
            manager.load(into=target)
        with pytest.raises(StateMismatch, match=r"'model\.extra' is not in the checkpoint"):
            manager.load(into={"model": {"extra": torch.zeros(1)}})
    assert bool((target["model"]["layer0.weight"] == 0).all())


def test_a_checkpoint_is_asked_for_by_step_id_handle_or_what_was_listed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        handle = manager.save(b"first", step=1)
        manager.save(b"second", step=2).result()
        assert manager.load(handle) == manager.load(handle.checkpoint_id) == manager.load(1) == b"first"
        assert manager.load(manager.list_checkpoints()[-1]) == b"first"
        assert manager.latest() == manager.get_latest()
        assert manager.load(manager.latest()) == b"second"
        assert asyncio.run(manager.load_async(handle)) == b"first"
        with pytest.raises(CheckpointNotFound):
            manager.load("no-such-id")


def test_checkpoint_dir_names_the_folder_where_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "mine"))
    monkeypatch.delenv("CHECKPOINT_BUCKET", raising=False)
    with CheckpointManager() as manager:
        manager.save(b"x", step=1).result()
    assert list((tmp_path / "mine").iterdir())
