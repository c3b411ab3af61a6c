"""Leaving in good order: SIGTERM saves and ends, a hung rank is named, nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.checkpoint.manager import CheckpointManager
from strata.checkpoint.staging import find_snapshots
from strata.cli.common import get
from strata.training.trace import run_folder
from tests.e2e.conftest import StartRun
from tests.support import eventually


def test_sigterm_makes_a_final_checkpoint_and_leaves(start_run: StartRun) -> None:
    run = start_run(name="preempted", workers=2, steps=100_000, save_every=50_000)
    before = run.step
    run.agents[0].stop()
    with CheckpointManager(run.job.checkpoints) as manager:
        latest = manager.get_latest()
    assert latest is not None
    assert latest.step >= before


def test_a_finished_job_leaves_no_shared_memory(start_run: StartRun) -> None:
    run = start_run(name="finished", workers=2, steps=60)
    run.wait(300)
    assert not run_folder(run.job.name).exists()
    assert not find_snapshots(f"job-{run.job.name}")


def test_a_stopped_rank_is_named_with_its_stack_and_the_job_restarts(start_run: StartRun) -> None:
    run = start_run(name="hung", workers=2, steps=100_000, hang_timeout_s=3.0)
    victim = run.agents[0].workers()[0]
    os.kill(victim, signal.SIGSTOP)

    def told() -> list[str]:
        entries = get(run.coordinator.api, "/api/logs?limit=1000&level=error&q=has+made+no+step")
        return [e["message"] for e in entries if run.job.name in e["message"]]

    try:
        message = eventually(told, within_s=60, what="the watchdog's word")[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    assert "waits for other ranks" in message
    assert "Stacks:" in message


@pytest.mark.timeout(600)
def test_the_demo_ends_well_and_prints_what_it_proved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "strata.cli.main", "demo", "--once", "--steps", "300"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("killing", "trained", "recovered", "each exactly once", "every byte verified"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())
