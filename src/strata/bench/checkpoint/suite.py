"""How fast checkpoints are, beside the limits of the machine and beside other savers, in one run.

    python -m strata.bench.checkpoint.suite [--json] [--quick] [--gpu] [--folder DIR]

Times are the best of several rounds in which everything takes its turn, so that a busy moment hits none of them alone; notes
tell how far the rounds lie apart. The folder should be on the disk that checkpoints go to. Needs torch and xxhash;
peers, S3 and the table's looks come with what is installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from strata.bench.checkpoint import damage
from strata.bench.checkpoint.peers import (
    BareCopy,
    BareWrite,
    Clock,
    Timing,
    clean,
    leave_behind,
    make_manager,
    make_state,
    measure_peers,
)
from strata.bench.table import Row, number, report
from strata.checkpoint import CheckpointManager, Memory

TITLE = "Checkpoints"
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` shows that the benchmark works; its results mean nothing."""

    size_bytes: int = 1 << 30
    tensor_counts: tuple[int, ...] = (256, 10_000)
    rounds: int = 7
    peer_rounds: int = 2
    matmul_s: float = 4.0
    flips: int = 300
    s3_bytes: int = 256 << 20
    gpu_bytes: int = 8 << 30
    gpu_tensors: int = 256
    gpu_steps: int = 60


QUICK = Load(
    size_bytes=16 << 20,
    tensor_counts=(16,),
    rounds=2,
    peer_rounds=1,
    matmul_s=0.2,
    flips=20,
    s3_bytes=8 << 20,
    gpu_bytes=64 << 20,
    gpu_tensors=16,
    gpu_steps=6,
)


def run(load: Load | None = None, *, folder: Path | None = None, gpu: bool = False) -> Iterator[Row]:
    """Measure, and yield each row as it is there. `folder` is where files go; nothing is left in it."""
    load = load or Load()
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=folder) as made:
        place = Path(made)
        if gpu:
            from strata.bench.checkpoint.gpu import gpu_rows

            yield from gpu_rows(load, place)
            return
        for tensors in load.tensor_counts:
            yield from _save_rows(load, tensors, place)
        yield from _memory_rows(load, place)
        yield from _matmul_rows(load, place)
        yield from _restore_rows(load)
        yield from _damage_rows(load, place)
        from strata.bench.checkpoint.s3 import s3_rows

        yield from s3_rows(load, place)


def _save_rows(load: Load, tensors: int, place: Path) -> Iterator[Row]:
    state = make_state(tensors, load.size_bytes)
    bare_copy, bare_write = BareCopy(load.size_bytes), BareWrite(place, load.size_bytes)
    copies, writes, saves = [], [], []
    with clean(place / "saves") as folder:
        manager, clock = make_manager(folder)
        for step in range(3):  # Both images laid out and faulted in, the disk's files allocated.
            _save(manager, clock, state, step)
        for step in range(3, 3 + load.rounds):
            copies.append(bare_copy())
            writes.append(bare_write())
            saves.append(_save(manager, clock, state, step))
        manager.close()
    del bare_copy, bare_write
    gc.collect()
    peers = measure_peers(state, place, repeats=load.peer_rounds)
    copy_s, write_s = min(copies), min(writes)
    stall_s, durable_s = min(save.stall_s for save in saves), min(save.durable_s for save in saves)
    name = f"{tensors:,} tensors"
    yield Row(
        name=f"stall, {name}",
        measured=stall_s / copy_s,
        unit="× a bare copy",
        target=1.3,
        better="lower",
        peer=f"bare copy {copy_s * 1e3:.0f} ms",
        note=f"{_spread([save.stall_s for save in saves])}; bare copy {_spread(copies)}",
    )
    yield Row(
        name=f"durable, {name}",
        measured=write_s / durable_s,
        unit="of a bare O_DIRECT write",
        target=0.85,
        peer=f"bare write {write_s * 1e3:.0f} ms",
        note=f"{_spread([save.durable_s for save in saves])}; bare write {_spread(writes)}",
    )
    if dcp_async := peers.get("dcp.async_save"):
        yield Row(
            name=f"stall against dcp.async_save, {name}",
            measured=stall_s / dcp_async.stall_s,
            unit="of its stall",
            target=1 / 3,
            better="lower",
            peer=f"{dcp_async.stall_s * 1e3:.0f} ms",
        )
    if dcp := peers.get("dcp.save"):
        yield Row(
            name=f"durable against dcp.save, {name}",
            measured=dcp.durable_s / durable_s,
            unit="× as fast",
            target=2,
            peer=f"{dcp.durable_s * 1e3:.0f} ms",
        )
    for peer, timing in {"strata": Timing(stall_s=stall_s, durable_s=durable_s), **peers}.items():
        yield Row(
            name=f"{peer}, {name}",
            measured=load.size_bytes / timing.durable_s / MB,
            unit="MB/s to durable",
            peer=f"stall {timing.stall_s * 1e3:.0f} ms",
        )


def _save(manager: CheckpointManager, clock: Clock, state: Any, step: int) -> Timing:
    state["step"] = step
    started_s = time.perf_counter()
    handle = manager.save(state, step=step)
    stall_s = time.perf_counter() - started_s
    handle.result()
    return Timing(stall_s=stall_s, durable_s=clock.durable_s)


