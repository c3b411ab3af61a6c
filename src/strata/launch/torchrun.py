"""Torchrun agents of our own: started with the settings that make restarts clean and quick, ended without a trace.

An agent stands for a machine: it runs `nproc` workers and starts them anew when one is lost. It has a session of its
own, so a Ctrl-C in the terminal reaches it only through us, and ending it ends everything below it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from strata.agent import PRELOAD_VARIABLE
from strata.launch.cleanup import is_tracker
from strata.launch.inherited import inherited
from strata.rendezvous import LOOPBACK, LOOPBACK_ONLY, TORCHRUN_ENVIRONMENT, rdzv_conf

LEAVE_S = 40.0
"""A worker has 25 s for its final checkpoint, torchrun 30 s for its workers."""
EXIT_TIMEOUT_S = 10.0
"""Processes that were killed have exited long before."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunSpec:
    """How one job's agents are launched."""

    run_id: str
    arguments: Sequence[str]
    """A script with its arguments, or `-m module` with its own."""
    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    rdzv_backend: str = "strata"
    rdzv_endpoint: str = "127.0.0.1:50051"
    """Empty, with the back end `strata`: this machine alone, which has no others to meet."""
    rdzv_conf: Mapping[str, object] = field(default_factory=dict)
    local_addr: str | None = LOOPBACK
    """Where other agents reach this one. None: the name of the machine it runs on."""
    max_restarts: int = 1000
    spares: int = 0
    """Processes that stand by on each machine for workers that are lost (`strata.recoverable`)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited: Sequence[str] = ("*",)
    """Of this process's environment, what agents get beside the usual (`strata.launch.inherited`)."""
    warm: bool = True
    """Workers are forked with torch in place; without it, each is a process that starts from nothing."""
    agent: str = "strata.launch.agent"
    """The module that is run: ours, or torch's own, `torch.distributed.run`."""

    def command(self, *, log_dir: Path | None = None, python: str | None = None) -> list[str]:
        """Without `log_dir` torchrun makes a temporary folder, and leaves it behind when it is killed. With `python`,
        another machine's, workers are not warm: a scheduler there may signal each of them by itself."""
        is_warm = self.warm and python is None
        nodes = (
            str(self.min_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"
        )
        return [
            *(python or sys.executable, "-m", self.agent),
            *(f"--nnodes={nodes}", f"--nproc-per-node={self.nproc}", f"--max-restarts={self.max_restarts}"),
            f"--rdzv-backend={self.rdzv_backend}",
            f"--rdzv-endpoint={self.rdzv_endpoint}",  # An empty one too: it wins over RDZV_ENDPOINT.
            *(f"--rdzv-id={self.run_id}", f"--rdzv-conf={rdzv_conf(self.rdzv_conf)}"),
            *([f"--local-addr={self.local_addr}"] if self.local_addr is not None else []),
            "--monitor-interval=0.1",
            *([f"--spares={self.spares}"] if self.spares else []),  # Torch's own agent does not know it.
            *([f"--log-dir={log_dir}"] if log_dir is not None else []),
            *([] if is_warm else ["--start-method=spawn"]),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        on_this_host = LOOPBACK_ONLY if self.local_addr == LOOPBACK else {}
        defaults = {**TORCHRUN_ENVIRONMENT, **on_this_host, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if self.arguments[0] == "-m":
            defaults[PRELOAD_VARIABLE] = self.arguments[1]
        return {**inherited(os.environ, self.inherited), **defaults, **self.environment}


class Agent:
    """One running torchrun agent and its workers."""

    def __init__(self, spec: TorchrunSpec, *, log: Path) -> None:
        self.spec = spec
        self.log = log
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                spec.command(log_dir=log.with_suffix(".torchrun")),
                env=spec.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def workers(self) -> list[int]:
        """Process ids of the workers that live now, oldest first."""
        alive = []
        for child in _living_children(self.process.pid):
            if "multiprocessing.forkserver" in _command(child):
                alive += _living_children(child.pid)
            elif not is_tracker(child.pid):
                alive.append(child)
        return [child.pid for child in sorted(alive, key=lambda c: c.create_time())]

    def stop(self, *, patience_s: float = LEAVE_S) -> int:
        """SIGTERM, as a preempted machine would get it: workers save and leave. Nothing is left after it."""
        if self.is_running:
            self.process.send_signal(signal.SIGTERM)
            try:
                return self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                pass
        return self.kill()

    def kill(self) -> int:
        """SIGKILL for the agent and everything it started: a machine that is lost.

        All but Python's resource tracker, which removes the semaphores of the dead and then ends by itself.
        """
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        # Until none is left: the fork server may have been about to fork another.
        while left := [p for p in (*below, *_group(self.process.pid)) if _is_to_end(p)]:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        return self.process.wait(EXIT_TIMEOUT_S)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _living_children(pid: int) -> list[psutil.Process]:
    try:
        return [c for c in psutil.Process(pid).children() if c.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def _is_to_end(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return alive and not is_tracker(process.pid)
    return False


def _group(leader: int) -> list[psutil.Process]:
    """The processes of a group, whose leader may have exited."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
