"""`strata demo`: a real small training on this machine, to watch. It loses a worker on the way, and recovers.

Everything is real: the coordinator, the worker processes under torchrun, the text (this Python's own standard
library), the SIGKILL. Nothing is left behind: the demonstration works in a temporary folder and ends what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from strata.cli.common import ago, console, duration, get, size, styled
from strata.errors import StrataError

JOB = "demo"
TEXT_BYTES = 400_000
START_S = 90.0
REFRESH_S = 0.5

CONFIG = """\
model: {{n_layer: 2, n_head: 4, n_embd: 96, seq_length: 96}}
training: {{lr: 1.0e-3, batch_size: 8, max_steps: {steps}, warmup_steps: 20, device: cpu, backend: gloo, log_interval: 5}}
data: {{files: [{text}], index_file: {index}, tokenizer: bytes}}
checkpoint: {{nvme_path: {checkpoints}, checkpoint_interval: 50, memory_snapshot_interval: 10, keep_last_n: 100000}}
scaling: {{strategy: constant_batch, target_global_batch_size: 16, base_world_size: {workers}}}
elastic: {{min_nodes: 1, max_nodes: {workers}, nproc_per_node: {workers}, job_id: {job}}}
"""


class DemoFailed(StrataError):
    code = "demo_failed"


def demo(
    once: Annotated[
        bool, typer.Option("--once", help="A bounded run: train, lose a worker, recover, end.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes.")] = 2,
    steps: Annotated[int, typer.Option(min=100, help="Steps of a bounded run.")] = 400,
    kill_every: Annotated[
        float, typer.Option(min=10, help="Without --once: seconds between two killed workers.")
    ] = 60.0,
) -> None:
    """Train a small language model with real workers, kill one of them, and watch it recover."""
    with tempfile.TemporaryDirectory(prefix="strata-demo-") as folder, contextlib.ExitStack() as stack:
        demonstration = Demonstration(Path(folder), workers=workers, steps=steps if once else 1_000_000)
        stack.callback(demonstration.stop)
        demonstration.start_coordinator()
        console.print(
            Text.assemble("Coordinator: ", (demonstration.api, "bold cyan"), " (API and dashboard)")
        )
        demonstration.start_training()
        try:
            demonstration.watch(kill_every_s=None if once else kill_every)
        except KeyboardInterrupt:
            console.print(Text("\nStopping: the workers make a final checkpoint …", style="bold"))
            demonstration.stop_training()
        demonstration.summarize()


@dataclass
class Demonstration:
    folder: Path
    workers: int
    steps: int
    api: str = ""
    notes: list[str] = field(default_factory=list)
    _coordinator: subprocess.Popen[bytes] | None = None
    _training: subprocess.Popen[bytes] | None = None

    # --- starting and stopping ------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        data_dir = self.folder / "coordinator"
        ports = ["--grpc-port", _free_or_any(50051), "--http-port", _free_or_any(3000)]
        command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(data_dir), *ports]
        self._coordinator = self._start(command, "coordinator.log", env={"STRATA_TOKEN": ""})
        serving = data_dir / "serving.json"
        self._wait_for(serving.exists, "the coordinator", self._coordinator, "coordinator.log")
        address = json.loads(serving.read_text())
        self.api = f"http://localhost:{address['http']}"
        self._grpc = f"127.0.0.1:{address['grpc']}"

    def start_training(self) -> None:
        text, index = self.folder / "text.txt", self.folder / "text.index"
        text.write_bytes(b"".join(_standard_library(TEXT_BYTES)))
        builder = [sys.executable, "-m", "elastic_harness.data.index_builder", str(text), "-o", str(index)]
        subprocess.run(builder, check=True, stdout=subprocess.DEVNULL)
        config = self.folder / "config.yaml"
        config.write_text(
            CONFIG.format(
                steps=self.steps,
                text=text,
                index=index,
                checkpoints=self.checkpoints,
                workers=self.workers,
                job=JOB,
            )
        )
        from strata.rendezvous import TORCHRUN_ENVIRONMENT, rdzv_conf

        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1", f"--nproc-per-node={self.workers}", "--max-restarts=1000"),
            *("--rdzv-backend=strata", f"--rdzv-endpoint={self._grpc}", f"--rdzv-id={JOB}"),
            *(f"--rdzv-conf={rdzv_conf()}", "--local-addr=127.0.0.1", "--monitor-interval=0.1"),
            *("-m", "elastic_harness.train", "--config", str(config)),
        ]
        environment = {
            **TORCHRUN_ENVIRONMENT,
            "COORDINATOR_ADDR": self._grpc,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self._training = self._start(command, "training.log", env=environment)

    def stop_training(self) -> None:
        """SIGTERM, as a preempted machine would get it: the workers save and leave."""
        _end(self._training, signal.SIGTERM, patience_s=40.0)

    def stop(self) -> None:
        _end(self._training, signal.SIGTERM, patience_s=40.0)
        _end(self._coordinator, signal.SIGTERM, patience_s=10.0)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    # --- watching -------------------------------------------------------------------------------------------

    def watch(self, *, kill_every_s: float | None) -> None:
        """Until training ends. Kills a worker in the middle of a bounded run, and every so often otherwise."""
        assert self._training is not None
        kill_step = self.steps // 2 if kill_every_s is None else None
        next_kill_s = time.monotonic() + (kill_every_s or 0.0)
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            while self._training.poll() is None:
                state = get(self.api, "/api/dashboard")
                step = max((w["current_step"] for w in state["workers"]), default=0)
                if kill_step is not None and step >= kill_step and self._kill_one(state):
                    kill_step = None
                if kill_every_s is not None and time.monotonic() > next_kill_s and self._kill_one(state):
                    next_kill_s = time.monotonic() + kill_every_s
                live.update(self._picture(state))
                time.sleep(REFRESH_S)
        if self._training.returncode:
            raise DemoFailed(
                f"Training ended with status {self._training.returncode}:\n{self._tail('training.log')}",
                hint="This is a bug; the lines above say where.",
            )

    def _kill_one(self, state: dict[str, Any]) -> bool:
        """SIGKILL for the worker of the highest rank: one of our own, by its process id."""
        busy = ("training", "checkpointing")
        training = [w for w in state["workers"] if w["status"] in busy and "pid" in w["metadata"]]
        if len(training) < self.workers:
            return False
        victim = max(training, key=lambda w: w["rank"] or 0)
        pid = int(victim["metadata"]["pid"])
        self._note(f"killing {victim['id']} (process {pid}) with SIGKILL at step {victim['current_step']}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def _note(self, text: str) -> None:
        self.notes.append(text)
        console.print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), (text, "bold yellow")))

    def _picture(self, state: dict[str, Any]) -> Group:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("WORKER", "STATUS", "STEP", "LOSS", "TOKENS/S", "HEARD"):
            table.add_column(name, justify="left" if name in ("WORKER", "STATUS") else "right")
        for w in sorted(state["workers"], key=lambda w: str(w["id"])):
            m = w["metrics"]
            table.add_row(
                Text(w["id"]),
                styled(w["status"]),
                f"{w['current_step']:,}",
                f"{m['loss']:.3f}" if "loss" in m else "-",
                f"{m['tokens_per_second']:,.0f}" if "tokens_per_second" in m else "-",
                ago(w["last_heartbeat"]),
            )
        safe = [c for c in state["checkpoints"] if c["status"] == "completed"]
        last = (
            f"last safe on disk: step {safe[0]['step']}, {ago(safe[0]['completed_at'])}"
            if safe
            else "no checkpoint yet"
        )
        return Group(table, Text(last, style="dim"))

    # --- the end --------------------------------------------------------------------------------------------

    def summarize(self) -> None:
        from strata.checkpoint.manager import CheckpointManager
        from strata.data.history import audit_epochs

        with CheckpointManager(self.checkpoints) as manager:
            found = manager.all_checkpoints()
            for info in found:
                manager.load(checkpoint_id=info.checkpoint_id)  # Verifies every byte, or raises.
        reports = audit_epochs(self.checkpoints, "text")
        recoveries = get(self.api, "/api/recoveries")
        console.print(Text("\nWhat was proved", style="bold"))
        _fact("trained", f"{max(info.step for info in found):,} steps on {self.workers} workers")
        for r in reversed(recoveries):
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in r["phases_s"].items())
            _fact(
                "recovered",
                f"in {duration(r['total_s'])} ({phases} s) from {r['tier']}, {r['lost_steps']} steps lost",
            )
        for report in reports:
            _fact("samples", f"epoch {report.epoch}: {report.reason}")
        total = sum(info.size_bytes for info in found)
        _fact("checkpoints", f"{len(found)} on disk, {size(total)}, every byte verified")
        if not all(report.clean for report in reports):
            raise DemoFailed("The ledger is not exact.", hint="This is a bug.")

    # --- inside ---------------------------------------------------------------------------------------------

    def _start(self, command: list[str], log: str, *, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self.folder / log, "wb") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is ours to pass on, in order.
            )

    def _wait_for(self, ready: Any, what: str, process: subprocess.Popen[bytes], log: str) -> None:
        deadline_s = time.monotonic() + START_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DemoFailed(f"{what} did not start:\n{self._tail(log)}")
            time.sleep(0.05)

    def _tail(self, log: str) -> str:
        lines = (self.folder / log).read_text(errors="replace").splitlines()
        return "\n".join(lines[-30:])


def _fact(name: str, text: str) -> None:
    console.print(Text.assemble((f"  {name:12}", "green"), text), soft_wrap=True)


def _free_or_any(port: int) -> str:
    """The well-known port where it is free, else any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return "0"
    return str(port)


def _standard_library(limit_bytes: int) -> Iterator[bytes]:
    """Real text that every machine with Python has."""
    taken = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        body = path.read_bytes()[: limit_bytes - taken]
        try:
            body.decode()
        except UnicodeDecodeError:
            continue
        taken += len(body)
        yield body
        if taken >= limit_bytes:
            return


def _end(process: subprocess.Popen[bytes] | None, number: signal.Signals, *, patience_s: float) -> None:
    """A signal, some patience, then SIGKILL for the whole session, so that nothing is left."""
    if process is None or process.poll() is not None:
        return
    process.send_signal(number)
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
