"""The processes that a run could leave behind on this machine, found by a mark in their environment, and ended.

Sessions and process groups change hands (torchrun gives each worker its own); an environment is inherited by everything
that a run ever starts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

RUN_VARIABLE = "STRATA_RUN_ID"
TRACKER = b"multiprocessing.resource_tracker"
TRACKERS_S = 10.0
"""After so long a resource tracker is killed, too. It takes less, also on a busy machine."""
_POLL_S = 0.02


def processes_of(run_id: str) -> list[int]:
    """Process ids of everything alive that a run has started."""
    mark = f"{RUN_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # Already ended, or another user's.
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end_processes(run_id: str, *, spare: Collection[int] = (), patience_s: float = 5.0) -> int:
    """SIGKILL for everything that a run has started, until nothing is left; how many there were.

    Python's resource trackers remove the semaphores of the dead and then end by themselves; they are killed only where that takes
    too long.
    """
    if not run_id:
        return 0
    ended: set[int] = set()
    started_s = time.monotonic()
    while left := [pid for pid in processes_of(run_id) if pid not in spare]:
        ended.update(left)
        others = [pid for pid in left if not is_tracker(pid)]
        _kill(others)
        if time.monotonic() - started_s > (patience_s if others else max(patience_s, TRACKERS_S)):
            _kill(left)
            break
        time.sleep(_POLL_S)
    return len(ended)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Whether this is one of the processes with which Python clears up after others."""
    with suppress(OSError):
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
