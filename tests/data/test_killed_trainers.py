"""4 → 3 → 5 → 2 real trainers, killed with SIGKILL mid-epoch while loaders prefetch: the audit says exact."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from strata.core.spans import Spans, expanded
from strata.data.history import audit, commits_of

TOTAL = 1_003
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for part in range(4):
        ids = range(part * 300, min((part + 1) * 300, TOTAL))
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps({"id": i, "x": [i / TOTAL, 1.0, i % 7, 0.5]}) + "\n" for i in ids)
        )
    return folder


class Fleet:
    """The processes of one world, in a process group of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: dict[int, int] = {}
        self.positions: set[int] = set()

    def wait_for_step(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # Gloo writes there too, and not always whole lines.
            for rank, pid, position in re.findall(r"ready rank=(\d+) pid=(\d+) position=(\d+)", line):
                self.pids[int(rank)] = int(pid)
                self.positions.add(int(position))
            if any(int(reached) >= step for reached in re.findall(r"step (\d+)", line)):
                return
        pytest.fail(f"the trainers ended before step {step}")

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)


@contextmanager
def fleet(world: int, data: Path, checkpoints: Path, kind: str) -> Iterator[Fleet]:
    meet = checkpoints.parent / f"meet-{world}-{os.urandom(4).hex()}"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.data.trainer",
        "--world",
        str(world),
        "--kind",
        kind,
    ]
    process = subprocess.Popen(
        [*command, "--data", str(data), "--checkpoints", str(checkpoints), "--meet", str(meet)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    try:
        yield Fleet(process)
    finally:
        with suppress(ProcessLookupError):  # The ranks, and the loaders that a killed rank left behind.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module", params=["map", pytest.param("iterable", marks=pytest.mark.slow)])
def killed_run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a whole epoch whose trainers were killed three times."""
    checkpoints = tmp_path_factory.mktemp("run") / "checkpoints"
    # World, the step at which to kill (past a checkpoint, so that trained work is lost), and whom.
    for world, step, victims in ((4, 6, [2]), (3, 15, [0, 1, 2]), (5, 23, [0])):
        with fleet(world, data, checkpoints, request.param) as running:
            running.wait_for_step(step)
            running.kill(*victims)
            assert len(running.positions) == 1, "ranks of one world started at different positions"
    with fleet(2, data, checkpoints, request.param) as running:
        out, _ = running.process.communicate(timeout=150)
        assert running.process.returncode == 0
        assert "done" in out  # The weights learned every sample once, in the order of a calm run.
    return checkpoints


def test_trainers_killed_in_every_way_leave_an_exact_history(killed_run: Path) -> None:
    report = audit(killed_run, "d", 0)
    assert report.exact, report.reason
    assert report.samples == TOTAL
    worlds = {commit.data.world_size for commit in commits_of(killed_run) if commit.data}
    assert worlds == {4, 3, 5, 2}


def test_the_audit_notices_when_the_record_of_one_rank_is_missing(killed_run: Path) -> None:
    *older, last = commits_of(killed_run)
    assert last.data is not None
    epoch = last.data.find("d", 0)
    assert epoch is not None
    forged = replace(epoch, ranks={0: epoch.ranks[0]})
    report = audit([*older, replace(last, data=replace(last.data, epochs=(forged,)))], "d", 0)
    assert report.lost == Spans(expanded(epoch.ranks[1]))
