"""The commands the README begins with: a worker is killed twice, and each kill costs one restart and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.harness.etcd_server import free_port
from tests.support import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_loop.py"
START = re.compile(r"rank (\d) is process (\d+)")
STEP = re.compile(r"step +(\d+)  epoch")
WAIT_S = 150


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--workers", "2"],
        ["torchrun", "--nproc-per-node=2"],
        ["torchrun", "--nproc-per-node=2", "--master-port=PORT"],
    ],
    ids=lambda words: " ".join(words),
)
def test_two_kills_cost_two_restarts_and_the_job_ends_well(tmp_path: Path, command: list[str]) -> None:
    words = [word.replace("PORT", str(free_port())) for word in command]
    run = subprocess.Popen(
        [sys.executable, "-m", "strata.cli.main", *words, str(EXAMPLE), "--epochs=2", "--step-time=0.02"],
        cwd=tmp_path,
        env={**os.environ, "STRATA_TOKEN": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    assert run.stdout is not None
    reading = threading.Thread(target=lambda: lines.extend(iter(run.stdout.readline, "")))  # type: ignore[union-attr]
    reading.start()

    def text() -> str:
        return "".join(lines)

    def reached(pattern: re.Pattern[str], count: int) -> None:
        eventually(
            lambda: len(pattern.findall(text())) >= count or run.poll() is not None,
            within_s=WAIT_S,
            what=lambda: f"{pattern.pattern} {count} times; printed so far:\n{text()}",
        )
        assert len(pattern.findall(text())) >= count, text()

    try:
        for kill in (1, 2):
            reached(START, 2 * kill)
            reached(STEP, len(STEP.findall(text())) + 1)
            pids = dict(START.findall(text())[-2:])
            os.kill(int(pids[str(kill % 2)]), signal.SIGKILL)
        eventually(
            lambda: run.poll() is not None,
            within_s=WAIT_S,
            what=lambda: f"its end; printed so far:\n{text()}",
        )
        assert run.returncode == 0, text()
        reading.join(60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGINT)
            run.wait(60)
        reading.join(60)
    assert len(START.findall(text())) == 6, text()
    assert "10,000 samples, each exactly once" in text()
