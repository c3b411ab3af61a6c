"""Processes: which one this is, whether another is still there, and how they end with those they work for.

A token names one process of one boot of one machine (and process namespace): its number and start time, so a
recycled process number is never mistaken for the writer. A process on another machine is never taken for ended.

Needs nothing but Python.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib
import io
import os
import string
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_DIGITS = string.digits + string.ascii_lowercase


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One life of one process."""

    machine: str
    pid: int
    started_ticks: int

    @property
    def token(self) -> str:
        """A short name, safe in file names: `7c2f9a-4d2-1x9kq2`."""
        return f"{self.machine}-{_base36(self.pid)}-{_base36(self.started_ticks)}"

    @classmethod
    def parse(cls, token: str) -> Process:
        machine, pid, started = token.split("-")
        return cls(machine=machine, pid=int(pid, 36), started_ticks=int(started, 36))

    def is_elsewhere(self) -> bool:
        """Whether this machine cannot tell if it has ended."""
        return self.machine != machine_token()

    def has_ended(self) -> bool:
        """True only when this machine can tell that the process has ended."""
        if self.is_elsewhere():
            return False
        try:
            return _started_ticks(self.pid) != self.started_ticks
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False  # Out of file descriptors, say: then no process is declared dead.


def this_process() -> Process:
    return _process(os.getpid())  # Asked every time: a fork changes it.


def parent_process() -> Process:
    """The process that started this one; this one itself where that is outside of its process namespace, and cannot be seen."""
    return _process(os.getppid() or os.getpid())


def live_process(pid: int) -> Process:
    """The process that has this number now. Raises `ProcessLookupError` where there is none, or it has ended."""
    try:
        found = Process(machine=machine_token(), pid=pid, started_ticks=_started_ticks(pid))
    except FileNotFoundError:
        found = None
    if found is None or found.started_ticks < 0:
        raise ProcessLookupError(f"there is no process {pid}")
    return found


@functools.lru_cache(maxsize=2)
def _process(pid: int) -> Process:
    return Process(machine=machine_token(), pid=pid, started_ticks=_started_ticks(pid))


@functools.cache
def machine_token() -> str:
    """This boot of this machine, as seen from this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = os.uname().nodename, ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:6]


def _started_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 for one that is dead and waits to be buried."""
    status = Path(f"/proc/{pid}/stat").read_text()
    after_name = status.rpartition(")")[2].split()
    return -1 if after_name[0] in "ZX" else int(after_name[19])


def _base36(number: int) -> str:
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits


LAUNCH_VARIABLE = "STRATA_LAUNCH"
"""What an agent that meets no other tells its workers: the run's id, a colon, and what no other agent says."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it has ended; 0 for nothing any
    more. A parent that had ended before this call is not noticed: see `os.getppid`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def add_output_to(stdout: str, stderr: str) -> None:
    """What this process prints goes to the ends of these files; to where it went before, where the name is empty."""
    for number, path in ((1, stdout), (2, stderr)):
        if path:
            with open(path, "ab") as file:
                os.dup2(file.fileno(), number)


def write_line_by_line() -> None:
    """Each line that this process prints in one piece, as soon as it is complete: others write to the same place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call it once when this process ends, or in `run_exit_functions`: while threads and executors can still be started, for which
    `atexit` alone is too late."""
    call = functools.cache(function)
    # What is registered later is called earlier, and executors end by what this import registers.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(call)  # type: ignore[attr-defined]
    atexit.register(call)
    return function


def run_exit_functions() -> None:
    """What was registered with `atexit`, now: for a process that ends in another way than Python's own."""
    atexit._run_exitfuncs()
