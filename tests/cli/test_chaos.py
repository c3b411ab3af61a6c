"""`strata chaos`: what it refuses before anything starts, and how progress is judged."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from strata.chaos.report import judge_progress
from strata.chaos.run import Injury
from strata.cli.chaos import chaos, jitter_seconds
from tests.support import eventually

app = typer.Typer()
app.command()(chaos)
SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos_test.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kill-signal", "SIGCHLD"], "does not end a worker"),
        (["--kill-signal", "loud"], "does not end a worker"),
        (
            ["--min-survivors", "2", "--workers", "2"],
            "a fault hits 1 of 2 workers, which leaves fewer than 2 unaffected",
        ),
        (["--min-survivors", "1", "--workers", "1"], "a fault hits 1 of 1 workers"),
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


@pytest.mark.parametrize(
    ("jitter", "interval_s", "seconds"),
    [(0.0, 15.0, 0.0), (0.2, 15.0, 3.0), (0.99, 10.0, 9.9), (1.0, 15.0, 1.0), (2.5, 15.0, 2.5)],
)
def test_jitter_below_one_is_a_share_of_the_interval(
    jitter: float, interval_s: float, seconds: float
) -> None:
    assert jitter_seconds(jitter, interval_s) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a fault (kill) every 15 s hits 1 of 2 workers"),
        (["--jitter", "0.2"], "a fault (kill) every 15 s ± 3 s hits"),
        (["--jitter", "2", "--interval", "5"], "every 5 s ± 2 s"),
        (["--workers", "1"], "none is left unaffected"),
        (["--kinds", "agent,coordinator"], "none is left unaffected"),
        (["--kinds", "coordinator"], "hits 0 of 2 workers"),
        (["--single-kill"], "a fault (kill) after 15 s hits 1 of 2 workers"),
    ],
)
def test_what_the_numbers_mean_is_said_before_anything_starts(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_here(*_: object, **__: object) -> None:
        raise typer.Exit(7)

    monkeypatch.setattr("strata.cli.chaos._run", stop_here)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 7
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("module", ["strata.cli.main", "strata.launch.agent"], ids=["coordinator", "agent"])
def test_asked_twice_to_stop_while_it_starts_it_leaves_no_process(module: str, tmp_path: Path) -> None:
    """`timeout 20 chaos_test.py` signals the process, and then its group."""
    chaos = subprocess.Popen(
        [sys.executable, SCRIPT, "--no-compare"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        below = psutil.Process(chaos.pid)
        eventually(
            lambda: any(module in cmdline(each) for each in below.children()), within_s=60, what=module
        )
        started = below.children(recursive=True)
        while chaos.poll() is None:
            chaos.send_signal(signal.SIGTERM)  # As often as there is something to tear.
            with contextlib.suppress(subprocess.TimeoutExpired):
                chaos.wait(0.01)
        assert chaos.returncode in (130, -signal.SIGTERM)
        started += [each for each in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(each))]
        _, left = psutil.wait_procs(started, timeout=60)
        assert left == []
        # What Python itself had in use in a process that was killed stays: an empty folder.
        assert [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []
    finally:
        chaos.kill()
        chaos.wait(10)


def cmdline(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def injury(step: int, recovery_s: float | None = 1.0) -> Injury:
    return Injury(fault="kill", victim="x", at_s=0.0, step_before=step, recovery_s=recovery_s)


def test_progress_is_a_step_beyond_every_fault() -> None:
    assert judge_progress((injury(5), injury(9)), 10).passed
    assert not judge_progress((injury(5), injury(9)), 9).passed
    assert not judge_progress((injury(5, None),), 50).passed
    assert not judge_progress((), 50).passed
