"""One torchrun agent on one node of a Ray cluster, kept the same way as on a single machine.

The actor writes the task's configuration to its node, starts the supervisor of `strata.launch.supervisor`, follows its output and
says how it ended. Supervisor, agent and workers end with the actor's process, so a node that Ray gives up holds nothing back.
Started again, here or elsewhere, it is a new agent that joins the others. A coordinator that asks names the term in which it leads:
once a later one has asked, earlier ones are refused. Secrets of the task are hidden here, where they are known whichever leads.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ray

from strata.core.messages import ExitCause
from strata.files import write_file
from strata.launch.cleanup import RUN_VARIABLE, end_processes
from strata.launch.concealer import Concealer
from strata.launch.output import OutputReader, Position
from strata.launch.ray.messages import AgentPlan, AgentReport, Superseded
from strata.launch.torchrun import TorchrunSpec
from strata.processes import end_with_parent
from strata.shared_memory import forget_jobs

PIECE_BYTES = 1 << 20
LOOK_EVERY_S = 0.05


@ray.remote
class RayAgent:
    """All methods may be called at the same time as `take`, which waits for news."""

    def __init__(self, agent: AgentPlan) -> None:
        self._agent = agent
        self._term = 0
        self._conceal = Concealer(agent.plan.secrets)
        self._incarnation = secrets.token_hex(4)
        self._node: str = ray.util.get_node_ip_address()
        self._mark = f"{agent.plan.run_id}#{agent.index}-{self._incarnation}"
        self._folder = Path(tempfile.mkdtemp(prefix="strata-agent-"))
        self._reader = OutputReader(self._folder, Position())
        self._reading = threading.Lock()
        self._report = AgentReport(incarnation=self._incarnation, node=self._node)
        agent.plan.task_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path, content in agent.files.items():
            _carry(Path(path), content)
        spec = torchrun_spec(agent, local_addr=self._node)
        self._supervisor = subprocess.Popen(
            [
                *(sys.executable, "-m", "strata.launch.supervisor", str(self._folder)),
                *spec.command(log_dir=self._folder / "torchrun"),
            ],
            env={**spec.variables(), RUN_VARIABLE: self._mark},
            cwd=agent.plan.working_dir or agent.plan.task_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )

    def where(self) -> str:
        return self._node

    def plan(self) -> AgentPlan:
        return self._agent

    def take(self, wait_s: float, received: str, term: int = 0) -> AgentReport:
        """What is new; without news, after `wait_s`. `received` names the report that arrived last: if another one did
        not, it is given again, also to a new driver."""
        deadline_s = time.monotonic() + wait_s
        self._check(term)
        with self._reading:
            while self._report.name in ("", received):
                self._check(term)
                ended = self._supervisor.poll() is not None  # Before reading: then nothing can come after it.
                piece = self._reader.read(PIECE_BYTES)
                over = ended and not piece.lines
                if piece.lines or piece.missed or over:
                    self._report = replace(
                        self._report,
                        name=secrets.token_hex(4),
                        lines=tuple(replace(line, text=self._conceal(line.text)) for line in piece.lines),
                        dropped=piece.missed,
                        ended=over,
                        cause=self._cause() if over else None,
                    )
                elif time.monotonic() > deadline_s:
                    return replace(self._report, name=received, lines=(), dropped=0)
                else:
                    time.sleep(LOOK_EVERY_S)
            return self._report

    def stop(self, patience_s: float, term: int = 0) -> None:
        """SIGTERM for the agent, so that its workers save and leave; SIGKILL for what is left."""
        self._check(term)
        if self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGTERM)
        try:
            self._supervisor.wait(patience_s)
        except subprocess.TimeoutExpired:
            # The supervisor writes down how it ended.
            end_processes(self._mark, spare=(self._supervisor.pid,))

    def clear(self, snapshots: bool, term: int = 0) -> None:
        """Nothing of this agent is left on its node afterwards; of the task, only snapshots that it may continue from."""
        self._check(term)
        self._kill()
        if snapshots:
            forget_jobs(self._agent.plan.task_id, self._agent.plan.run_id)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self, term: int) -> None:
        if term < self._term:
            raise Superseded(term, self._term)
        self._term = term

    def _kill(self) -> None:
        end_processes(self._mark)
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(5)

    def _cause(self) -> ExitCause | None:
        try:
            cause = json.loads((self._folder / "ended.json").read_text())["cause"]
            return self._conceal.in_cause(ExitCause(**cause)) if cause is not None else None
        except (OSError, ValueError, KeyError, TypeError):
            return ExitCause(kind="lost", message=f"the agent on {self._node} ended without a reason")


def torchrun_spec(agent: AgentPlan, *, local_addr: str) -> TorchrunSpec:
    plan = agent.plan
    return TorchrunSpec(
        run_id=plan.run_id,
        arguments=["-m", "strata.launch.entry", *plan.arguments],
        nproc=agent.nproc,
        min_nodes=1,
        max_nodes=agent.agents,
        rdzv_backend="strata",
        # Without https://: the environment asks for TLS.
        rdzv_endpoint=",".join(each.rpartition("/")[2] for each in plan.coordinator.split(",")),
        local_addr=local_addr,
        max_restarts=plan.max_restarts,
        spares=plan.spares,
        warm=plan.warm,
        inherited=plan.inherited,
        environment=plan.environment,
    )


def _carry(path: Path, content: bytes) -> None:
    """A node that shares the coordinator's file system has the file already, or another agent wrote it just now."""
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content, durable=False)
