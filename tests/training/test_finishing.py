"""All workers of a machine are killed and nobody starts them again: its agent makes their newest snapshot durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from strata.agent.finishing import WorkFinisher
from strata.agent.regrouping import finish_although_asked_once
from strata.api import get_facts, get_rows
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.copying.staging import MARK_NAME, read_snapshot
from strata.checkpoint.verify import verify_store
from strata.data.history import audit_epochs
from strata.launch.coordinator import CoordinatorProcess
from strata.stores import open_store
from tests.support import eventually, kill_together
from tests.support_seaweed import seaweed

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
STEPS, STANDS_AT, DURABLE, SNAPSHOT = 24, 15, 8, 14
"""The script stands still in step 15: step 8 is durable, step 14 in memory."""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    serving = CoordinatorProcess(tmp_path / "coordinator").start()
    yield serving
    serving.stop()


class Agent:
    """A machine of its own: `strata torchrun`, with memory of its own."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], memory: Path, workers: int) -> None:
        self.folder, self.process, self.memory, self.workers = folder, process, memory, workers
        self.meeting = folder.parent
        """Where ranks say that they stand still."""

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def marks(self) -> list[Manifest]:
        # Folders may be removed meanwhile, which `rglob` does not bear.
        folders = [Path(folder) for folder, _, names in os.walk(self.memory) if MARK_NAME in names]
        found = [read_snapshot(folder) for folder in folders]
        return [snapshot.manifest for snapshot in found if snapshot is not None]

    def await_standing(self, ranks: Sequence[int], *, images: int = 1) -> list[int]:
        """The processes of these ranks, which stand still and have their newest snapshot in memory."""
        files = [self.meeting / f"standing-{rank}" for rank in ranks]

        def is_standing() -> bool:
            assert self.process.poll() is None, self.output()
            marked = sum(mark.step == SNAPSHOT for mark in self.marks())
            return all(file.exists() for file in files) and marked >= images

        eventually(is_standing, within_s=LIMIT_S, what=self.output)
        return [int(file.read_text()) for file in files]

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def agent(
    folder: Path,
    kind: str,
    destinations: Sequence[str],
    *,
    workers: int = 2,
    stand_at: int = STANDS_AT,
    flags: Sequence[str] = (),
    **variables: str,
) -> Iterator[Agent]:
    memory = folder / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "strata.cli.main", "torchrun", f"--nproc-per-node={workers}", *flags]
    with open(folder / "output", "a") as output:
        process = subprocess.Popen(
            [
                *(*command, "--max-restarts=0", "-m", "tests.training.finish_script"),
                *(kind, str(folder.parent), str(STEPS), str(stand_at), *destinations),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "STRATA_MEMORY_ROOT": str(memory), **variables},
        )
    try:
        yield Agent(folder, process, memory, workers)
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()


def steps_in(url: str) -> list[int]:
    return sorted(entry.manifest.step for entry in Catalog(open_store(url)).list().entries)


def assert_continues(tmp_path: Path, kind: str, destinations: Sequence[str], *, workers: int = 2) -> None:
    """Another machine, which has nothing in memory, continues at the snapshot and trains every sample exactly once."""
    with agent(tmp_path / "next", kind, destinations, workers=workers, stand_at=0) as following:
        assert following.wait() == 0, following.output()
    assert (tmp_path / "resumed").read_text().startswith(f"{SNAPSHOT} ")
    reports = audit_epochs(destinations[-1], "numbers")
    assert reports
    assert all(report.exact for report in reports), [report.reason for report in reports]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_newest_snapshot_is_durable_after_all_workers_were_killed(tmp_path: Path, kind: str) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with agent(tmp_path / "one", kind, [near, far]) as running:
        images = 2 if kind == "fsdp" else 1
        kill_together(*running.await_standing([0, 1], images=images))
        assert running.wait() != 0
        said = running.output()
    for place in (near, far):
        assert steps_in(place) == [DURABLE, SNAPSHOT], said
        assert f"uploaded step {SNAPSHOT} to " in said
    assert "6 steps saved" in said
    store = open_store(far)
    assert all(verified.is_intact for verified in verify_store(store, Catalog(store).list().entries))
    assert_continues(tmp_path, kind, [near, far])


