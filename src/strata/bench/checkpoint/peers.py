"""The limits and the peers that checkpoints are measured against: bare copies and writes, and other people's savers.

Every peer saves the same state durably: where it does not flush to the device itself, it is made to.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.checkpoint import CheckpointInfo, CheckpointManager, Memory, Started

PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One save: how long training stood still, and when the bytes were safe."""

    stall_s: float
    durable_s: float


class Clock:
    """Hears from the engine when a checkpoint was safe on disk; cleaning up after it is not counted."""

    def __init__(self) -> None:
        self.durable_s = 0.0

    def on_started(self, save: Started) -> None: ...

    def on_tier(self, save: Started, *, tier: str, size_bytes: int, seconds: float) -> None:
        if tier != "MEMORY":
            self.durable_s = seconds

    def on_completed(self, save: Started, info: CheckpointInfo, *, seconds: float) -> None: ...

    def on_skipped(self, save: Started, *, tier: str, reason: str) -> None: ...

    def on_failed(self, save: Started, error: BaseException, *, seconds: float) -> None: ...

    def on_removed(self, checkpoint_id: str, *, step: int, epoch: int, path: str, reason: str) -> None: ...


def make_manager(folder: Path) -> tuple[CheckpointManager, Clock]:
    """A manager with images of its own, that keeps one checkpoint on disk."""
    clock = Clock()
    memory = Memory(job=f"bench-{uuid.uuid4().hex[:12]}")
    return CheckpointManager(folder, keep_count=1, memory=memory, observer=clock), clock


def make_state(
    tensors: int, size_bytes: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """A state of so many equal tensors, every page of it touched."""
    each = size_bytes // tensors // dtype.itemsize
    model = {
        f"layers.{n}.weight": torch.full((each,), float(n % 97), dtype=dtype, device=device)
        for n in range(tensors)
    }
    return {"model": model, "step": 0, "lr": 1e-3}


def leave_behind(program: str, *arguments: str) -> None:
    """Run a program that saves to memory and says so, and kill it."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"saved\n"
        holder.send_signal(signal.SIGKILL)


class BareCopy:
    """The bytes of a state copied once, flat, into pages that are there: no stall can be shorter."""

    def __init__(self, size_bytes: int) -> None:
        self._from = torch.ones(size_bytes, dtype=torch.uint8)
        self._to = torch.ones(size_bytes, dtype=torch.uint8)

    def __call__(self) -> float:
        started_s = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - started_s


class BareWrite:
    """The bytes of a state written once with O_DIRECT and flushed: no local save can be faster."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._path = folder / "bare-write"
        self._bytes = mmap.mmap(
            -1, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE | mmap.MAP_ANONYMOUS
        )

    def __call__(self) -> float:
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            with memoryview(self._bytes) as view:
                started_s = time.perf_counter()
                for start in range(0, len(view), PIECE_BYTES):
                    os.write(fd, view[start : start + PIECE_BYTES])
                os.fsync(fd)
                return time.perf_counter() - started_s
        finally:
            os.close(fd)
            self._path.unlink()


def torch_save(state: Any, folder: Path) -> Timing:
    path = folder / "torch-save.pt"
    started_s = time.perf_counter()
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return _synchronous(started_s)


def safetensors_save(state: Any, folder: Path) -> Timing:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    started_s = time.perf_counter()
    save_file(state["model"], str(path))
    _flush(path)
    return _synchronous(started_s)


def dcp_save(state: Any, folder: Path) -> Timing:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    started_s = time.perf_counter()
    with _quiet():
        dcp.save({"model": state["model"]}, checkpoint_id=folder / "dcp")  # Flushes its files itself.
    return _synchronous(started_s)


def dcp_async_save(state: Any, folder: Path) -> Timing:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")

    started_s = time.perf_counter()
    with _quiet():
        future: Any = dcp.async_save({"model": state["model"]}, checkpoint_id=folder / "dcp-async")
        stall_s = time.perf_counter() - started_s
        future.result()
    return Timing(stall_s=stall_s, durable_s=time.perf_counter() - started_s)


def torchsnapshot_save(state: Any, folder: Path) -> Timing:
    import torchsnapshot  # type: ignore[import-not-found]

    class Holder:
        def state_dict(self) -> Any:
            return dict(state["model"])

        def load_state_dict(self, _: Any) -> None: ...

    started_s = time.perf_counter()
    pending = torchsnapshot.Snapshot.async_take(str(folder / "torchsnapshot"), {"app": Holder()})
    stall_s = time.perf_counter() - started_s
    pending.wait()
    for path in (folder / "torchsnapshot").rglob("*"):
        if path.is_file():
            _flush(path)
    return Timing(stall_s=stall_s, durable_s=time.perf_counter() - started_s)


PEERS: dict[str, Callable[[Any, Path], Timing]] = {
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "dcp.save": dcp_save,
    "dcp.async_save": dcp_async_save,
    "torchsnapshot": torchsnapshot_save,
}


def measure_peers(state: Any, folder: Path, *, repeats: int) -> dict[str, Timing]:
    """The best of `repeats` for every peer that is installed."""
    found = {}
    with process_group(folder):
        for name, save in PEERS.items():
            timings = []
            try:
                for _ in range(repeats):
                    with clean(folder / "peer") as place:
                        timings.append(save(state, place))
            except ImportError:
                continue
            found[name] = Timing(
                stall_s=min(timing.stall_s for timing in timings),
                durable_s=min(timing.durable_s for timing in timings),
            )
    return found


@contextlib.contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A world of one: DCP saves asynchronously only within a process group."""
    dist: Any = importlib.import_module("torch.distributed")

    if dist.is_initialized():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.FileStore(str(folder / f"rendezvous-{uuid.uuid4().hex}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def clean(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _synchronous(started_s: float) -> Timing:
    taken_s = time.perf_counter() - started_s
    return Timing(stall_s=taken_s, durable_s=taken_s)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
