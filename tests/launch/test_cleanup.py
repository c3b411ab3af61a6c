"""What a run leaves is ended, and its semaphores are removed, however late Python's resource tracker comes to it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from strata.launch import cleanup
from strata.launch.cleanup import RUN_VARIABLE, end_processes, is_tracker
from tests.support import eventually

PROGRAM = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class LeftRun:
    id: str
    process: subprocess.Popen[str]
    tracker: psutil.Process
    semaphore: Path


def trackers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if is_tracker(child.pid)]


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def left() -> Iterator[LeftRun]:
    """One with a semaphore, whose tracker does nothing until it is resumed."""
    run_id = f"left-{secrets.token_hex(4)}"
    environment = {**os.environ, RUN_VARIABLE: run_id}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    semaphore = Path(f"/dev/shm/sem.{process.stdout.readline().strip().lstrip('/')}")
    (tracker,) = eventually(lambda: trackers_of(process.pid), within_s=60, what="a tracker")
    tracker.suspend()
    try:
        assert semaphore.exists()
        yield LeftRun(run_id, process, tracker, semaphore)
    finally:
        if tracker.is_running():
            tracker.kill()
        process.kill()
        process.wait()
        process.stdout.close()
        semaphore.unlink(missing_ok=True)


def test_a_tracker_that_is_slow_has_time_for_its_semaphores(left: LeftRun) -> None:
    ending = threading.Thread(target=lambda: end_processes(left.id, patience_s=0.1))
    ending.start()
    left.process.wait(60)
    psutil.wait_procs([left.tracker], timeout=1.0)
    assert not has_ended(left.tracker)
    left.tracker.resume()
    ending.join(60)
    assert not left.semaphore.exists()


def test_a_tracker_that_hangs_is_ended(left: LeftRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "TRACKERS_S", 0.2)
    assert end_processes(left.id, patience_s=0.1) == 2
    eventually(lambda: has_ended(left.tracker), within_s=60)
