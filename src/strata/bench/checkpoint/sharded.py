"""Sharded state: `dcp.save` and `dcp.load` through Strata beside PyTorch's own files, in one run.

    python -m strata.bench.checkpoint.sharded [--json] [--quick] [--folder DIR]

Two ranks save a model with its optimizer, sharded by rows as FSDP2 does it, and three load it. Both savers take turns in
every round, in the same processes, and medians count: notes tell how far the rounds lie apart. What was loaded is compared
with what was saved, byte for byte. The folder should be on the disk that checkpoints go to. Each figure is one function.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, zeros
from torch.utils.data import TensorDataset

from strata.bench.table import Row, number, report
from strata.checkpoint.dcp import StrataStorageReader, StrataStorageWriter
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.shared_memory import memory_root
from strata.training import ElasticJob, ElasticOptions, elastic

TITLE = "Sharded checkpoints"
MB = 1e6
STRATA, DCP = "strata", "dcp"
WARM_UP = 2
"""Saves that do not count: each allocates one of the two images."""
Seconds = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` shows that the benchmark works; its results mean nothing."""

    hidden: int = 1024
    layers: int = 7
    savers: int = 2
    loaders: int = 3
    rounds: int = 5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The layers of a transformer, each parameter with the two averages that Adam keeps."""
        h = self.hidden
        layer = {"qkv": (3 * h, h), "out": (h, h), "up": (4 * h, h), "down": (h, 4 * h), "norm": (h,)}
        return {
            f"{kind}.{number}.{name}": shape
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for number in range(self.layers)
            for name, shape in layer.items()
        }

    @property
    def size_bytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values()) * torch.float32.itemsize


QUICK = Load(hidden=128, layers=2, rounds=2)


def run(load: Load | None = None, *, folder: Path | None = None) -> Iterator[Row]:
    """Measure, and yield each row as it is there. `folder` is where files go; nothing is left in it."""
    load = load or Load()
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=folder) as made:
        place = Path(made)
        yield from durable_rows(load, place)
        yield from resharded_rows(load, place)
        try:
            yield from elastic_rows(load, place)
        finally:
            shutil.rmtree(_memory(place), ignore_errors=True)


def durable_rows(load: Load, place: Path) -> Iterator[Row]:
    """A save, from the call until it has returned on all ranks: everything written and flushed to the device."""
    taken = _in_world(load.savers, _time_saves, load, place)
    mine = taken[STRATA]
    yield _compared("durable save beside dcp.save", taken, DCP, target=2.0, size_bytes=load.size_bytes)
    yield Row(
        name="durable save",
        measured=load.size_bytes / median(mine) / MB,
        unit="MB/s",
        peer=f"dcp.save {load.size_bytes / median(taken[DCP]) / MB:,.0f} MB/s",
    )
    yield _compared(
        "durable save beside dcp.save that flushes nothing", taken, "unsynced", size_bytes=load.size_bytes
    )


def resharded_rows(load: Load, place: Path) -> Iterator[Row]:
    """A load by another number of ranks, from the call until all have their tensors."""
    _in_world(load.savers, _leave_saved, load, place)
    taken = _in_world(load.loaders, _time_loads, load, place)
    how = f"{load.savers} → {load.loaders} ranks"
    for case, note in (
        ("cold", "both out of the page cache"),
        ("as saved", "theirs still in the page cache, which ours goes around when saving"),
    ):
        pair = {name: taken[f"{name}, {case}"] for name in (STRATA, DCP)}
        yield _compared(
            f"resharded load beside dcp.load, {how}, {case}",
            pair,
            DCP,
            target=1.5,
            size_bytes=load.size_bytes,
            note=note,
        )


def elastic_rows(load: Load, place: Path) -> Iterator[Row]:
    """An FSDP2 loop under `strata.elastic`, as a user writes it, beside one that calls `dcp.async_save` and `dcp.save`."""
    taken = _in_world(load.savers, _time_loop, load, place)
    stall, theirs = taken["stall"], taken["async_save"]
    yield Row(
        name="stall of the training thread beside dcp.async_save",
        measured=median(stall) / median(theirs),
        unit="× of theirs",
        target=0.35,
        better="lower",
        peer=f"{median(theirs) * 1000:.0f} ms, ours {median(stall) * 1000:.0f} ms",
        note=f"{_spread(stall)}; theirs {_spread(theirs)}",
    )
    yield _compared(
        "durable, from the end of the step, beside dcp.save",
        {STRATA: taken["durable"], DCP: taken["save"]},
        DCP,
        target=2.0,
        size_bytes=load.size_bytes,
    )
    restored = _in_world(load.savers, _time_restore, load, place)["restored"]
    yield Row(
        name="entering strata.elastic after a crash, the same ranks",
        measured=median(restored),
        unit="s",
        target=0.5,
        better="lower",
        note=f"{_spread(restored)}; from images in shared memory, every byte verified",
    )


def _compared(
    name: str, taken: Seconds, peer: str, *, size_bytes: int, target: float | None = None, note: str = ""
) -> Row:
    mine, theirs = taken[STRATA], taken[peer]
    said = [f"{size_bytes / MB:,.0f} MB", f"{_spread(mine)}; theirs {_spread(theirs)}", note]
    return Row(
        name=name,
        measured=median(theirs) / median(mine),
        unit="× as fast",
        target=target,
        peer=f"{median(theirs):.2f} s, ours {median(mine):.2f} s",
        note="; ".join(part for part in said if part),
    )


def _spread(seconds: list[float]) -> str:
    return f"{number(min(seconds))} to {number(max(seconds))} s, median {number(median(seconds))}"


# What the ranks do


def _time_saves(rank: int, load: Load, place: Path) -> Seconds:
    state = _state(load, is_filled=True)
    savers: dict[str, Callable[[Path], Any]] = {
        STRATA: lambda folder: StrataStorageWriter(folder, step=1),
        DCP: lambda folder: dcp.FileSystemWriter(folder),
        "unsynced": lambda folder: dcp.FileSystemWriter(folder, sync_files=False),
    }
    taken: Seconds = {name: [] for name in savers}
    for turn in range(load.rounds + 1):
        for name, make in savers.items():
            folder = place / f"save-{name}"
            taken_s = _timed(lambda make=make, folder=folder: dcp.save(state, storage_writer=make(folder)))  # type: ignore[misc]
            if turn:  # The first round allocates and imports.
                taken[name].append(taken_s)
            if rank == 0:
                shutil.rmtree(folder)
            distributed.barrier()
    return taken


def _leave_saved(rank: int, load: Load, place: Path) -> Seconds:
    state = _state(load, is_filled=True)
    dcp.save(state, storage_writer=StrataStorageWriter(place / STRATA, step=1))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place / DCP))
    return {}


def _time_loads(rank: int, load: Load, place: Path) -> Seconds:
    state = _state(load, is_filled=False)
    readers: dict[str, Callable[[], Any]] = {
        STRATA: lambda: StrataStorageReader(place / STRATA),
        DCP: lambda: dcp.FileSystemReader(place / DCP),
    }
    taken: Seconds = {}
    # As saved first: reading brings files into the page cache that were not there.
    for case in ("as saved", "cold"):
        for _ in range(load.rounds):
            for name, make in readers.items():
                for tensor in state.values():
                    tensor.to_local().zero_()
                if rank == 0 and (case == "cold" or name == STRATA):
                    _evict(place / name)
                taken_s = _timed(lambda make=make: dcp.load(state, storage_reader=make()))  # type: ignore[misc]
                taken.setdefault(f"{name}, {case}", []).append(taken_s)
                _check(load, state)
    return taken


def _time_loop(rank: int, load: Load, place: Path) -> Seconds:
    """Steps of a loop that saves after every second one; after the others PyTorch's own savers take their turn. Ends as a crash
    does."""
    model, optimizer = _model(load)
    usual: list[float] = []
    taken: Seconds = {"gap": [], "durable": [], "async_save": [], "save": []}
    with contextlib.suppress(_Crash), _elastic(model, optimizer, load, place) as job:
        assert job._manager is not None
        ended_s = 0.0
        for batch in job:
            if ended_s and job.step % 2:
                usual.append(time.perf_counter() - ended_s)
                for name, save in (("async_save", dcp.async_save), ("save", dcp.save)):
                    taken[name].append(_time_dcp(rank, save, model, optimizer, place / f"loop-{name}"))
            elif ended_s:
                taken["gap"].append(time.perf_counter() - ended_s)
                assert job._manager.wait_idle()
                distributed.barrier()
                taken["durable"].append(time.perf_counter() - ended_s)
            if job.step == 2 * (load.rounds + WARM_UP):
                raise _Crash
            model(batch.data[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()
            ended_s = time.perf_counter()
    usual_s = median(usual)
    taken["stall"] = [max(0.0, gap_s - usual_s) for gap_s in taken["gap"]]
    return {name: seconds[WARM_UP:] for name, seconds in taken.items()}


def _time_dcp(
    rank: int, save: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> float:
    distributed.barrier()
    started_s = time.perf_counter()
    found = save(_dcp_state(model, optimizer), checkpoint_id=folder)
    if found is None or not hasattr(found, "result"):
        distributed.barrier()
    seconds = time.perf_counter() - started_s
    if hasattr(found, "result"):
        found.result()
    distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    distributed.barrier()
    return seconds


def _time_restore(rank: int, load: Load, place: Path) -> Seconds:
    """The next start of the loop, with a new model each time, which crashes again before it has saved anything."""
    taken: Seconds = {"restored": []}
    for turn in range(load.rounds + 1):
        model, optimizer = _model(load)
        entering = _elastic(model, optimizer, load, place)
        distributed.barrier()
        started_s = time.perf_counter()
        with contextlib.suppress(_Crash), entering as job:
            distributed.barrier()
            if turn:  # The first imports.
                taken["restored"].append(time.perf_counter() - started_s)
            if (
                job.step != 2 * (load.rounds + WARM_UP)
                or job.recovery is None
                or job.recovery.tier != "MEMORY"
            ):
                raise AssertionError(f"restored step {job.step}: {job.recovery}")
            raise _Crash
    return taken


class _Crash(Exception):
    """Ends a loop without a final save."""


class _Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.qkv(x)[:, : x.shape[1]])
        out: torch.Tensor = self.norm(x + self.down(self.up(x)))
        return out


def _model(load: Load) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = nn.Sequential(*(_Layer(load.hidden) for _ in range(load.layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _elastic(model: nn.Module, optimizer: torch.optim.Optimizer, load: Load, place: Path) -> ElasticJob:
    samples = 64
    loader = ElasticLoader(
        TensorDataset(torch.randn(samples, load.hidden)),
        ElasticSampler(samples, global_batch_size=distributed.get_world_size()),
    )
    return elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=place / "loop",
        max_steps=1000,
        options=ElasticOptions(save_every=2, snapshot_every=0, memory_root=_memory(place)),
    )


def _memory(place: Path) -> Path:
    """A folder of this benchmark's own in shared memory."""
    return memory_root() / place.name


