"""Timestamps of runs: which of them stay, and which are removed by the next run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.agent.trace import KEPT_S, clear_old_runs, note_rendezvous
from strata.shared_memory import run_folder

HOLD = """
import sys
from pathlib import Path
from strata import locks
held = locks.create(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that a run has beside its own, with a socket in it."""
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path))
    note_rendezvous("mine", 1.0, 2.0)
    folder = run_folder("agent-1-another")
    folder.mkdir()
    (folder / "socket").touch()
    return folder


def test_folder_of_a_live_process_stays_however_old_it_is(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        long_ago_s = folder.stat().st_mtime - 2 * KEPT_S
        os.utime(folder, (long_ago_s, long_ago_s))
        clear_old_runs(keep="mine")
        assert (folder / "socket").exists()
        holder.communicate("")


def test_folder_of_a_process_that_was_killed_is_removed_at_once(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGKILL)
    clear_old_runs(keep="mine")
    assert not folder.exists()
    assert run_folder("mine").exists()


def test_folder_that_nobody_has_held_stays_for_a_day(folder: Path) -> None:
    clear_old_runs(keep="mine")
    assert folder.exists()
    long_ago_s = folder.stat().st_mtime - 2 * KEPT_S
    os.utime(folder, (long_ago_s, long_ago_s))
    clear_old_runs(keep="mine")
    assert not folder.exists()
