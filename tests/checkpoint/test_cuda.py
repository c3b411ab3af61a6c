"""Saving from and restoring to a device. Skipped where there is none.

On a machine without the project's test settings:
    PYTHONPATH=src:. python -m pytest -q -c /dev/null --rootdir=. tests/checkpoint/test_cuda.py
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.checkpoint import CheckpointManager, LoadFailed, Memory
from strata.checkpoint.copying import cuda as device
from strata.checkpoint.copying import engine as copying
from strata.checkpoint.image import in_place
from tests.checkpoint.states import assert_same, every_kind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

MEGABYTES_64 = 16 << 20  # elements of four bytes


def to_device(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.cuda()
    if isinstance(state, dict):
        return {key: to_device(value) for key, value in state.items()}
    return state


def keep_device_busy() -> None:
    """Queue enough work that a copy queued behind it has not started when the call returns."""
    square = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):
        square = torch.tanh(square @ square)


@pytest.fixture(params=[True, False], ids=["spare memory", "no spare memory"])
def has_spare(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the device has space for a second copy of the state."""
    if not request.param:
        monkeypatch.setattr(device.SpareMemory, "take", lambda *_: None)
    return bool(request.param)


@pytest.mark.usefixtures("has_spare")
@pytest.mark.parametrize("in_one_call", [True, False])
def test_a_state_on_the_device_comes_back_bit_for_bit(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, in_one_call: bool
) -> None:
    queued = []

    def queue_copies(*args: Any) -> bool:
        queued.append(in_one_call and queue_at_once(*args))
        return queued[-1]

    queue_at_once = device.queue_copies
    monkeypatch.setattr(copying, "queue_copies", queue_copies)
    monkeypatch.setattr(copying, "can_queue_copies", lambda: in_one_call)
    state = {
        "model": to_device(every_kind()["dtypes"]),
        "step": 3,
        "cpu": torch.arange(5),
        "empty": torch.zeros(0, 4, device="cuda"),
        "conjugated": torch.randn(7, dtype=torch.complex64, device="cuda").conj(),
    }
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=3).result(60)
        from_memory, from_disk = manager.load(tiers=["MEMORY"]), manager.load(tiers=["NVME"])
    wanted = {
        **state,
        "model": {name: tensor.cpu() for name, tensor in state["model"].items()},
        "empty": state["empty"].cpu(),
        "conjugated": state["conjugated"].resolve_conj().cpu(),
    }
    assert_same(from_memory, wanted)
    assert_same(from_disk, wanted)
    assert set(queued) == {in_one_call}


@pytest.mark.usefixtures("has_spare")
def test_without_a_guard_tensors_may_change_as_soon_as_save_returns(folder: Path, memory: Memory) -> None:
    tensors = {f"t{n}": torch.full((MEGABYTES_64,), 1.0, device="cuda") for n in range(4)}
    with CheckpointManager(folder, memory=memory) as manager:
        for step in (1, 2, 3):
            keep_device_busy()
            handle = manager.save({"model": tensors}, step=step)
            for tensor in tensors.values():
                tensor.add_(1.0)
            handle.result(60)
            loaded = manager.load(step=step)
            assert all(bool((tensor == step).all()) for tensor in loaded["model"].values())


@pytest.mark.usefixtures("has_spare")
def test_with_a_guard_the_optimizers_step_waits_for_the_copy(folder: Path, memory: Memory) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, device="cuda") for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 2048, device="cuda")
    with CheckpointManager(folder, memory=memory) as manager:
        manager.guard(optimizer)
        for step in range(6):
            model(inputs).square().mean().backward()
            optimizer.step()
            wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
            steps = [state["step"].clone() for state in optimizer.state.values()]  # On the CPU.
            keep_device_busy()
            handle = manager.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step
            )
            model(inputs).square().mean().backward()
            optimizer.step()  # Changes every tensor that is being copied.
            handle.result(60)
            loaded = manager.load(step=step)
            for name, tensor in wanted.items():
                assert torch.equal(loaded["model"][name], tensor.cpu()), (step, name)
            for number, moment in enumerate(moments):
                assert torch.equal(loaded["optimizer"]["state"][number]["exp_avg"], moment.cpu()), step
                assert torch.equal(loaded["optimizer"]["state"][number]["step"], steps[number]), step