def _dcp_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def _timed(act: Callable[[], Any]) -> float:
    distributed.barrier()
    started_s = time.perf_counter()
    act()
    distributed.barrier()
    return time.perf_counter() - started_s


def _state(load: Load, *, is_filled: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    state = {}
    for turn, (name, shape) in enumerate(load.shapes.items()):
        state[name] = zeros(shape, device_mesh=mesh, placements=[Shard(0)])
        if is_filled:
            state[name].to_local().copy_(_content(turn, shape, mesh))
        else:
            state[name].to_local().fill_(1)  # Every page touched, as those of a model are.
    return state


def _content(turn: int, shape: tuple[int, ...], mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor no two elements of which are the same."""
    per_rank = -(-shape[0] // mesh.size())
    first, end = (min(shape[0], per_rank * n) for n in (mesh.get_local_rank(), mesh.get_local_rank() + 1))
    row = torch.Size(shape[1:]).numel()
    bits = torch.arange(first * row, end * row, dtype=torch.int32) + (turn << 23)
    return bits.view(torch.float32).reshape(end - first, *shape[1:])


def _check(load: Load, state: dict[str, DTensor]) -> None:
    for turn, (name, shape) in enumerate(load.shapes.items()):
        tensor = state[name]
        expected = _content(turn, shape, tensor.device_mesh)
        if not torch.equal(tensor.to_local().view(torch.int32), expected.view(torch.int32)):
            raise AssertionError(f"'{name}' was not loaded as it was saved")


def _evict(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


# Worlds


def _in_world(world: int, task: Callable[..., Seconds], load: Load, place: Path) -> Seconds:
    """What rank 0 measured while a world of this size did a task."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=place) as meeting:
        ranks = [
            context.Process(target=_rank, args=(rank, world, meeting, task, load, place, sender))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        sender.close()
        try:
            found: Seconds = receiver.recv()
        except EOFError:
            raise RuntimeError("a rank of the benchmark has failed; its error is above") from None
        finally:
            for process in ranks:
                process.join()
    return found


def _rank(
    rank: int,
    world: int,
    meeting: str,
    task: Callable[..., Seconds],
    load: Load,
    place: Path,
    sender: Connection,
) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # As under torchrun.
    distributed.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=world)
    try:
        taken = task(rank, load, place)
        if rank == 0:
            sender.send(taken)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def main(*, json: bool = False, quick: bool = False, folder: Path | None = None) -> None:
    report(TITLE, run(QUICK if quick else None, folder=folder), as_json=json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure sharded checkpoints beside PyTorch's own.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small, as a smoke test")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; the system's temporary one by default"
    )
    given = parser.parse_args()
    main(json=given.json, quick=given.quick, folder=given.folder)
