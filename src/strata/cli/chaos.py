"""`strata chaos`: inject faults into a job of our own at intervals, and report whether it recovered."""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from strata.cli.common import console, print_json, print_table
from strata.cli.extras import need
from strata.errors import StrataError

if TYPE_CHECKING:
    from strata.chaos.report import ChaosReport, Verdict
    from strata.chaos.run import ChaosRun


def chaos(
    interval: Annotated[float, typer.Option(min=0.0, help="Seconds between two faults.")] = 15.0,
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds during which faults are injected.")
    ] = 60.0,
    rto_threshold: Annotated[
        float, typer.Option(min=0.1, help="The longest recovery allowed, in seconds.")
    ] = 30.0,
    single_kill: Annotated[
        bool, typer.Option("--single-kill", help="One SIGKILL, then run to the end.")
    ] = False,
    kinds: Annotated[
        str, typer.Option(help="Faults to choose from: kill, stop, agent, coordinator.")
    ] = "kill",
    kill_signal: Annotated[
        str, typer.Option(help="Signal that `kill` sends: SIGKILL, SIGTERM, SIGINT, SIGABRT, SIGSEGV …")
    ] = "SIGKILL",
    min_survivors: Annotated[
        int | None,
        typer.Option(min=0, help="Refuse to run if a fault could leave fewer workers unaffected. [no limit]"),
    ] = None,
    jitter: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Vary each interval at random: by this fraction of it if below 1 (0.2 is ±20 %), else by this many seconds.",
        ),
    ] = 0.0,
    verify_progress: Annotated[
        bool,
        typer.Option("--verify-progress", help="Also check that training progressed after every fault."),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 2,
    agents: Annotated[int, typer.Option(min=1, max=16, help="Agents, each simulating a machine.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed for the choice of faults and victims.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also train without faults and compare the loss.")
    ] = True,
    output: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Start a job, inject faults into it, and measure its recovery. Exit status 0: all checks passed."""
    chosen = _kinds("kill" if single_kill else kinds)
    if workers % agents:
        raise typer.BadParameter(f"{workers} workers cannot be divided among {agents} agents")
    hits = {"agent": workers // agents, "coordinator": 0}
    hit = max(hits.get(kind, 1) for kind in chosen)
    if min_survivors is not None and workers - hit < min_survivors:
        raise typer.BadParameter(
            f"a fault hits {hit} of {workers} workers, which leaves fewer than {min_survivors} unaffected"
        )
    wanted = _signal(kill_signal)
    need("torch", "omegaconf", feature="The job under test", extra="harness")

    def say(text: str) -> None:
        if not json:
            console.print(Text(text))

    jitter_s = jitter_seconds(jitter, interval)
    when = f"{'after' if single_kill else 'every'} {interval:g} s" + (
        f" ± {jitter_s:g} s" if jitter_s else ""
    )
    left = "" if hit < workers else ": none is left unaffected"
    say(f"a fault ({', '.join(chosen)}) {when} hits {hit} of {workers} workers{left}")
    with _interrupted_once(), tempfile.TemporaryDirectory(prefix="strata-chaos-") as folder:
        report = _run(
            Path(folder),
            chosen,
            workers=workers,
            agents=agents,
            seed=seed,
            interval_s=interval,
            duration_s=0.0 if single_kill else duration,
            jitter_s=jitter_s,
            kill_signal=wanted,
            threshold_s=rto_threshold,
            compare=compare,
            verify_progress=verify_progress,
            say=say,
        )
    if output is not None:
        output.write_text(jsonlib.dumps(report.to_json(), indent=2) + "\n")
    if json:
        print_json(report.to_json())
    else:
        rows = [
            (Text("pass", "green") if v.passed else Text("FAIL", "bold red"), v.name, v.found)
            for v in report.verdicts
        ]
        print_table(("", "CHECK", "FOUND"), rows, empty="")
    raise typer.Exit(0 if report.passed else 1)


def jitter_seconds(jitter: float, interval_s: float) -> float:
    """As a share of the interval it was known first; one of a whole interval or more nobody wants."""
    return jitter * interval_s if jitter < 1 else jitter


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """The first SIGINT or SIGTERM is a `KeyboardInterrupt`; what follows must not tear the clean-up, which is short."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def _end_children(kept: set[int]) -> None:
    """Of this process, but for those it had before: one that was being started when it was asked to stop is known to nobody."""
    import psutil

    from strata.launch.cleanup import is_tracker

    for child in psutil.Process().children(recursive=True):
        if child.pid not in kept and not is_tracker(child.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
                child.wait(10)


def _kinds(text: str) -> list[str]:
    from strata.chaos.run import FAULTS

    chosen = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in chosen if kind not in FAULTS]
    if unknown or not chosen:
        raise typer.BadParameter(f"'{text}' has unknown faults; choose from {', '.join(FAULTS)}")
    return chosen


def _signal(name: str) -> signal.Signals:
    from strata.chaos.run import DEADLY

    bare = name.upper().removeprefix("SIG")
    found = next((each for each in DEADLY if bare in (each.name.removeprefix("SIG"), str(int(each)))), None)
    if found is None:
        raise typer.BadParameter(
            f"'{name}' does not end a worker; use {', '.join(each.name for each in DEADLY)}"
        )
    return found


def _run(
    folder: Path,
    kinds: list[str],
    *,
    workers: int,
    agents: int,
    seed: int,
    interval_s: float,
    duration_s: float,
    jitter_s: float,
    kill_signal: signal.Signals,
    threshold_s: float,
    compare: bool,
    verify_progress: bool,
    say: Callable[[str], None],
) -> ChaosReport:
    from strata.chaos.report import (
        ChaosReport,
        judge_checkpoints,
        judge_ledger,
        judge_progress,
        judge_recoveries,
    )
    from strata.chaos.run import ChaosRun, Fault
    from strata.launch.coordinator import CoordinatorProcess
    from strata.launch.sample_job import DATASET, SampleJob

    coordinator = CoordinatorProcess(folder / "coordinator")
    job = SampleJob(
        folder=folder,
        name=f"chaos-{os.getpid()}",
        workers=workers,
        agents=agents,
        steps=10_000_000,
        hang_timeout_s=10.0 if "stop" in kinds else 0.0,
    )
    run = ChaosRun(job, coordinator, seed=seed, kill_signal=kill_signal, tell=say)
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        stack.callback(_end_children, _children())
        stack.callback(coordinator.stop)
        stack.callback(run.close)
        coordinator.start()
        run.start()
        began_s = time.monotonic()
        while True:
            run.train_for(max(0.0, interval_s + chance.uniform(-jitter_s, jitter_s)))
            run.inject(cast("list[Fault]", kinds), patience_s=max(60.0, 3 * threshold_s))
            if time.monotonic() - began_s >= duration_s:
                break
        run.train_for(min(interval_s, 5.0))
        steps, elapsed_s = run.step, time.monotonic() - began_s
        for agent in run.agents:
            agent.stop()
        if not run.injuries:
            raise StrataError("No fault was injected.", hint="Use a longer --duration.")
        verdicts = [
            judge_recoveries(tuple(run.injuries), threshold_s),
            judge_ledger(job.checkpoints, DATASET),
            judge_checkpoints(job.checkpoints),
        ]
        if verify_progress:
            verdicts.append(judge_progress(tuple(run.injuries), steps))
        if compare:
            verdicts.append(_compare(run, folder, say))
        return ChaosReport(
            injuries=tuple(run.injuries), verdicts=tuple(verdicts), steps=steps, duration_s=elapsed_s
        )


def _compare(run: ChaosRun, folder: Path, say: Callable[[str], None]) -> Verdict:
    """Train the same steps again undisturbed, and evaluate both models on the same text."""
    from dataclasses import replace

    from strata.chaos.report import judge_loss, loss_of
    from strata.chaos.run import ChaosRun
    from strata.checkpoint.manager import CheckpointManager

    with CheckpointManager(run.job.checkpoints) as manager:
        latest = manager.get_latest()
    assert latest is not None
    say(f"training {latest.step} steps again without faults, to compare")
    undisturbed_job = replace(run.job, name=f"{run.job.name}-undisturbed", steps=latest.step)
    undisturbed = ChaosRun(undisturbed_job, run.coordinator)
    try:
        undisturbed.start()
        undisturbed.wait(600.0)
    finally:
        undisturbed.close()
    return judge_loss(loss_of(run.job), loss_of(undisturbed_job))
