"""Two writers of one step: two incarnations, two ranks, two threads. Neither harms the other's checkpoint."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint import Author, CheckpointManager, Memory, Policy
from strata.checkpoint.catalog.naming import step_stem, unique_stem
from strata.shared_memory import job_folder, remove_tree
from strata.stores import open_store
from tests.checkpoint.states import assert_is_step, small_state
from tests.checkpoint.test_policies import SlowStore


def write(folder: Path, job: str, stem: str, writer: int, begin: Any) -> None:
    manager = CheckpointManager(
        folder,
        keep_count=100,
        memory=Memory(job=f"{job}-{writer}"),
        author=Author(worker=f"worker-{writer}"),
        stem=step_stem if stem == "step" else unique_stem,
    )
    begin.wait(300)
    for step in range(10):
        manager.save(small_state(step, elements=1000 * (writer + 1)), step=step)
    manager.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stem", ["unique", "step"])
def test_racing_processes_all_end_with_intact_checkpoints(folder: Path, job: str, stem: str) -> None:
    context = multiprocessing.get_context("spawn")
    begin = context.Event()
    writers = [context.Process(target=write, args=(folder, job, stem, n, begin)) for n in range(2)]
    for writer in writers:
        writer.start()
    begin.set()
    for writer in writers:
        writer.join(500)  # Each has to import everything first.
        assert writer.exitcode == 0
    with CheckpointManager(folder, memory=Memory(job=job), stem=step_stem) as manager:
        found = manager.all_checkpoints()
        assert len(found) == 20
        for info in found:
            state = manager.load(checkpoint_id=info.checkpoint_id)
            assert_is_step(state, info.step)
            elements = len(next(iter(state["model"].values())))
            assert info.author == f"worker-{elements // 1000 - 1}"
    assert not list(folder.glob("*.claim"))
    if stem == "step":
        plain = {path.name for path in folder.glob("checkpoint_step_????????.pt")}
        assert plain == {f"checkpoint_step_{step:08d}.pt" for step in range(10)}
    for n in range(2):
        remove_tree(job_folder(f"{job}-{n}"))


def test_a_slow_writer_does_not_overwrite_the_one_that_took_its_place(folder: Path, job: str) -> None:
    """The old incarnation hangs in its upload; the new one saves the same step; then the old one wakes up."""
    slow = SlowStore(open_store(folder))
    old = CheckpointManager(
        slow, memory=Memory(job=f"{job}-old"), stem=step_stem, author=Author(generation=1)
    )
    hanging = old.save(small_state(7, elements=100), step=7)
    with CheckpointManager(
        folder, memory=Memory(job=f"{job}-new"), stem=step_stem, author=Author(generation=2)
    ) as new:
        fresh = new.save(small_state(7, elements=200), step=7).result(30)
        slow.may_write.set()
        stale = hanging.result(30)
        assert stale.path != fresh.path
        restored = new.restore()
        assert (
            restored.info.checkpoint_id == fresh.checkpoint_id
        )  # The newer generation is what training resumes from.
        assert len(restored.state["model"]["layer0.weight"]) == 200
        assert len(new.load(checkpoint_id=stale.checkpoint_id)["model"]["layer0.weight"]) == 100
    old.close()


def test_saves_from_several_threads_are_all_intact(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, keep_count=50, memory=memory, policy=Policy(on_error="fail")) as manager:
        threads = [
            threading.Thread(
                target=lambda first=first: [
                    manager.save(small_state(first + n), step=first + n) for n in range(5)
                ]
            )
            for first in (0, 100, 200)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert manager.wait_pending(60)
        for info in manager.all_checkpoints():
            assert_is_step(manager.load(checkpoint_id=info.checkpoint_id), info.step)
        assert len(manager.all_checkpoints()) == 15


def test_a_checkpoint_that_is_being_read_is_not_removed(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, keep_count=1, memory=memory) as manager:
        first = manager.save(b"first", step=1).result(30)
        with manager._being_read(first.checkpoint_id):
            for step in range(2, 5):
                manager.save(b"later", step=step).result(30)
            assert manager.load(checkpoint_id=first.checkpoint_id) == b"first"
        manager.save(b"last", step=9).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [9]


def test_after_going_back_the_new_line_is_what_training_falls_back_along(
    folder: Path, memory: Memory
) -> None:
    with CheckpointManager(folder, keep_count=3, memory=memory) as manager:
        for step in (10, 20, 30):
            manager.save(small_state(step), step=step).result(30)
        assert manager.restore(step=10).info.step == 10
        manager.save(small_state(15), step=15).result(30)
    with CheckpointManager(folder, keep_count=3, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints()] == [15, 10, 30, 20]
        for step in (16, 17):
            manager.save(small_state(step), step=step).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [17, 16, 15]


def test_looking_at_an_older_checkpoint_gives_nothing_up(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, keep_count=4, memory=memory) as manager:
        for step in (10, 20, 30):
            manager.save(small_state(step), step=step).result(30)
        assert_is_step(manager.load(step=10), 10)
        manager.save(small_state(40), step=40).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [40, 30, 20, 10]
