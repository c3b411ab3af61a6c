"""The CUDA part of the checkpoint benchmark: a real training loop that is saved while it runs, and restored.

The model is a stack of linear layers in bfloat16 with AdamW, sized so that parameters and optimizer state together have the
bytes that are asked for. Saves are as far apart as one needs to become durable, so none waits for an image. Figures are
medians; notes tell how far the rounds lie apart. That a fast save is also a right one is checked in the same run.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from strata.bench.checkpoint_peers import BareWrite, clean, make_manager, make_state, measure_peers
from strata.bench.table import Row
from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.state import scan

if TYPE_CHECKING:
    from strata.bench.checkpoint import Load

GB = 1e9
WIDTH = 4096
ROUNDS = 5
_cuda: Any = torch.cuda


class Training:
    """A loop with the weights, gradients and optimizer state of a real one."""

    def __init__(self, state_bytes: int) -> None:
        parameters = state_bytes // 3 // 2  # Weights and two moments, two bytes each.
        width = min(WIDTH, int((parameters / 8) ** 0.5) // 64 * 64)
        layers = max(1, round(parameters / width**2))
        made: list[torch.nn.Module] = []
        for _ in range(layers):
            made += [
                torch.nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16),
                torch.nn.GELU(),
            ]
        self.model = torch.nn.Sequential(*made)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self._inputs = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._inputs).float().square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def gpu_rows(load: Load, place: Path) -> Iterator[Row]:
    yield from _copy_rows(load, place)
    _cuda.empty_cache()
    yield from _training_rows(load, place)
    _cuda.empty_cache()
    yield from _restore_rows(load)
    yield from _peer_rows(load, place)


def _copy_rows(load: Load, place: Path) -> Iterator[Row]:
    state = make_state(load.gpu_tensors, load.gpu_bytes, device="cuda", dtype=torch.bfloat16)
    bare_s = _bare_copy_s(state)
    copied, durable, stalls = [], [], []
    with clean(place / "copy") as folder:
        manager, clock = make_manager(folder)
        first_s = 0.0
        for step in range(2 + ROUNDS):
            _cuda.synchronize()
            begun_s = time.perf_counter()
            handle = manager.save(state, step=step)
            stall_s = time.perf_counter() - begun_s
            handle.wait_copied()
            copied_s = time.perf_counter() - begun_s
            handle.result()
            first_s = first_s or stall_s
            if step >= 2:  # Both images have been laid out, faulted in and page-locked.
                stalls.append(stall_s)
                copied.append(copied_s)
                durable.append(clock.durable_s)
        manager.close()
    write = BareWrite(place, load.gpu_bytes)
    writes = [write() for _ in range(2)]
    yield Row(
        name="copy, device to image",
        measured=load.gpu_bytes / median(copied) / GB,
        unit="GB/s",
        target=50,
        peer=f"bare copy to page-locked memory {load.gpu_bytes / bare_s / GB:.1f} GB/s",
        note=f"{load.gpu_bytes / GB:.1f} GB in {load.gpu_tensors} tensors, from the call to the last byte; "
        + _speeds(load.gpu_bytes, copied),
    )
    yield Row(
        name="to durable",
        measured=load.gpu_bytes / median(durable) / GB,
        unit="GB/s",
        target=2,
        peer=f"bare O_DIRECT write {load.gpu_bytes / median(writes) / GB:.2f} GB/s",
        note=f"from the call; {_speeds(load.gpu_bytes, durable)}; bare {_speeds(load.gpu_bytes, writes)}",
    )
    yield Row(
        name="stall, no loop and no guard",
        measured=median(stalls) * 1e3,
        unit="ms per save",
        target=2,
        better="lower",
        note=_times_ms(stalls),
    )
    yield Row(
        name="first save: layout, pages, page-locking",
        measured=first_s,
        unit="s",
        note="once per image",
    )


def _bare_copy_s(state: dict[str, Any]) -> float:
    sources = list(state["model"].values())
    targets = [torch.empty(source.shape, dtype=source.dtype, pin_memory=True) for source in sources]
    taken = []
    for _ in range(3):
        _cuda.synchronize()
        begun_s = time.perf_counter()
        torch._foreach_copy_(targets, sources, True)
        _cuda.synchronize()
        taken.append(time.perf_counter() - begun_s)
    return median(taken)


def _training_rows(load: Load, place: Path) -> Iterator[Row]:
    training = Training(load.gpu_bytes)
    state_bytes = sum(parameter.nbytes * 3 for parameter in training.model.parameters())
    with clean(place / "training") as folder:
        manager, clock = make_manager(folder)
        manager.guard(training.optimizer)
        for step in range(3):  # Two images to lay out, and one save that shows how far apart they must be.
            manager.save(training.state(), step=step).result()
        alone_s = _steps_s(training, load.gpu_steps) / load.gpu_steps
        interval = max(load.gpu_steps // 3, int(clock.durable_s / alone_s * 1.2) + 2)
        stalls: list[float] = []
        beside, alone = [], [alone_s]
        for round_number in range(ROUNDS):
            _cuda.synchronize()
            begun_s = time.perf_counter()
            for step in range(interval):
                if step == 1:
                    state = training.state()
                    asked_s = time.perf_counter()
                    manager.save(state, step=10 + round_number)
                    stalls.append(time.perf_counter() - asked_s)
                training.step()
            _cuda.synchronize()
            beside.append((time.perf_counter() - begun_s) / interval)
            manager.wait_pending()
            alone.append(_steps_s(training, load.gpu_steps) / load.gpu_steps)
        wrong = sum(_is_wrong(manager, training, step=100 + n) for n in range(3))
        manager.close()
    yield Row(
        name="stall of a running loop",
        measured=median(stalls) * 1e3,
        unit="ms per save",
        target=2,
        better="lower",
        note=f"{state_bytes / GB:.1f} GB of state; {_times_ms(stalls)}",
    )
    yield Row(
        name="step time while saving",
        measured=(median(beside) / median(alone) - 1) * 100,
        unit="% longer",
        target=2,
        better="lower",
        peer=f"{median(alone) * 1e3:.1f} ms alone",
        note=f"one save in {interval} steps, as often as the disk allows, and it costs "
        f"{(median(beside) - median(alone)) * interval * 1e3:.0f} ms; {_times_ms(beside)}; alone {_times_ms(alone)}",
    )
    yield Row(
        name="images that differ from the state at the call",
        measured=wrong,
        unit="of 3",
        target=0,
        better="lower",
        note="compared bit for bit, while the loop goes on",
    )


def _is_wrong(manager: CheckpointManager, training: Training, *, step: int) -> bool:
    """Whether the image differs from what the state was when `save` was called."""
    training.step()
    state = training.state()
    wanted, received = copy.deepcopy(state), copy.deepcopy(state)
    handle = manager.save(state, step=step, tiers=["MEMORY"])
    for _ in range(4):
        training.step()
    handle.result()
    for tensor in scan(received).tensors:
        tensor.zero_()
    manager.load(step=step, into=received, tiers=["MEMORY"])
    pairs = zip(scan(wanted).tensors, scan(received).tensors, strict=True)
    return not all(torch.equal(_raw(left), _raw(right)) for left, right in pairs)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def _steps_s(training: Training, steps: int) -> float:
    _cuda.synchronize()
    begun_s = time.perf_counter()
    for _ in range(steps):
        training.step()
    _cuda.synchronize()
    return time.perf_counter() - begun_s


def _restore_rows(load: Load) -> Iterator[Row]:
    from strata.bench.checkpoint import leave_snapshot

    job = f"bench-{uuid.uuid4().hex[:12]}"
    leave_snapshot(job, load.gpu_tensors, load.gpu_bytes, "bfloat16")
    target = make_state(load.gpu_tensors, load.gpu_bytes, device="cuda", dtype=torch.bfloat16)
    taken = []
    with CheckpointManager([], memory=Memory(job=job)) as manager:
        for _ in range(1 + ROUNDS):
            for tensor in target["model"].values():
                tensor.zero_()
            _cuda.synchronize()
            begun_s = time.perf_counter()
            restored = manager.restore(into=target)
            taken.append(time.perf_counter() - begun_s)
            assert restored.tier == "MEMORY"
            assert all(bool((t == n % 97).all()) for n, t in enumerate(target["model"].values()))
    first_s, *again = taken
    yield Row(
        name="restore from the memory tier, image page-locked",
        measured=load.gpu_bytes / median(again) / GB,
        unit="GB/s",
        target=30,
        note=f"every byte verified, in place on the device; {_speeds(load.gpu_bytes, again)}",
    )
    yield Row(
        name="restore after kill -9, page-locking included",
        measured=load.gpu_bytes / first_s / GB,
        unit="GB/s",
        note=f"{first_s:.2f} s; the pages stay locked for the saves that follow",
    )


def _peer_rows(load: Load, place: Path) -> Iterator[Row]:
    state = make_state(load.gpu_tensors, load.gpu_bytes, device="cuda", dtype=torch.bfloat16)
    for name, timing in measure_peers(state, place, repeats=1).items():
        yield Row(
            name=name,
            measured=load.gpu_bytes / timing.durable_s / GB,
            unit="GB/s to durable",
            peer=f"stall {timing.stall_s:.2f} s",
        )


def _times_ms(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms in {len(seconds)} rounds"


def _speeds(size_bytes: int, seconds: Sequence[float]) -> str:
    slowest, fastest = (size_bytes / taken_s / GB for taken_s in (max(seconds), min(seconds)))
    return f"{slowest:.2f} to {fastest:.2f} GB/s in {len(seconds)} rounds"
