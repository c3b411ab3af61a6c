"""How quickly a job is back, and what the harness costs when nothing goes wrong.

A small real job (`strata.launch.sample_job`) is killed repeatedly. Peers in the same run: the same model and data
in a plain DDP loop that saves with `torch.save`, under torchrun as it is and with its rendezvous tuned. torchft and
Ray Train are measured from a checkout: `benchmarks/recovery.py`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from strata.agent.trace import clear_run, footprints
from strata.api import get
from strata.bench.recovery import in_process
from strata.bench.recovery.kills import kill_worker
from strata.bench.table import Row, report
from strata.chaos.run import ChaosRun
from strata.launch.coordinator import CoordinatorProcess
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import Agent, TorchrunSpec

PATIENCE_S = 180.0


def run(*, quick: bool = False) -> Iterator[Row]:
    kills, peace_s = (3, 3.0) if quick else (15, 4.0)
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as name:
        folder = Path(name)
        coordinator = CoordinatorProcess(folder / "coordinator").start()
        try:
            yield from _crashes(folder, coordinator, kills, peace_s)
            yield from in_process.run(quick=quick)
            yield from _lost_agent(folder, coordinator, 1 if quick else 6, peace_s)
            if not quick:
                yield from _kill_a_minute(folder, coordinator)
            yield from plain_torchrun(folder, 1 if quick else 4)
            yield from _overhead(4 if quick else 30)
        finally:
            coordinator.stop()


def _crashes(folder: Path, coordinator: CoordinatorProcess, kills: int, peace_s: float) -> Iterator[Row]:
    job = SampleJob(folder=folder, name=f"crash-{os.getpid()}", steps=10_000_000)
    with _running(job, coordinator) as run:
        times, lost = [], []
        for _ in range(kills):
            run.train_for(peace_s)
            injury = run.inject(["kill"], patience_s=PATIENCE_S)
            if injury.recovery_s is not None:
                times.append(injury.recovery_s)
        found = [r for r in get(coordinator.api, "/api/recoveries") if r["job_id"] == job.name]
        lost = [int(r["lost_steps"]) for r in found]
        phases = {
            p: statistics.median(r["phases_s"].get(p, 0.0) for r in found)
            for p in ("detect", "rendezvous", "spawn", "load", "first_step")
        }
    note = "median by phase: " + ", ".join(f"{p} {s:.2f} s" for p, s in phases.items())
    yield Row(
        name="process crash → next new step, p50",
        measured=statistics.median(times),
        unit="s",
        target=4.0,
        better="lower",
        note=f"{len(times)} kills, {min(times):.2f} to {max(times):.2f} s; {note}",
    )
    yield Row(
        name="process crash → next new step, p99",
        measured=max(times),
        unit="s",
        target=8.0,
        better="lower",
        note=f"the worst of {len(times)}",
    )
    yield Row(
        name="steps lost in a crash, worst",
        measured=float(max(lost)),
        unit="steps",
        target=float(job.snapshot_every),
        better="lower",
        note=f"a snapshot every {job.snapshot_every} steps",
    )


def _lost_agent(folder: Path, coordinator: CoordinatorProcess, losses: int, peace_s: float) -> Iterator[Row]:
    job = SampleJob(folder=folder, name=f"agents-{os.getpid()}", agents=2, steps=10_000_000)
    with _running(job, coordinator) as run:
        times, ratios = [], []
        _until_world(run, 2)
        for _ in range(losses):
            full = _rate(run, 2 * peace_s)
            injury = run.inject(["agent"], patience_s=PATIENCE_S)  # The agent is started again afterwards.
            if injury.recovery_s is not None:
                times.append(injury.recovery_s)
            _until_world(run, 2)
            ratios.append(_rate(run, 2 * peace_s) / full)
    yield Row(
        name="lost agent → next new step, p50",
        measured=statistics.median(times),
        unit="s",
        target=1.5,
        better="lower",
        note=f"{len(times)} of two agents killed with their workers, {min(times):.2f} to {max(times):.2f} s",
    )
    yield Row(
        name="throughput after 2→1→2 workers, beside before",
        measured=100 * statistics.median(ratios),
        unit="%",
        target=95.0,
        note=f"{min(ratios):.0%} to {max(ratios):.0%}",
    )


def _kill_a_minute(folder: Path, coordinator: CoordinatorProcess) -> Iterator[Row]:
    job = SampleJob(folder=folder, name=f"minute-{os.getpid()}", steps=10_000_000)
    with _running(job, coordinator) as run:
        _rate(run, 10.0)
        before, began_s, calm = run.step, time.monotonic(), []
        for minute in (1, 2, 3):
            calm.append(_rate(run, 30.0))
            run.inject(["kill"], patience_s=PATIENCE_S)
            calm.append(_rate(run, began_s + 60.0 * minute - time.monotonic() - 1.0))
        made, elapsed_s, rate = run.step - before, time.monotonic() - began_s, statistics.median(calm)
    yield Row(
        name="effective training time, one kill a minute",
        measured=100 * made / (rate * elapsed_s),
        unit="%",
        target=95.0,
        note=f"{made} steps in {elapsed_s:.0f} s with 3 kills; between them {rate:.1f} steps/s",
    )


def plain_torchrun(folder: Path, kills: int) -> Iterator[Row]:
    """What the same crash costs without us: a plain loop, `torch.save` every 10 steps."""
    defaults = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3, "last_call_timeout": 30}
    for label, conf in (("torchrun as it is", defaults), ("torchrun, tuned rendezvous", {})):
        name = f"plain-{os.getpid()}-{len(conf)}"
        checkpoint = folder / f"{name}.pt"
        spec = TorchrunSpec(
            run_id=name,
            arguments=["-m", "strata.bench.recovery.plain_loop", str(checkpoint), name],
            nproc=2,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_conf=conf,
            warm=False,
            agent="torch.distributed.run",
        )
        agent = Agent(spec, log=folder / f"{name}.log")
        try:
            found = [kill_worker(agent, name, peace_s=3.0, patience_s=PATIENCE_S) for _ in range(kills)]
            times = [seconds for seconds in found if seconds is not None]
        finally:
            agent.kill()
            clear_run(name)
        if times:
            yield Row(
                name=f"peer: {label}, crash → next new step",
                measured=statistics.median(times),
                unit="s",
                note=f"{len(times)} kills of one of two workers on one node",
            )


def _overhead(pairs: int) -> Iterator[Row]:
    from strata.bench.recovery.plain_loop import compare_overhead

    found = compare_overhead(pairs)
    wall, error = found.wall_percent
    yield Row(
        name="harness overhead of a step",
        measured=found.loop_percent + found.background_percent,
        unit="%",
        target=1.0,
        better="lower",
        note=f"a step of {found.step_s * 1e3:.0f} ms, a snapshot every 50: {found.loop_percent:.2f} % in the loop's own "
        f"thread, {found.background_percent:.2f} % in others; by whole steps {wall:+.1f} ± {error:.1f} % over {pairs} pairs",
    )


@contextlib.contextmanager
def _running(job: SampleJob, coordinator: CoordinatorProcess) -> Iterator[ChaosRun]:
    run = ChaosRun(job, coordinator)
    try:
        run.start()
        yield run
    finally:
        run.close()


def _rate(run: ChaosRun, seconds: float) -> float:
    """Steps per second over a while, after a moment to settle."""
    time.sleep(1.0)
    before, began_s = run.step, time.monotonic()
    time.sleep(seconds)
    return max(1e-9, (run.step - before) / (time.monotonic() - began_s))


def _until_world(run: ChaosRun, workers: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        newest = max(footprints(run.job.name), key=lambda f: f.mono_s, default=None)
        if newest is not None and newest.world_size == workers:
            return
        time.sleep(0.02)


def main(*, as_json: bool = False, quick: bool = False) -> None:
    report("Recovery", run(quick=quick), as_json=as_json)
