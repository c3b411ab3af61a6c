"""A job outlives its coordinator, tells of its recoveries and of a rank that hangs, and leaves in good order."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from strata.agent.trace import last_footprint, was_saved
from strata.chaos.run import ChaosRun
from strata.checkpoint.manager import CheckpointManager
from strata.cli.common import get
from strata.launch.torchrun import Agent
from tests.e2e.conftest import StartRun
from tests.support import eventually, run_in

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(start_shared: StartRun) -> ChaosRun:
    """One job that never ends, for all that can happen to it. Snapshots are so far apart that none is skipped because the one
    before is still being made, and no step of a busy machine takes as long as a hang."""
    options = {"save_every": 50_000, "snapshot_every": 20, "hang_timeout_s": 12.0}
    return start_shared(name="long", workers=2, steps=1_000_000, **options)


def test_a_recovery_is_traced_by_phase_and_shown(run: ChaosRun) -> None:
    eventually(lambda: was_saved(run_in(run.job.checkpoints)), within_s=60, what="the first snapshot")
    run.inject(["kill"], patience_s=120.0)

    def mine() -> list[dict[str, Any]]:
        return [r for r in get(run.coordinator.api, "/api/recoveries") if r["job_id"] == run.job.name]

    found = eventually(mine, within_s=60, what="the recovery at the coordinator")[0]
    assert set(found["phases_s"]) == {"detect", "rendezvous", "spawn", "load", "first_step"}
    assert found["tier"] == "MEMORY"
    assert found["lost_steps"] <= 2 * run.job.snapshot_every, "the snapshot under way may be lost as well"


def test_the_coordinator_may_die_while_training_continues(run: ChaosRun) -> None:
    before, workers = run.step, run.agents[0].workers()
    run.coordinator.kill()
    with _held(run.coordinator.grpc_port, run.coordinator.http_port):
        eventually(lambda: run.step > before + 20, within_s=60, what="training without a coordinator")
        run.coordinator.start()

    def connected() -> bool:
        found = [w for w in get(run.coordinator.api, "/api/workers") if w["job_id"] == run.job.name]
        return len(found) == 2 and all(w["connected"] for w in found)

    eventually(connected, within_s=90, what="both workers at the restarted coordinator")
    assert run.agents[0].workers() == workers, "somebody was restarted"
    injury = run.inject(["kill"], patience_s=120.0)
    assert injury.recovery_s is not None, run.agents[0].tail()


def test_a_stopped_rank_is_named_with_its_stack_and_the_job_restarts(run: ChaosRun) -> None:
    victim = run.agents[0].workers()[0]
    stopped_s = time.monotonic()
    os.kill(victim, signal.SIGSTOP)

    def told() -> list[str]:
        entries = get(run.coordinator.api, "/api/logs?limit=1000&level=error&q=has+completed+no+step")
        return [e["message"] for e in entries if run.job.name in e["message"]]

    try:
        message = eventually(told, within_s=60, what="the watchdog's word")[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    assert "waits for other ranks" in message
    assert "Stacks:" in message

    def restarted() -> bool:
        last = last_footprint(run.job.name)
        return last is not None and last.born_mono_s > stopped_s

    eventually(restarted, within_s=120, what="a step of a process that was started since")


def test_sigterm_makes_a_final_checkpoint_and_leaves(run: ChaosRun) -> None:
    before = run.step
    run.agents[0].stop()
    with CheckpointManager(run.job.checkpoints) as manager:
        latest = manager.get_latest()
    assert latest is not None
    assert latest.step >= before


def test_a_killed_agent_leaves_no_semaphores(run: ChaosRun) -> None:
    run.agents[0].stop()  # If it has not left yet.
    run.start_agent(0)
    mine = eventually(lambda: _semaphores(run.agents[0]), within_s=120, what="workers of the fork server")
    run.agents[0].kill()
    eventually(lambda: not any(path.exists() for path in mine), within_s=60, what="the tracker's cleaning")


@pytest.fixture
def short() -> Iterator[Path]:
    """For temporary files: a path that leaves space for the address of a socket."""
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        yield Path(folder)


def test_the_demo_ends_well_and_prints_what_it_verified(short: Path) -> None:
    command = [sys.executable, "-m", "strata.cli.main", "demo", "--once", "--steps", "300"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "TMPDIR": str(short)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("killing", "trained", "recovered", "each exactly once", "every byte verified"):
        assert word in done.stdout
    assert not list(short.iterdir())


@pytest.mark.parametrize("how", ["SIGTERM", "an agent that is killed"])
def test_a_demo_that_ends_early_leaves_nothing(short: Path, how: str) -> None:
    """Asked by a supervisor, or because its agent is lost, while training is under way."""
    with subprocess.Popen(
        [sys.executable, "-m", "strata.cli.main", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
    ) as demo:
        try:
            # The coordinator, the agent, and what the agent starts.
            below = eventually(
                lambda: found if len(found := _below(demo.pid)) > 2 else None, within_s=120, what="a training"
            )
            if how != "SIGTERM":
                # Whose socket is the file that would be left.
                eventually(lambda: glob.glob(f"{short}/*/pymp-*/*"), within_s=120, what="the fork server")
                below = _below(demo.pid)
                _agent_of(demo.pid).kill()
                assert demo.wait(120) == 1
        finally:
            demo.terminate()
        said, _ = demo.communicate(timeout=120)
    eventually(lambda: not any(map(_lives, below)), within_s=60, what=said)
    assert not list(short.iterdir())


@contextlib.contextmanager
def _held(*ports: int) -> Iterator[None]:
    """Nobody else gets these ports while nobody listens there. Whoever reuses addresses, as the coordinator does, still gets them."""
    with contextlib.ExitStack() as holders:
        for port in ports:
            holder = holders.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # Somebody has it after all: the coordinator will say so.
                holder.bind(("127.0.0.1", port))
        yield


def _agent_of(pid: int) -> psutil.Process:
    """What a demonstration has started to train."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["ppid"] == pid and "strata.launch.agent" in (process.info["cmdline"] or ()):
            return process
    raise AssertionError(f"process {pid} has no agent")


def _semaphores(agent: Agent) -> list[Path]:
    """Those its living workers share with it."""
    found = set()
    for pid in agent.workers():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/sem.mp-" in line}
    return sorted(found)


def _lives(process: psutil.Process) -> bool:
    """A zombie is only waiting for its new parent to look."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
