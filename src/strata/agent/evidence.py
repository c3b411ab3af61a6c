"""What a machine knows about a worker that ended: from the kernel, and what it printed last (`strata.devices`: of its GPU).

Whatever cannot be read here (no permission, no such file, no process that keeps the output) is simply not among the evidence.
Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strata.core.faults.failures import LINES_KEPT
from strata.devices import KERNEL_LOG, kernel_lines
from strata.sockets import connect_to_path

OOM_SAMPLES = 4
LATELY_S = 120.0
"""Longer than it takes to notice that a process has ended, and shorter than until its number may belong to another."""
FIRST_NAMESPACE = 0xEFFFFFFC
"""What Linux calls the namespace of processes that it starts with, whose numbers are in its log."""
_KILLED = re.compile(r"\bKilled process (\d+)")
ANSWER_S = 5.0
"""One that is gone answers at once."""


class OomKills:
    """Whether the kernel has just killed a process for want of memory.

    Its log names the process, where it can be read. Elsewhere its counters have to do: a process killed while they rise may be the one.
    """

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        """With `count` there are only counters."""
        self._has_log = count is None
        self._count = count or count_oom_kills
        self._seen: deque[int] = deque([self._count()], maxlen=OOM_SAMPLES)

    def tick(self) -> None:
        """Every second: only what was killed lately can have been ours."""
        self._seen.append(self._count())

    def take(self, pid: int) -> bool:
        """Whether it was this process, which SIGKILL has ended; by the counters, once for each kill."""
        if self._has_log and (killed := processes_killed()) is not None:
            return pid in killed
        if self._count() <= self._seen[0]:
            return False
        self._seen = deque([self._seen[0] + 1], maxlen=OOM_SAMPLES)
        return True


def processes_killed(*, path: str = KERNEL_LOG) -> set[int] | None:
    """Those that the kernel has killed lately for want of memory; None where its log cannot be read, or has other numbers for
    processes than there are here."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != FIRST_NAMESPACE:
            return None
    except OSError:
        return None
    lines = kernel_lines(_KILLED, time.monotonic() - LATELY_S, path=path)
    return None if lines is None else {int(number) for line in lines for number in _KILLED.findall(line)}


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this control group and below it, or where groups do not count
    them, on the whole machine."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0" and (events := Path(f"/sys/fs/cgroup{path}/memory.events")).exists():
                return _field(events, "oom_kill")
    return _field(Path("/proc/vmstat"), "oom_kill")


def last_lines(supervisor: str | None, rank: int) -> tuple[str, ...]:
    """What a worker printed last to its standard error, where a supervisor keeps the run's output."""
    if not supervisor or "/" not in supervisor:
        return ()
    with suppress(OSError, ValueError, TypeError), connect_to_path(supervisor) as connection:
        connection.settimeout(ANSWER_S)
        connection.sendall(json.dumps({"rank": rank, "lines": LINES_KEPT}).encode() + b"\n")
        with connection.makefile("rb") as answer:
            return tuple(str(line) for line in json.loads(answer.readline()))
    return ()


def wall_s(mono_s: float) -> float:
    """The wall-clock time of a moment on this machine's monotonic clock."""
    return time.time() - (time.monotonic() - mono_s)


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
