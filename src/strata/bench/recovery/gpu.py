"""A job with gigabytes of state on a device is killed: from SIGKILL to the next new step, through the job's own path.

    python -m strata.bench.recovery.gpu [--json] [--quick] [--device cuda]

One rank, restarted by an agent with warm workers; each kill is of a process that has trained long enough for its second fork
server to be ready. Beside it the same model in a plain loop with `torch.save`, restarted by torchrun as it is. Needs nothing
but torch, psutil and xxhash; no coordinator runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import strata
from strata.bench.recovery.kills import POLL_S, kill_worker
from strata.bench.table import Row, report
from strata.launch.torchrun import Agent, TorchrunSpec
from strata.shared_memory import forget_jobs

GB = 1e9
NOTED_S = 60.0
SCRIPT = Path(__file__).with_name("large_job.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` shows that the benchmark works; its results mean nothing."""

    state_bytes: int = 6_000_000_000
    snapshot_every: int = 25
    kills: int = 5
    plain_kills: int = 3
    first_peace_s: float = 20.0
    """Until the first kill: time for a second fork server to import what the first start was seen to import."""
    peace_s: float = 5.0
    patience_s: float = 120.0


QUICK = Load(state_bytes=600_000, snapshot_every=1, kills=1, plain_kills=1, first_peace_s=2.0, peace_s=2.0)


def run(load: Load | None = None, *, device: str = "cuda", folder: Path | None = None) -> Iterator[Row]:
    load = load or Load()
    with tempfile.TemporaryDirectory(prefix="strata-bench-", dir=folder) as made:
        yield from _elastic(load, device, Path(made))
        yield from _plain(load, device, Path(made))


def _elastic(load: Load, device: str, folder: Path) -> Iterator[Row]:
    with _running("elastic", load, device, folder, warm=True) as (agent, name):
        times = _kill(agent, name, load, load.kills)
        if not times:
            raise RuntimeError(
                f"The job did not come back after it was killed. Its log ends:\n{agent.tail()}"
            )
        found = _recoveries(folder, len(times), agent)
    phases = {
        phase: statistics.median(each["phases"].get(phase, 0.0) for each in found)
        for phase in ("detect", "rendezvous", "spawn", "load", "first_step")
    }
    size = f"{load.state_bytes / GB:.3g} GB of state"
    yield Row(
        name=f"SIGKILL → next new step, {size}",
        measured=statistics.median(times),
        unit="s",
        target=4.0,
        better="lower",
        note=f"median of {len(times)} kills, {min(times):.2f} to {max(times):.2f} s; one rank, from "
        f"{', '.join(sorted({each['tier'] for each in found}))}; steps made again, median "
        f"{statistics.median(each['lost_steps'] for each in found):.0f}; median by phase: "
        + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items()),
    )
    restored = [each["phases"].get("load", each["restored_s"]) for each in found]
    yield Row(
        name="of it, the job's own restore, page-locking included",
        measured=statistics.median(restored),
        unit="s",
        target=1.5,
        better="lower",
        note=f"{load.state_bytes / GB / statistics.median(restored):.1f} GB/s; {min(restored):.2f} to {max(restored):.2f} s; "
        "from the job's entering to its live tensors, verified",
    )


def _plain(load: Load, device: str, folder: Path) -> Iterator[Row]:
    with _running("plain", load, device, folder, warm=False) as (agent, name):
        times = _kill(agent, name, load, load.plain_kills)
    if times:
        yield Row(
            name="peer: torchrun and torch.save, SIGKILL → next new step",
            measured=statistics.median(times),
            unit="s",
            note=f"{len(times)} kills, {min(times):.2f} to {max(times):.2f} s; the same model, saved as often as the disk "
            "allows",
        )


def _kill(agent: Agent, name: str, load: Load, kills: int) -> list[float]:
    times = []
    for number in range(kills):
        peace_s = load.peace_s if number else load.first_peace_s
        seconds = kill_worker(agent, name, peace_s=peace_s, patience_s=load.patience_s)
        if seconds is not None:
            times.append(seconds)
    return times


def _recoveries(folder: Path, kills: int, agent: Agent) -> list[dict[str, Any]]:
    """What the job noted of each; it does so after the step that was waited for."""
    path, deadline_s = folder / "recoveries.jsonl", time.monotonic() + NOTED_S
    while True:
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= kills:
            return [json.loads(line) for line in lines[:kills]]
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"The job noted {len(lines)} of {kills} recoveries. Its log ends:\n{agent.tail()}"
            )
        time.sleep(POLL_S)


@contextlib.contextmanager
def _running(way: str, load: Load, device: str, folder: Path, *, warm: bool) -> Iterator[tuple[Agent, str]]:
    """One agent on this machine that is its own meeting point."""
    name = f"bench-{way}-{os.getpid()}"
    sources = str(Path(strata.__file__).parents[1])
    spec = TorchrunSpec(
        run_id=name,
        arguments=[
            *(str(SCRIPT), way, name, str(folder), str(load.state_bytes), device),
            *([str(load.snapshot_every)] if way == "elastic" else []),
        ],
        rdzv_endpoint="",
        warm=warm,
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH", "")]))
        },
    )
    agent = Agent(spec, log=folder / f"{way}.log")
    try:
        yield agent, name
    finally:
        agent.kill()
        forget_jobs(name)


def main(*, as_json: bool = False, quick: bool = False, device: str = "cuda") -> None:
    title = "Recovery of a large state"
    if device == "cuda":
        import torch

        title += f", {torch.cuda.get_device_name()}"
    report(title, run(QUICK if quick else None, device=device), as_json=as_json)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Kill a job with a large state, and time its recovery.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small, as a smoke test")
    parser.add_argument("--device", default="cuda", help="'cpu' where there is no other")
    given = parser.parse_args()
    main(as_json=given.json, quick=given.quick, device=given.device)
