"""`strata chaos`: what it refuses before anything starts, and how progress is judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from strata.chaos.report import judge_progress
from strata.chaos.run import Injury
from strata.cli.chaos import chaos

app = typer.Typer()
app.command()(chaos)
SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos_test.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kill-signal", "SIGCHLD"], "does not end a worker"),
        (["--kill-signal", "loud"], "does not end a worker"),
        (["--min-survivors", "2", "--workers", "2"], "leaves fewer than 2 untouched"),
        (["--min-survivors", "2", "--workers", "4", "--agents", "1", "--kinds", "agent"], "hits 4 of 4"),
        (["--kinds", "earthquake"], "unknown faults"),
        (["--jitter", "-1"], "jitter"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_the_script_has_the_same_flags() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"},
    )
    for flag in ("--min-survivors", "--jitter", "--kill-signal", "--verify-progress", "--rto-threshold"):
        assert flag in done.stdout


def injury(step: int, recovery_s: float | None = 1.0) -> Injury:
    return Injury(fault="kill", victim="x", at_s=0.0, step_before=step, recovery_s=recovery_s)


def test_progress_is_a_step_beyond_every_fault() -> None:
    assert judge_progress((injury(5), injury(9)), 10).passed
    assert not judge_progress((injury(5), injury(9)), 9).passed
    assert not judge_progress((injury(5, None),), 50).passed
    assert not judge_progress((), 50).passed
