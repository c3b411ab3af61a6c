"""4 → 3 → 5 → 2 real trainers, killed with SIGKILL mid-epoch while loaders prefetch and the coordinator goes and comes
back: the audit says exact, and what was learned is what one undisturbed worker learns, in the same order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path

import pytest

from strata.checkpoint import CheckpointManager
from strata.core.data.ledger import LedgerError
from strata.core.data.spans import Spans, expanded
from strata.data.history import audit, commits_of
from strata.shared_memory import forget_jobs
from tests.data.trainer import DATASET
from tests.support import Coordinator, eventually, kill_together

pytestmark = pytest.mark.timeout(600)  # Five fleets, one after the other, import torch.

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


@pytest.fixture(scope="module")
def brain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path_factory.mktemp("coordinator") / "state").start()
    yield server
    server.stop()


class Fleet:
    """The processes of one world, in a process group of their own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.pids: dict[int, int] = {}
        self.positions: set[int] = set()
        self._folder = folder

    def hold(self, step: int) -> None:
        """Let nobody get past this step."""
        (self._folder / f"hold-{step}").touch()

    def release(self, step: int) -> None:
        (self._folder / f"hold-{step}").unlink()

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
        kill_together(*(self.pids[rank] for rank in ranks))

    def end(self) -> None:
        """Train to the end of the epoch."""
        self.process.communicate(timeout=300)
        assert self.process.returncode == 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """Where the worlds of one job keep what they have in common."""

    name: str
    data: Path
    folder: Path
    coordinator: Coordinator
    kind: str

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @contextmanager
    def fleet(self, world: int, *, hold: int | None = None) -> Iterator[Fleet]:
        """Trainers that get no further than the step `hold`, where one is given."""
        if hold is not None:
            (self.folder / f"hold-{hold}").touch()  # Before they start: nobody is in a hurry here.
        options = {
            "world": world,
            "kind": self.kind,
            "data": self.data,
            "checkpoints": self.checkpoints,
            "meet": self.folder / f"meet-{os.urandom(4).hex()}",
            "hold": self.folder,
            "job": self.name,
            "coordinator": self.coordinator.address,
        }
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.data.trainer"]
            + [f"--{name}={value}" for name, value in options.items()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        try:
            yield Fleet(process, self.folder)
        finally:
            with suppress(ProcessLookupError):  # The ranks, and the loaders that a killed rank left behind.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            for held in self.folder.glob("hold-*"):
                held.unlink()

    def worlds(self) -> set[int]:
        """Of which sizes there is a durable checkpoint."""
        try:
            commits = commits_of(self.checkpoints)
        except LedgerError:
            return set()  # There is none yet.
        return {commit.data.world_size for commit in commits if commit.data}

    def wait_for_checkpoint_of(self, world: int) -> None:
        """Saves are written beside the training: a step may be made long before the save of an earlier one."""
        eventually(lambda: world in self.worlds(), within_s=120, what=f"a checkpoint of {world} trainers")

    def learned(self) -> list[int]:
        """Every sample that the newest weights have learned from, in order."""
        with CheckpointManager(self.checkpoints) as manager:
            found: list[int] = manager.load()["extra"]["learned"]["ids"].tolist()
        return found


@contextmanager
def new_job(
    kind: str, data: Path, brain: Coordinator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("run")
    job = Job(name=f"job-{os.urandom(4).hex()}", data=data, folder=folder, coordinator=brain, kind=kind)
    try:
        yield job
    finally:
        forget_jobs(job.name)


@pytest.fixture(scope="module", params=["map", "iterable"])
def killed_job(
    request: pytest.FixtureRequest,
    data: Path,
    brain: Coordinator,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Job]:
    """A whole epoch whose trainers were killed three times, and their coordinator once."""
    with new_job(request.param, data, brain, tmp_path_factory) as job:
        # Each is killed past a checkpoint, so that trained work is lost.
        with job.fleet(4, hold=10) as running:
            running.wait_for_step(7)
            job.wait_for_checkpoint_of(4)
            running.kill(2)
            assert len(running.positions) == 1, "ranks of one world started at different positions"
        with job.fleet(3, hold=16) as running:
            running.wait_for_step(12)
            brain.kill()
            running.wait_for_step(16)
            brain.start()
            running.hold(20)
            running.release(16)
            running.wait_for_step(17)
            job.wait_for_checkpoint_of(3)
            running.kill(0, 1, 2)
        with job.fleet(5, hold=29) as running:
            running.wait_for_step(26)
            job.wait_for_checkpoint_of(5)
            running.kill(0)
        with job.fleet(2) as running:
            running.end()
        yield job


def strata_audit(source: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strata.cli.main", "audit", DATASET, "--epoch=0", "--source", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_trainers_killed_in_every_way_leave_an_exact_history(killed_job: Job) -> None:
    # The manifests, and what was reported to the coordinator before and after it was killed.
    for source in (str(killed_job.checkpoints), killed_job.coordinator.url):
        done = strata_audit(source)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{TOTAL:,} samples, each exactly once" in done.stdout
    assert killed_job.worlds() == {4, 3, 5, 2}


def test_what_was_learned_is_what_one_undisturbed_worker_learns_in_the_same_order(
    killed_job: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with new_job(killed_job.kind, killed_job.data, killed_job.coordinator, tmp_path_factory) as calm:
        with calm.fleet(1) as running:
            running.end()
        assert len(calm.learned()) == TOTAL
        assert killed_job.learned() == calm.learned()


def test_the_audit_notices_when_the_record_of_one_rank_is_missing(killed_job: Job) -> None:
    *older, last = commits_of(killed_job.checkpoints)
    assert last.data is not None
    epoch = last.data.find(DATASET, 0)
    assert epoch is not None
    forged = replace(epoch, ranks={0: epoch.ranks[0]})
    report = audit([*older, replace(last, data=replace(last.data, epochs=(forged,)))], DATASET, 0)
    # Where the world was resized since the save before, there is more than one other.
    others = [Spans(expanded(runs)) for rank, runs in epoch.ranks.items() if rank != 0]
    assert report.lost == reduce(or_, others)
