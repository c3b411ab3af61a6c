"""All workers of a machine are killed and nobody starts them again: its agent makes their newest snapshot durable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from strata.checkpoint import CheckpointManager
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.catalog.runs import claim_key, newest_claim
from strata.checkpoint.copying.staging import MARK_NAME, RECORD_NAME, read_snapshot
from strata.checkpoint.verify import verify_store
from strata.data.history import audit_epochs
from strata.stores import open_store
from tests.support import eventually
from tests.support_seaweed import seaweed

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
STEPS, STANDS_AT, DURABLE, SNAPSHOT = 24, 15, 8, 14
"""The script stands still in step 15: step 8 is durable, step 14 in memory."""


class Agent:
    """A machine of its own: `strata torchrun`, with memory of its own."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], memory: Path, workers: int) -> None:
        self.folder, self.process, self.memory, self.workers = folder, process, memory, workers

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def marks(self) -> list[Manifest]:
        found = [read_snapshot(path.parent) for path in self.memory.rglob(MARK_NAME)]
        return [snapshot.manifest for snapshot in found if snapshot is not None]

    def await_standing(self, ranks: Sequence[int], *, images: int = 1) -> list[int]:
        """The processes of these ranks, which stand still and have their newest snapshot in memory."""
        files = [self.folder.parent / f"standing-{rank}" for rank in ranks]

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


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def assert_continues(tmp_path: Path, kind: str, destinations: Sequence[str], *, workers: int = 2) -> None:
    """Another machine, which has nothing in memory, continues at the snapshot and trains every sample exactly once."""
    with agent(tmp_path / "next", kind, destinations, workers=workers, stand_at=0) as following:
        assert following.wait() == 0, following.output()
    assert (tmp_path / "resumed").read_text().startswith(f"{SNAPSHOT} ")
    reports = audit_epochs(destinations[-1], "numbers")
    assert reports
    assert all(report.exact for report in reports), [report.reason for report in reports]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_newest_snapshot_is_durable_after_all_workers_were_killed(tmp_path: Path, kind: str) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    with agent(tmp_path / "one", kind, [near, far]) as running:
        images = 2 if kind == "fsdp" else 1
        kill(running.await_standing([0, 1], images=images))
        assert running.wait() != 0
        said = running.output()
    for place in (near, far):
        assert steps_in(place) == [DURABLE, SNAPSHOT], said
        assert f"uploaded step {SNAPSHOT} to " in said
    assert "6 steps saved" in said
    store = open_store(far)
    assert all(verified.is_intact for verified in verify_store(store, Catalog(store).list().entries))
    assert_continues(tmp_path, kind, [near, far])


def test_newest_snapshot_is_in_object_storage_after_all_workers_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path / "seaweed") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = "s3://finishing/run"
        with agent(tmp_path / "one", "ddp", [bucket]) as running:
            kill(running.await_standing([0, 1]))
            assert running.wait() != 0
        assert steps_in(bucket) == [DURABLE, SNAPSHOT], running.output()
        assert_continues(tmp_path, "ddp", [bucket])


def test_without_its_agent_a_snapshot_stays_in_memory(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place]) as running:
        pids = running.await_standing([0, 1])
        running.process.kill()
        running.wait()
        with suppress(ProcessLookupError):
            kill(pids)  # They end with it by themselves.
    assert steps_in(place) == [DURABLE]
    assert SNAPSHOT in {mark.step for mark in running.marks()}


def test_newer_generation_is_not_overtaken_by_the_agent(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place]) as running:
        pids = running.await_standing([0, 1])
        store = open_store(place)
        claim = newest_claim(store)
        assert claim is not None
        store.put(claim_key(claim.generation + 1), claim.encode())  # Another start of the run has taken over.
        kill(pids)
        running.wait()
    assert steps_in(place) == [DURABLE]
    assert "generation 2 of the run has started, this is generation 1" in running.output()


def test_changed_image_is_not_uploaded_but_the_one_before_it(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place]) as running:
        pids = running.await_standing([0, 1])
        newest = next(
            path
            for path in running.memory.rglob(MARK_NAME)
            if (found := read_snapshot(path.parent)) is not None and found.manifest.step == SNAPSHOT
        )
        assert (newest.parent / RECORD_NAME).stat().st_mode & 0o077 == 0
        image = next(path for path in newest.parent.iterdir() if path.suffix == ".pt")
        with image.open("r+b") as file:
            file.seek(-5000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        kill(pids)
        running.wait()
    assert steps_in(place) == [DURABLE, SNAPSHOT - 2], running.output()
    manager = CheckpointManager(place)
    assert manager.load(SNAPSHOT - 2)["step"] == SNAPSHOT - 2
    manager.close()


def test_agent_uploads_nothing_where_it_was_told_to_leave_at_once(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    with agent(tmp_path / "one", "ddp", [place], STRATA_FINISH_SECONDS="0") as running:
        kill(running.await_standing([0, 1]))
        running.wait()
    assert steps_in(place) == [DURABLE]
