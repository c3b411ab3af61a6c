"""Fixtures for every test, and the watch over what tests leave behind."""

from __future__ import annotations

import gc
import glob
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from strata.shared_memory import images_folder, remove_empty
from tests.support import Coordinator
from tests.support_programs import program as find_program

# How long an example takes says more about the machine than about the code. Tests that want more or fewer examples than
# usual say how many times as many, so that `make check` is quick everywhere.
settings.register_profile("strata", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)  # For `make check`.
settings.load_profile("strata")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_SEGMENTS] = _segments()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A process that tests leave behind fails the run. What is new in shared memory is only reported: it may belong to a
    job that runs beside the tests, and what dead jobs left goes by itself."""
    remove_empty(images_folder() / "job")  # A test that removes a job's folder leaves the one around it.
    known: set[str] = session.config.stash[_SEGMENTS]
    segments = sorted(_segments() - known)
    if segments:
        print(f"\nnew in shared memory: {', '.join(segments)}")
    left = _processes_left()
    if left and exitstatus == 0:
        print(f"\nleft behind by the tests: {', '.join(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


_SEGMENTS = pytest.StashKey[set[str]]()


def _segments() -> set[str]:
    """Images and moments of jobs. The folders that hold them come and go with jobs that run beside the tests."""
    return set(glob.glob("/dev/shm/strata-*/*"))


def _processes_left() -> list[str]:
    gc.collect()  # A data loader in a cycle ends its processes when it is collected.
    helpers = ("resource_tracker", "forkserver")  # Python's own; they end with us.
    ours = "tests.support_forks"  # It ends with us as well; what it has forked has its command line, and does not.
    deadline_s = time.monotonic() + 30.0  # Those that are ending may take a while on a busy machine.
    while True:
        left = []
        for child in psutil.Process().children(recursive=True):
            try:
                command = " ".join(child.cmdline())
                if child.status() == psutil.STATUS_ZOMBIE or any(name in command for name in helpers):
                    continue
                if ours not in command or child.ppid() != os.getpid():
                    left.append(f"process {child.pid} ({command[:80]})")
            except psutil.Error:
                continue
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.1)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """The path of an external program that is declared; without it the test is skipped, or fails in CI."""
    return find_program
