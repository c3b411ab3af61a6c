"""Whether something grows that should not: memory, descriptors and threads of processes, shared memory, disk.

`Watch` takes samples; `judge` is pure. What counts is one process over its life, after a warm-up: the middle of its samples early against
that of its samples late. Growth of memory and disk is allowed a margin in proportion, as caches and logs fill up to their bounds;
descriptors and threads a few.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import psutil

Kind = Literal["memory", "descriptors", "threads", "shared memory", "disk"]
MB = 1 << 20

ALLOWED: dict[Kind, tuple[float, float]] = {
    "memory": (0.25, 24 * MB),
    "descriptors": (0.0, 12),
    "threads": (0.0, 6),
    "shared memory": (0.10, 8 * MB),
    "disk": (1.0, 256 * MB),
}
"""By how much a late sample may exceed an early one: in proportion, and in addition."""
FEWEST = 16
"""Samples without which nothing can be said of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    what: str
    """Whose: a process's role, or a folder."""
    life: int
    """Which of those that had the role: its process id."""
    kind: Kind
    at_s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    what: str
    kind: Kind
    early: float
    late: float
    most: float
    over_s: float
    is_leak: bool

    @property
    def text(self) -> str:
        return f"{shown(self.kind, self.early)} → {shown(self.kind, self.late)}"


def shown(kind: Kind, value: float) -> str:
    return f"{value / MB:,.1f} MB" if kind in ("memory", "shared memory", "disk") else f"{value:,.0f}"


def judge(samples: Iterable[Sample]) -> list[Growth]:
    """Of the longest life of each; nothing where that is too short."""
    lives: dict[tuple[str, Kind], dict[int, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        lives[sample.what, sample.kind][sample.life].append(sample)
    found = []
    for (what, kind), by_life in sorted(lives.items()):
        longest = max(by_life.values(), key=len)
        if len(longest) < FEWEST:
            continue
        quarter = len(longest) // 4
        early = median(each.value for each in longest[quarter : 2 * quarter])
        late = median(each.value for each in longest[-quarter:])
        share, more = ALLOWED[kind]
        found.append(
            Growth(
                what=what,
                kind=kind,
                early=early,
                late=late,
                most=max(each.value for each in longest),
                over_s=longest[-1].at_s - longest[0].at_s,
                is_leak=late > early * (1 + share) + more,
            )
        )
    return found


class Watch:
    """Samples on a thread of its own, until it is closed. `processes` and `folders` say, each time, what there is to look at."""

    def __init__(
        self,
        *,
        processes: Callable[[], dict[str, int]],
        folders: Callable[[], dict[str, tuple[Kind, Sequence[Path]]]],
        every_s: float,
    ) -> None:
        self._processes = processes
        self._folders = folders
        self._every_s = every_s
        self.samples: list[Sample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strata-soak-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        now_s = time.monotonic()
        for what, pid in self._processes().items():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                values: dict[Kind, float] = {
                    "memory": process.memory_info().rss,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                }
                for kind, value in values.items():
                    self._add(what, pid, kind, now_s, value)
        for what, (kind, paths) in self._folders().items():
            self._add(what, 0, kind, now_s, sum(size_bytes(path) for path in paths))

    def _add(self, what: str, life: int, kind: Kind, at_s: float, value: float) -> None:
        self.samples.append(Sample(what=what, life=life, kind=kind, at_s=at_s, value=value))


def size_bytes(path: Path) -> int:
    """What a file, or everything below a folder, takes on disk. What vanishes meanwhile takes nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    if not path.is_dir():
        with suppress(OSError):
            total += os.lstat(path).st_blocks * 512
    return total