def _memory_rows(load: Load, place: Path) -> Iterator[Row]:
    """In a process of its own, so that nothing else is counted."""
    tensors = load.tensor_counts[-1]
    command = [
        sys.executable,
        "-m",
        "strata.bench.checkpoint.suite",
        "--probe-memory",
        str(tensors),
        str(load.size_bytes),
    ]
    done = subprocess.run([*command, "--folder", str(place)], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    yield Row(
        name=f"peak extra memory, {tensors:,} tensors",
        measured=(found["peak_bytes"] - 2 * found["image_bytes"]) / MB,
        unit="MB beyond two images",
        target=64,
        better="lower",
        peer=f"image {found['image_bytes'] / MB:,.0f} MB",
    )


def _probe_memory(tensors: int, size_bytes: int, place: Path) -> None:
    state = make_state(tensors, size_bytes)
    with clean(place / "probe") as folder:
        manager, _ = make_manager(folder)
        before, peak, is_done = _resident_bytes(), [0], threading.Event()

        def watch() -> None:
            while not is_done.wait(0.002):
                peak[0] = max(peak[0], _resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        infos = [manager.save(state, step=step) for step in range(4)]
        image_bytes = infos[-1].result().size_bytes
        is_done.set()
        watcher.join()
        manager.close()
    print(json.dumps({"peak_bytes": peak[0] - before, "image_bytes": image_bytes}))


def _resident_bytes() -> int:
    """All pages of this process, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _matmul_rows(load: Load, place: Path) -> Iterator[Row]:
    """A loop of multiplications while a save is on its way to the disk, against one that has the machine alone."""
    state = make_state(load.tensor_counts[0], load.size_bytes)
    left, right = torch.rand(768, 768), torch.rand(768, 768)

    def multiply() -> float:
        started_s = time.perf_counter()
        torch.mm(left, right)
        return time.perf_counter() - started_s

    with clean(place / "matmul") as folder:
        manager, clock = make_manager(folder)
        for step in range(3):
            _save(manager, clock, state, step)
        alone: list[float] = []
        beside: list[float] = []
        step = 3
        deadline_s = time.perf_counter() + 2 * load.matmul_s
        while time.perf_counter() < deadline_s:
            handle = manager.save(state, step=step)
            while not handle.done():
                beside.append(multiply())
            alone += [multiply() for _ in range(max(1, len(beside) - len(alone)))]
            step += 1
        manager.close()
    beside_s, alone_s = sum(beside) / len(beside), sum(alone) / len(alone)
    yield Row(
        name="matmul loop beside a save",
        measured=(beside_s / alone_s - 1) * 100,
        unit="% slower",
        target=10,
        better="lower",
        peer=f"{alone_s * 1e3:.2f} ms alone",
        note=f"{len(beside)} and {len(alone)} multiplications, one save after the other",
    )


_HOLDER = """
import sys
from strata.bench.checkpoint.peers import make_state
from strata.checkpoint import CheckpointManager, Memory
manager = CheckpointManager([], memory=Memory(job=sys.argv[1]))
state = make_state(int(sys.argv[2]), int(sys.argv[3]))
for step in (1, 2):
    manager.save(state, step=step).result()
print("saved", flush=True)
sys.stdin.read()
"""


def _restore_rows(load: Load) -> Iterator[Row]:
    for tensors in load.tensor_counts:
        target = make_state(tensors, load.size_bytes)
        taken = []
        for _ in range(load.rounds):
            job = f"bench-{uuid.uuid4().hex[:12]}"
            leave_behind(_HOLDER, job, str(tensors), str(load.size_bytes))
            for tensor in target["model"].values():
                tensor.zero_()
            with CheckpointManager([], memory=Memory(job=job)) as manager:
                started_s = time.perf_counter()
                restored = manager.restore(into=target, tear_ok=True)  # As a job does.
                taken.append(time.perf_counter() - started_s)
            assert restored.tier == "MEMORY"
            assert all(bool((t == n % 97).all()) for n, t in enumerate(target["model"].values()))
        yield Row(
            name=f"restore after kill -9, {tensors:,} tensors",
            measured=median(taken),
            unit="s to tensors in place",
            target=0.5,
            better="lower",
            note=f"{load.size_bytes / MB:,.0f} MB, verified; {_spread(taken)}",
        )


def _damage_rows(load: Load, place: Path) -> Iterator[Row]:
    for verdict in damage.count(place / "damage", flips=load.flips):
        yield Row(
            name=f"one flipped bit, {verdict.name}",
            measured=verdict.silently_wrong / verdict.flips * 100,
            unit="% loaded silently wrong",
            target=0 if verdict.name == "strata" else None,
            better="lower",
            note=f"of {verdict.flips}: {verdict.noticed} noticed, {verdict.harmless} without effect",
        )


def _spread(seconds: list[float]) -> str:
    ordered = [number(each * 1e3) for each in (min(seconds), median(seconds), max(seconds))]
    return f"{ordered[0]} to {ordered[2]} ms, median {ordered[1]}"


def main(*, json: bool = False, quick: bool = False, gpu: bool = False, folder: Path | None = None) -> None:
    title = f"{TITLE}, {torch.cuda.get_device_name()}" if gpu else TITLE
    report(title, run(QUICK if quick else None, folder=folder, gpu=gpu), as_json=json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Measure checkpoints beside the machine's limits and other savers."
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small, as a smoke test")
    parser.add_argument("--gpu", action="store_true", help="the CUDA part instead of the CPU part")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; the system's temporary one by default"
    )
    parser.add_argument("--probe-memory", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe_memory:
        _probe_memory(given.probe_memory[0], given.probe_memory[1], given.folder)
    else:
        main(json=given.json, quick=given.quick, gpu=given.gpu, folder=given.folder)
