"""What a machine knows about a worker that ended: the kernel's counters, and what it printed last (`strata.devices`: of its GPU).

Whatever cannot be read here (no permission, no such file, nobody who keeps the output) is simply not among the evidence.
Needs no torch.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from strata.core.faults.failures import LINES_KEPT
from strata.sockets import connect_to_path

OOM_SAMPLES = 4
ANSWER_S = 1.0


class OomKills:
    """Whether the kernel has just killed something for want of memory."""

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count = count or count_oom_kills
        self._seen: deque[int] = deque([self._count()], maxlen=OOM_SAMPLES)

    def tick(self) -> None:
        """Every second: only what was killed lately can have been ours."""
        self._seen.append(self._count())

    def take(self) -> bool:
        """Whether there was a kill; once for each."""
        if self._count() <= self._seen[0]:
            return False
        self._seen.clear()
        self.tick()
        return True


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, here and in this control group."""
    counts = [_field(Path("/proc/vmstat"), "oom_kill")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                counts.append(_field(Path(f"/sys/fs/cgroup{path}/memory.events"), "oom_kill"))
            elif "memory" in controllers.split(","):
                counts.append(_field(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill"))
    except (OSError, ValueError):
        pass
    return sum(counts)


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
