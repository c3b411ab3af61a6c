"""A process that recovers again and again is as large afterwards as before: memory, descriptors, threads, mappings and files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.training.test_recoverable import Job, job

LIMIT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one process takes."""

    memory_kb: int
    """Of its own: shared with nobody, or not with a file."""
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def of(cls, pid: int) -> Size:
        rollup = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        return cls(
            memory_kb=sum(int(rollup[key].split()[0]) for key in ("Private_Dirty", "Swap")),
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            mappings=Path(f"/proc/{pid}/maps").read_text().count("\n"),
        )


def typical(sizes: list[Size]) -> dict[str, float]:
    return {key: median(asdict(size)[key] for size in sizes) for key in asdict(sizes[0])}


def files_below(folder: Path) -> list[str]:
    """However many of them go meanwhile."""
    return sorted(
        os.path.join(at, name) for at, folders, names in os.walk(folder) for name in (*folders, *names)
    )


@contextmanager
def endless(folder: Path, **options: str) -> Iterator[Job]:
    temporary = folder / "temporary"
    temporary.mkdir()
    with job(
        folder / "job",
        "ddp",
        workers=2,
        steps=10_000_000,
        memory=str(folder / "memory"),
        TMPDIR=str(temporary),
        **options,
    ) as running:
        yield running


def lose_one(running: Job, hurt: int, entries: int) -> int:
    """Kill the worker of this slot, and wait until the survivor trains with another one in its place: its last entry."""
    os.kill(running.living()[hurt], signal.SIGKILL)
    survivor = 1 - hurt

    def last_entry() -> int:
        """Of the survivor into a world of two, if it has resumed there."""
        own = [line for line in running.log() if line["slot"] == survivor]
        if not own or "resumed" not in own[-1] or own[-2].get("world") != 2:
            return 0
        return int(own[-2]["restarts"])

    deadline_s = time.monotonic() + LIMIT_S
    while (found := last_entry()) <= entries:
        assert running.process.poll() is None, running.output()
        assert time.monotonic() < deadline_s, running.output()
        time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param(25, marks=pytest.mark.timeout(900)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_recoveries_leave_a_process_and_its_agent_as_large_as_they_were(tmp_path: Path, losses: int) -> None:
    """One rank of two is killed again and again; the other enters its function twice each time, alone and with the replacement."""
    of_survivor: list[Size] = []
    of_agent: list[Size] = []
    files: list[list[str]] = []
    with endless(tmp_path) as running:
        running.await_line(lambda line: "resumed" in line, count=2)
        survivor, agent, entries = running.living()[0], running.process.pid, 0
        for _ in range(losses):
            entries = lose_one(running, 1, entries)
            of_survivor.append(Size.of(survivor))
            of_agent.append(Size.of(agent))
            files.append([name for each in ("memory", "temporary") for name in files_below(tmp_path / each)])
        assert running.pids()[0] == [survivor], running.output()
    assert entries >= losses
    part = losses // 4
    for who, sizes in (("survivor", of_survivor), ("agent", of_agent)):
        before, after = typical(sizes[part : 2 * part]), typical(sizes[-part:])
        print(f"{who}, {entries} entries: first {asdict(sizes[0])}, then {before}, last {after}")
        # A group that broke may be held a while longer, with three threads and five descriptors of its own: fewer than what every loss
        # would leave behind, of which there are twice as many between the two.
        assert after["descriptors"] <= before["descriptors"] + part, [size.descriptors for size in sizes]
        assert after["threads"] <= before["threads"] + part // 2, [size.threads for size in sizes]
        assert after["mappings"] <= before["mappings"] + 8 + part, [size.mappings for size in sizes]
        # Torch itself keeps some kilobytes of every group and every wrapper that was made.
        assert after["memory_kb"] <= 1.05 * before["memory_kb"], [size.memory_kb for size in sizes]
    # A save that is under way has files of its own, and so has who was lost until it is cleaned up: fewer than what every loss
    # leaves behind would be, from the one half to the other.
    most = max(files[: 2 * part], key=len)
    assert min(map(len, files[-part:])) < len(most) + part, "\n".join([*most, "later:", *files[-1]])