def test_newest_snapshot_of_a_run_of_its_own_is_durable_after_its_worker_was_killed(tmp_path: Path) -> None:
    """`strata run`: the agent is that of a task, and the coordinator ends with the run."""
    far, memory = str(tmp_path / "far"), tmp_path / "own"
    memory.mkdir()
    script = ROOT / "tests" / "training" / "finish_script.py"
    words = ["run", "--workers=1", "--max-retries=0", f"--data-dir={tmp_path / 'strata'}", str(script)]
    command = [sys.executable, "-m", "strata.cli.main", *words, "ddp", str(tmp_path), str(STEPS)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(
            [*command, str(STANDS_AT), far],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "STRATA_MEMORY_ROOT": str(memory),
                "STRATA_POLICY": "max_restarts_per_hour=1",
                "STAND_FIRST": str(STANDS_AT - 4),
            },
        )
    running = Agent(tmp_path, process, memory, 1)
    running.meeting = tmp_path
    try:
        standing = tmp_path / "standing-0"
        eventually(standing.exists, within_s=LIMIT_S, what=running.output)
        first = int(standing.read_text())
        standing.unlink()
        kill_together(first)
        kill_together(*running.await_standing([0]))  # And there it ends: one restart an hour.
        assert running.wait() == 1, running.output()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    said = running.output()
    assert steps_in(far) == [DURABLE, SNAPSHOT], said
    assert f"uploaded step {SNAPSHOT} to " in said
    assert "6 steps saved" in said


class Asked(BaseException):
    sigval = signal.SIGTERM


@pytest.mark.parametrize("times", [0, 1, 2])
def test_agent_that_is_asked_to_end_while_it_uploads_does_so_when_asked_again(times: int) -> None:
    attempts: list[int] = []

    class Uploading(WorkFinisher):
        def finish(self) -> None:
            attempts.append(len(attempts))
            if len(attempts) <= times:
                raise Asked

    with pytest.raises(Asked) if times else nullcontext():
        finish_although_asked_once(Uploading("", ""))
    assert len(attempts) == min(times + 1, 2)


@pytest.mark.slow
def test_newest_snapshot_is_in_object_storage_after_all_workers_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path / "seaweed") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = "s3://finishing/run"
        open_store("s3://finishing/made").put("k", b"the bucket exists now")
        with agent(tmp_path / "one", "ddp", [bucket]) as running:
            kill_together(*running.await_standing([0, 1]))
            assert running.wait() != 0
        assert steps_in(bucket) == [DURABLE, SNAPSHOT], running.output()
        assert_continues(tmp_path, "ddp", [bucket])


@pytest.mark.slow
def test_without_its_agent_a_snapshot_stays_in_memory(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place]) as running:
        pids = running.await_standing([0, 1])
        running.process.kill()
        running.wait()
        with suppress(ProcessLookupError):
            kill_together(*pids)  # They end with it by themselves.
    assert steps_in(place) == [DURABLE]
    assert SNAPSHOT in {mark.step for mark in running.marks()}


@pytest.mark.slow
def test_agent_uploads_nothing_where_it_was_asked_to_leave_at_once(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place], STRATA_FINISH_SECONDS="0") as running:
        kill_together(*running.await_standing([0, 1]))
        running.wait()
    assert steps_in(place) == [DURABLE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_agents_of_two_machines_finish_together_and_the_coordinator_knows(
    tmp_path: Path, kind: str, coordinator: CoordinatorProcess
) -> None:
    """Of a sharded state each has one part; of one that is not, both have all of it, and one of them saves it."""
    place = str(tmp_path / "checkpoints")
    flags = ["--nnodes=2", f"--rdzv-endpoint={coordinator.address}", "--rdzv-id=both"]
    with (
        agent(
            tmp_path / "one", kind, [place], workers=1, flags=flags, COORDINATOR_ADDR=coordinator.address
        ) as one,
        agent(
            tmp_path / "two", kind, [place], workers=1, flags=flags, COORDINATOR_ADDR=coordinator.address
        ) as other,
    ):
        pids = one.await_standing([0, 1])
        other.await_standing([0, 1])
        kill_together(*pids)
        assert (one.wait(), other.wait()) != (0, 0)
    said = one.output() + other.output()
    assert steps_in(place) == [DURABLE, SNAPSHOT], said
    [row] = [row for row in get_rows(coordinator.api, "/api/checkpoints") if row["step"] == SNAPSHOT]
    assert row["status"] == "completed"
    assert row["metadata"]["saved_by"] == "agent"
    assert "6 steps" in row["reason"]
    found = get_facts(coordinator.api, f"/api/jobs/{row['job_id']}/safety?step={SNAPSHOT}", having="copies")
    assert [copy["kind"] for copy in found["copies"]] == ["disk"]
    assert_continues(tmp_path, kind, [place])
