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

from strata.bench.checkpoint.peers import (
    BareWrite,
    clean,
    leave_behind,
    make_manager,
    make_state,
    measure_peers,
)
from strata.bench.recovery.large_job import build
from strata.bench.table import Row
from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.image.state import scan
from strata.torch_compat.images import copy_all
from strata.training.state import TrainingState

if TYPE_CHECKING:
    from strata.bench.checkpoint.suite import Load

GB = 1e9
ROUNDS = 5
_cuda: Any = torch.cuda


class Training:
    """A loop with the weights, gradients and optimizer state of a real one."""

    def __init__(self, state_bytes: int, *, device: str = "cuda", with_step: bool = True) -> None:
        self.model, self.optimizer, self._inputs = build(
            state_bytes, device, batch=4096 if device == "cuda" else 8
        )
        if with_step:
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._inputs).float().square().mean().backward()
        self.optimizer.step()

    def job_state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def gpu_rows(load: Load, place: Path) -> Iterator[Row]:
    yield from _copy_rows(load, place)
    _cuda.empty_cache()
    yield from _training_rows(load, place)
    _cuda.empty_cache()
    yield from restore_rows(load)
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
            started_s = time.perf_counter()
            handle = manager.save(state, step=step)
            stall_s = time.perf_counter() - started_s
            handle.wait_copied()
            copied_s = time.perf_counter() - started_s
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
        started_s = time.perf_counter()
        copy_all(targets, sources)
        _cuda.synchronize()
        taken.append(time.perf_counter() - started_s)
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
            started_s = time.perf_counter()
            for step in range(interval):
                if step == 1:
                    state = training.state()
                    asked_s = time.perf_counter()
                    manager.save(state, step=10 + round_number)
                    stalls.append(time.perf_counter() - asked_s)
                training.step()
            _cuda.synchronize()
            beside.append((time.perf_counter() - started_s) / interval)
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
        note="compared bit for bit, while the loop continues",
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
    started_s = time.perf_counter()
    for _ in range(steps):
        training.step()
    _cuda.synchronize()
    return time.perf_counter() - started_s


_HOLDER = """
import sys
from strata.bench.checkpoint.gpu import Training
from strata.checkpoint import CheckpointManager, Memory
training = Training(int(sys.argv[2]), device=sys.argv[3])
state = training.job_state()
manager = CheckpointManager([], memory=Memory(job=sys.argv[1]))
for step in (1, 2):
    manager.save(state.capture(step=step, epoch=0, rng_states={}, world_size=1), step=step).result()
print("saved", flush=True)
sys.stdin.read()
"""


def restore_rows(load: Load, *, device: str = "cuda") -> Iterator[Row]:
    """As a job that was started again does it: into a new model and an optimizer that has not stepped, then into tensors that
    are all there and an image that is page-locked."""
    job = f"bench-{uuid.uuid4().hex[:12]}"
    leave_behind(_HOLDER, job, str(load.gpu_bytes), device)
    training = Training(load.gpu_bytes, device=device, with_step=False)
    state = training.job_state()
    taken = []
    with CheckpointManager([], memory=Memory(job=job)) as manager:
        for _ in range(1 + ROUNDS):
            _synchronize(device)
            started_s = time.perf_counter()
            restored = manager.restore(into=state.targets(), tear_ok=True)
            state.adopt(restored.state, rank=0)
            _synchronize(device)
            taken.append(time.perf_counter() - started_s)
            assert restored.tier == "MEMORY"
    size_bytes = sum(tensor.nbytes for tensor in scan(training.state()).tensors)
    first_s, *again = taken
    yield Row(
        name="the job's restore from the memory tier, image page-locked",
        measured=size_bytes / median(again) / GB,
        unit="GB/s",
        target=20,
        note=f"{size_bytes / GB:.1f} GB, model and optimizer, every byte verified, in the live tensors; "
        + _speeds(size_bytes, again),
    )
    yield Row(
        name="the job's restore after kill -9, page-locking included",
        measured=first_s,
        unit="s",
        target=1.5,
        better="lower",
        note=f"{size_bytes / first_s / GB:.1f} GB/s; the optimizer's state is allocated, the pages stay locked for the "
        "saves that follow",
    )


def _synchronize(device: str) -> None:
    if device != "cpu":
        _cuda.synchronize()


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