@pytest.mark.usefixtures("has_spare")
def test_a_step_right_after_the_save_waits_for_what_is_not_queued_yet(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_queue, take_at_once = threading.Event(), copying._Copies.take

    def take_late(*args: Any) -> Any:
        assert may_queue.wait(60)
        return take_at_once(*args)

    weight = torch.nn.Parameter(torch.full((MEGABYTES_64,), 1.0, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    with CheckpointManager(folder, memory=memory) as manager:
        manager.guard(optimizer)
        monkeypatch.setattr(copying._Copies, "take", take_late)
        handle = manager.save({"weight": weight.detach()}, step=1)
        threading.Timer(0.2, may_queue.set).start()
        optimizer.step()
        assert may_queue.is_set()
        handle.result(60)
        assert bool((manager.load(step=1)["weight"] == 1.0).all())
    assert bool((weight == 0.0).all())


def captured_step(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    """The optimizer's step as a graph. It has run once before, as Torch asks for."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@pytest.mark.usefixtures("has_spare")
@pytest.mark.parametrize("captured_first", [True, False])
def test_a_replayed_graph_waits_for_the_copy_although_it_runs_no_hooks(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, captured_first: bool
) -> None:
    take_at_once, may_queue = copying._Copies.take, threading.Event()

    def take_late(*args: Any) -> Any:
        assert may_queue.wait(60)
        return take_at_once(*args)

    weight = torch.nn.Parameter(torch.full((MEGABYTES_64,), 10.0, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with CheckpointManager(folder, memory=memory) as manager:
        graph = captured_step(optimizer) if captured_first else None
        manager.guard(optimizer)
        graph = graph or captured_step(optimizer)
        monkeypatch.setattr(copying._Copies, "take", take_late)
        for step in range(3):
            may_queue.clear()
            wanted = 9.0 - step
            handle = manager.save({"weight": weight.detach()}, step=step)
            threading.Timer(0.2, may_queue.set).start()
            graph.replay()
            assert may_queue.is_set()
            handle.result(60)
            assert bool((manager.load(step=step)["weight"] == wanted).all()), step
            assert bool((weight == wanted - 1.0).all())


@pytest.mark.usefixtures("has_spare")
def test_replays_of_a_captured_optimizer_never_tear_a_save(folder: Path, memory: Memory) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, device="cuda") for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with CheckpointManager(folder, memory=memory) as manager:
        manager.guard(optimizer)
        graph = captured_step(optimizer)
        for step in range(6):
            wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
            keep_device_busy()
            handle = manager.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step
            )
            graph.replay()  # Changes every tensor that is being copied.
            handle.result(60)
            loaded = manager.load(step=step)
            for name, tensor in wanted.items():
                assert torch.equal(loaded["model"][name], tensor.cpu()), (step, name)
            for number, moment in enumerate(moments):
                assert torch.equal(loaded["optimizer"]["state"][number]["exp_avg"], moment.cpu()), step


@pytest.mark.usefixtures("has_spare")
@pytest.mark.parametrize("is_guarded_tensor", [True, False])
def test_a_capture_begins_when_copies_under_way_are_complete(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, is_guarded_tensor: bool
) -> None:
    take_at_once = copying._Copies.take

    def take_late(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)  # The capture would be under way by now.
        return take_at_once(*args)

    weight = torch.nn.Parameter(torch.full((MEGABYTES_64,), 5.0, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with CheckpointManager(folder, memory=memory) as manager:
        manager.guard(optimizer)
        optimizer.step()
        monkeypatch.setattr(copying._Copies, "take", take_late)
        saved = weight.detach() if is_guarded_tensor else torch.full((MEGABYTES_64,), 4.0, device="cuda")
        handle = manager.save({"weight": saved}, step=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()
        graph.replay()
        handle.result(60)
        assert bool((manager.load(step=1)["weight"] == 4.0).all())
        assert bool((weight == 3.0).all())


@pytest.mark.usefixtures("has_spare")
def test_running_statistics_may_change_in_the_next_forward_pass(folder: Path, memory: Memory) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4096, 4096, device="cuda"), torch.nn.BatchNorm1d(4096, device="cuda")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(folder, memory=memory) as manager:
        manager.guard(optimizer)
        for step in range(4):
            mean = model.get_buffer("1.running_mean").clone()
            keep_device_busy()
            handle = manager.save({"model": model.state_dict()}, step=step)
            model(torch.randn(32, 4096, device="cuda"))  # Changes the statistics, and no optimizer is asked.
            handle.result(60)
            assert torch.equal(manager.load(step=step)["model"]["1.running_mean"], mean.cpu())
            assert not torch.equal(model.get_buffer("1.running_mean"), mean)


@pytest.mark.usefixtures("has_spare")
def test_tensors_freed_after_the_save_are_still_saved(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in (1, 2, 3):
            keep_device_busy()
            handle = manager.save({"t": torch.full((MEGABYTES_64,), float(step), device="cuda")}, step=step)
            overwritten = torch.full((MEGABYTES_64,), -1.0, device="cuda")  # Takes the memory, if it is free.
            handle.result(60)
            assert bool((manager.load(step=step)["t"] == step).all())
            del overwritten


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_next_step_waits_for_a_copy_within_the_device_only(
    folder: Path, memory: Memory, has_spare: bool, is_guarded: bool
) -> None:
    weights = [torch.nn.Parameter(torch.zeros(8 * MEGABYTES_64, device="cuda")) for _ in range(4)]  # 2 GiB
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with CheckpointManager(folder, memory=memory) as manager:
        if is_guarded:
            manager.guard(optimizer)
        for step in range(4):
            torch.cuda.synchronize()
            handle = manager.save(weights, step=step, tiers=["MEMORY"])
            optimizer.step()
            torch.cuda.current_stream().synchronize()
            stepped_s = time.monotonic()
            handle.wait_copied()
            # Within the device the copy takes 2 ms, to the host 39 ms.
            is_ahead = time.monotonic() - stepped_s > 0.015
            if step > 1:  # Two images have been set up.
                assert is_ahead == has_spare
            handle.result(60)
            assert all(bool((weight == -step).all()) for weight in manager.load(step=step))


def test_memory_that_others_need_more_is_not_taken(folder: Path, memory: Memory) -> None:
    state = {"t": torch.full((MEGABYTES_64,), 1.0, device="cuda")}
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(state, step=0).result(60)
        free_bytes = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free_bytes - (64 << 20), dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        state["t"] += 1
        manager.save(state, step=1).result(60)
        assert bool((manager.load(step=1)["t"] == 2).all())
        del taken
        torch.cuda.empty_cache()


def test_a_refused_page_lock_leaves_no_error_behind() -> None:
    image = torch.zeros(1 << 20, dtype=torch.uint8)
    torch.zeros(1, device="cuda")
    assert device.page_lock(image)
    assert not device.page_lock(image)
    device.page_unlock(image)
    assert device._runtime().cudaPeekAtLastError() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("ahead_bytes", [in_place.AHEAD_BYTES, 5 << 20, 0])
@pytest.mark.parametrize("tier", ["MEMORY", "NVME"])
def test_a_state_is_restored_into_tensors_on_the_device(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, tier: str, ahead_bytes: int
) -> None:
    monkeypatch.setattr(in_place, "AHEAD_BYTES", ahead_bytes)
    state = {f"t{n}": torch.full((1 << 20,), float(n), device="cuda", dtype=torch.bfloat16) for n in range(8)}
    state["strided"] = torch.arange(12.0, device="cuda").view(3, 4).t()
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save({"model": state, "step": 4}, step=4).result(60)
        target = {"model": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
        places = {name: tensor.data_ptr() for name, tensor in target["model"].items()}
        loaded = manager.load(into=target, tiers=[tier])
    assert loaded["step"] == 4
    for name, tensor in state.items():
        assert torch.equal(target["model"][name], tensor), name
        assert loaded["model"][name].data_ptr() == places[name]


def test_a_damaged_image_never_reaches_tensors_on_the_device(folder: Path, memory: Memory) -> None:
    state = {f"t{n}": torch.full((1 << 20,), float(n + 1), device="cuda") for n in range(8)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with CheckpointManager(folder, memory=memory) as manager:
        info = manager.save(state, step=1).result(60)
        with open(manager.snapshots()[0].path, "r+b") as image:
            image.seek(info.size_bytes // 2)
            image.write(b"damaged")
        with pytest.raises(LoadFailed):
            manager.load(into=target, tiers=["MEMORY"])
        assert all(bool((tensor == 0.0).all()) for tensor in target.values())
        manager.load(into=target)  # From the disk.
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name


def test_images_can_be_page_locked_again_after_a_change_of_structure(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in range(6):
            state = {"t": torch.full(((step % 2 + 1) << 20,), float(step), device="cuda")}
            manager.save(state, step=step).result(60)
            assert bool((manager.load(step=step)["t"] == step).all())
