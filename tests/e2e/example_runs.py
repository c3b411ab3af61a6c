"""An example of the project, run as a user runs it, whose workers are killed while it trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
START = re.compile(r"rank (\d) is process (\d+)")
STEP = re.compile(r"step +(\d+)  epoch")
WAIT_S = 150


def killed_twice(
    command: Sequence[str], example: str, *options: str, folder: Path, workers: int = 2, lines_apart: int = 1
) -> str:
    """What `strata COMMAND EXAMPLE OPTIONS` prints, whose workers 1 and 0 are killed, each when so many lines about steps were
    printed since the job started or started again."""
    run = subprocess.Popen(
        [sys.executable, "-m", "strata.cli.main", *command, str(EXAMPLES / example), *options],
        cwd=folder,
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
            reached(START, workers * kill)
            reached(STEP, len(STEP.findall(text())) + lines_apart)
            pids = dict(START.findall(text())[-workers:])
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
    assert len(START.findall(text())) == 3 * workers, text()
    return text()
