"""`strata demo`: a real small training on this machine, to watch. It loses a worker on the way, and recovers.

Everything is real: the coordinator, the worker processes under torchrun, the text (this Python's own standard
library), the SIGKILL. Nothing is left behind: the demonstration works in a temporary folder and ends what it started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from strata.agent.trace import last_footprint
from strata.cli.common import ago, console, duration, get, size, styled
from strata.cli.extras import need
from strata.core.text import counted
from strata.errors import StrataError
from strata.launch.coordinator import CoordinatorProcess, free_or_any
from strata.launch.protocol import LaunchFailed
from strata.launch.sample_job import DATASET, SampleJob
from strata.launch.torchrun import Agent

REFRESH_S = 0.5
LOOK_S = 0.05
LONGEST_FOLDER = 70
"""In characters: the address of a socket below it has 107 at most."""


class DemoFailed(StrataError):
    code = "demo_failed"


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="A bounded run: train, lose a worker, recover, finish.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 2,
    steps: Annotated[int, typer.Option(min=100, help="Steps of a bounded run.")] = 400,
    kill_every: Annotated[
        float, typer.Option(min=10, help="Without --once: seconds between two kills.")
    ] = 60.0,
) -> None:
    """Train a small language model with real workers, kill one of them, and watch it recover."""
    from strata.shared_memory import forget_jobs

    need("torch", "omegaconf", feature="The demonstration", extra="harness")
    with tempfile.TemporaryDirectory(prefix="strata-demo-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        coordinator = CoordinatorProcess(
            folder / "coordinator", grpc_port=free_or_any(50051), http_port=free_or_any(3000)
        )
        stack.callback(coordinator.stop)
        try:
            coordinator.start()
        except LaunchFailed:  # Such as where another program has taken a port since it was looked at.
            coordinator.grpc_port = coordinator.http_port = 0
            coordinator.start()
        console.print(Text.assemble("Coordinator: ", (coordinator.api, "bold cyan"), " (API and dashboard)"))
        job = SampleJob(
            folder=folder, name=f"demo-{os.getpid()}", workers=workers, steps=steps if once else 1_000_000
        )
        job.prepare()
        spec = job.torchrun(
            rdzv_backend="strata", rdzv_endpoint=coordinator.address, coordinator=coordinator.address
        )
        if len(name) < LONGEST_FOLDER:
            # What a process that is killed leaves in its place for temporary files goes with ours.
            spec = replace(spec, environment={**spec.environment, "TMPDIR": name})
        stack.callback(forget_jobs, job.name)
        agent = Agent(spec, log=folder / "training.log")
        stack.callback(agent.stop)
        demonstration = Demonstration(job, agent, coordinator.api)
        try:
            demonstration.watch(kill_every_s=None if once else kill_every)
        except KeyboardInterrupt:
            console.print(Text("\nStopping: the workers save a final checkpoint …", style="bold"))
            agent.stop()
        demonstration.summarize()


@dataclass
class Demonstration:
    job: SampleJob
    agent: Agent
    api: str
    killed: int = 0
    killed_mono_s: float = 0.0

    def watch(self, *, kill_every_s: float | None) -> None:
        """Until training ends. Kills a worker in the middle of a bounded run, and every so often otherwise."""
        kill_step = self.job.steps // 2 if kill_every_s is None else None
        next_kill_s = time.monotonic() + (kill_every_s or 0.0)
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            refresh_s = 0.0
            while self.agent.is_running:
                if time.monotonic() >= refresh_s:
                    live.update(_picture(get(self.api, "/api/dashboard")))
                    refresh_s = time.monotonic() + REFRESH_S
                if kill_step is not None and self._kill_one(from_step=kill_step):
                    kill_step = None
                if kill_every_s is not None and time.monotonic() > next_kill_s and self._kill_one():
                    next_kill_s = time.monotonic() + kill_every_s
                time.sleep(LOOK_S)
        if self.agent.process.returncode:
            raise DemoFailed(
                f"Training ended with status {self.agent.process.returncode}:\n{self.agent.tail()}",
                hint="This is a bug; the lines above say where.",
            )

    def _kill_one(self, *, from_step: int = 1) -> bool:
        """SIGKILL for the worker of the highest rank, the youngest of our own; whether there was one that trains.

        The step is the workers' own: what they have reported to the coordinator is up to a second old.
        """
        last = last_footprint(self.job.name)
        if last is None or last.step < from_step or last.born_mono_s <= self.killed_mono_s:
            return False
        workers = self.agent.workers()
        if len(workers) < self.job.workers:
            return False
        try:
            os.kill(workers[-1], signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed += 1
        self.killed_mono_s = time.monotonic()
        who = f"{self.job.name}-rank{len(workers) - 1} (process {workers[-1]})"
        text = f"killing {who} with SIGKILL at step {last.step}"
        console.print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), (text, "bold yellow")))
        return True

    def summarize(self) -> None:
        from strata.agent.trace import PHASES
        from strata.checkpoint.verify import verify_store
        from strata.data.history import audit_epochs
        from strata.stores import open_store

        found = list(verify_store(open_store(self.job.checkpoints)))
        if not found:
            raise DemoFailed(
                "Training was stopped before its first checkpoint.", hint="Let it run a little longer."
            )
        reports = audit_epochs(self.job.checkpoints, DATASET)
        recoveries = [r for r in get(self.api, "/api/recoveries") if r["job_id"] == self.job.name]
        console.print(Text("\nVerified", style="bold"))
        _fact("trained", f"{max(v.step or 0 for v in found):,} steps on {self.job.workers} workers")
        for r in reversed(recoveries):
            phases = ", ".join(f"{p} {r['phases_s'][p]:.2f}" for p in PHASES if p in r["phases_s"])
            lost = f"{counted(r['lost_steps'], 'step')} lost"
            _fact("recovered", f"in {duration(r['total_s'])} ({phases} s) from {r['tier']}, {lost}")
        for report in reports:
            _fact("samples", f"epoch {report.epoch}: {report.reason}")
        total = sum(v.size_bytes for v in found)
        _fact("checkpoints", f"{len(found)} on disk, {size(total)}, every byte verified")
        damaged = [str(damage) for v in found for damage in v.damages]
        if damaged:
            raise DemoFailed(f"Checkpoints are damaged: {'; '.join(damaged)}", hint="This is a bug.")
        if not all(report.clean for report in reports):
            raise DemoFailed("The ledger is not exact.", hint="This is a bug.")
        if len(recoveries) < self.killed:
            raise DemoFailed(f"{self.killed} workers were killed, {len(recoveries)} recoveries recorded.")


def _picture(state: dict[str, Any]) -> Group:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("WORKER", "STATUS", "STEP", "LOSS", "TOKENS/S", "HEARTBEAT"):
        table.add_column(name, justify="left" if name in ("WORKER", "STATUS") else "right")
    for w in sorted(state["workers"], key=lambda w: str(w["id"])):
        metrics = w["metrics"]
        table.add_row(
            Text(w["id"]),
            styled(w["status"]),
            f"{w['current_step']:,}",
            f"{metrics['loss']:.3f}" if "loss" in metrics else "-",
            f"{metrics['tokens_per_second']:,.0f}" if "tokens_per_second" in metrics else "-",
            ago(w["last_heartbeat"]),
        )
    safe = [c for c in state["checkpoints"] if c["status"] == "completed"]
    if not safe:
        return Group(table, Text("no checkpoint on disk yet", style="dim"))
    last = f"last checkpoint on disk: step {safe[0]['step']}, {ago(safe[0]['completed_at'])}"
    return Group(table, Text(last, style="dim"))


def _fact(name: str, text: str) -> None:
    console.print(Text.assemble((f"  {name:12}", "green"), text), soft_wrap=True)
