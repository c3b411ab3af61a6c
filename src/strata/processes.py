"""Processes that end with those they work for, and know who started them. Needs nothing but Python."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

LAUNCH_VARIABLE = "STRATA_LAUNCH"
"""What an agent that meets no other tells its workers: the run's id, a colon, and what no other agent says."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it is gone. A parent that was gone before
    this call is not noticed: see `os.getppid`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def let_fork_server_end() -> None:
    """In a process that Python's fork server has forked: the server ends when nobody holds a certain pipe any more, and
    gives it to each of its children too. Without it the server ends with the process that started it."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
