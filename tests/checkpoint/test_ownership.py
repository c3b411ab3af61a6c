"""Who holds images: known by a lock, across process namespaces, and fenced by generations."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strata import locks, shared_memory
from strata.checkpoint import CheckpointManager, Memory, SaveFailed
from strata.checkpoint.copying.staging import Staging, find_snapshots
from strata.checkpoint.errors import Superseded
from strata.locks import LOCK_NAME
from strata.processes import Process, this_process
from strata.shared_memory import job_folder, remove_dead_jobs
from tests.checkpoint.states import assert_is_step, small_state
from tests.support_programs import program

ISOLATION = ("--pid", "--fork", "--kill-child", "--mount-proc")
TRAINER = """
import os, sys, time
from strata.checkpoint import CheckpointManager, Memory
from tests.checkpoint.states import small_state
job, root, step, loader = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "loader"
manager = CheckpointManager([], memory=Memory(job=job, root=root))
manager.save(small_state(step), step=step).result(30)
child = os.fork() if loader else 0
if loader and child == 0:
    time.sleep(600)  # Like a data loader's worker that has not noticed yet that its parent is dead.
print(child, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


def can_isolate() -> bool:
    try:
        return (
            subprocess.run(
                [program("unshare"), *ISOLATION, "true"], capture_output=True, timeout=30
            ).returncode
            == 0
        )
    except OSError:
        return False


class Trainer:
    """A process that has saved a step to memory; `die` ends it by SIGKILL, from within."""

    def __init__(
        self, job: str, root: Path, step: int, *, isolated: bool = False, loader: bool = False
    ) -> None:
        arguments = [sys.executable, "-c", TRAINER, job, str(root), str(step), "loader" if loader else ""]
        if isolated:
            arguments = [program("unshare"), *ISOLATION, *arguments]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.child = int(self._process.stdout.readline())

    def die(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("now\n")
        self._process.stdin.flush()
        self._process.wait(60)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)


@pytest.fixture(params=["same namespace", "another namespace"])
def isolated(request: pytest.FixtureRequest) -> bool:
    is_isolated: bool = request.param == "another namespace"
    if is_isolated and not can_isolate():
        pytest.skip("process namespaces cannot be made here (are you root?)")
    return is_isolated


def test_a_live_holder_keeps_its_images_and_a_dead_ones_are_taken_over_at_once(
    tmp_path: Path, isolated: bool
) -> None:
    memory = Memory(job="job", root=str(tmp_path))
    with Trainer("job", tmp_path, 3, isolated=isolated) as trainer:
        with CheckpointManager([], memory=memory) as manager:
            assert manager.get_latest() is None
            manager.save(small_state(9), step=9).result(30)
        assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == []
        assert [snapshot.manifest.step for snapshot in find_snapshots("job", root=tmp_path)] == [3]
        trainer.die()
        with CheckpointManager([], memory=memory) as manager:
            assert_is_step(manager.load(), 3)
    assert list(tmp_path.iterdir()) == []


def test_a_dead_jobs_images_are_removed_whatever_namespace_it_lived_in(
    tmp_path: Path, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own owner, whose end an observer elsewhere cannot see: the longer grace counts then.
    monkeypatch.setattr(shared_memory, "LONG_GRACE_S", -1.0)
    with Trainer("job", tmp_path, 3, isolated=isolated) as trainer:
        assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == []
        trainer.die()
    assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == ["job"]
    assert list(tmp_path.iterdir()) == []


def test_the_inside_sees_a_live_holder_outside(tmp_path: Path) -> None:
    if not can_isolate():
        pytest.skip("process namespaces cannot be made here (are you root?)")
    with CheckpointManager([], memory=Memory(job="job", root=str(tmp_path))) as outside:
        outside.save(small_state(1), step=1).result(30)
        with Trainer("job", tmp_path, 2, isolated=True) as trainer:
            trainer.die()
        assert_is_step(outside.load(), 1)
        assert [info.step for info in outside.snapshots()] == [1]


def test_a_worker_that_outlives_its_rank_does_not_keep_its_images(tmp_path: Path) -> None:
    with Trainer("job", tmp_path, 3, loader=True) as trainer:
        trainer.die()
        os.kill(trainer.child, 0)  # It lives.
        try:
            with CheckpointManager([], memory=Memory(job="job", root=str(tmp_path))) as manager:
                assert_is_step(manager.load(), 3)
        finally:
            os.kill(trainer.child, 9)


def test_looking_at_what_this_process_holds_lets_go_of_nothing(tmp_path: Path) -> None:
    one, other = Staging("job", root=tmp_path), Staging("job", root=tmp_path)
    one.open()
    (lock,) = one._locks.values()
    other.open()  # Looks through all folders of the job.
    assert [holder.folder for holder in other.live_holders()] == [lock.folder]
    assert locks.take(lock.folder) is None
    remove_dead_jobs(root=tmp_path, grace_s=-1.0)
    with multiprocessing.get_context("spawn").Pool(1) as elsewhere:
        assert elsewhere.apply(locks.is_held, (lock.folder,)) is True
        one.close(keep=False)
        assert elsewhere.apply(locks.is_held, (lock.folder,)) is None
    other.close()
    assert list(tmp_path.iterdir()) == []


def _child_closes_everything(one: Staging) -> None:
    one.close()
    os.closerange(3, 256)


def test_a_fork_takes_no_lock_along_and_drops_none(tmp_path: Path) -> None:
    one = Staging("job", root=tmp_path)
    one.open()
    (lock,) = one._locks.values()
    child = multiprocessing.get_context("fork").Process(target=_child_closes_everything, args=(one,))
    child.start()
    child.join(60)
    with multiprocessing.get_context("spawn").Pool(1) as elsewhere:
        assert elsewhere.apply(locks.is_held, (lock.folder,)) is True
    one.close()


# What version 0.1 left: folders without a lock, named after a process.


def left_by_0_1(root: Path, token: str, *, age_s: float = 0.0) -> Path:
    memory = Memory(job="job", root=str(root))
    manager = CheckpointManager([], memory=memory)
    manager.save(small_state(5), step=5).result(30)
    manager.close(keep_memory=True)
    (folder,) = job_folder("job", root=root).iterdir()
    old = folder.rename(folder.with_name(token))
    (old / LOCK_NAME).unlink()
    (old / "owner").write_text(token.partition(".")[0])
    for path in [*old.rglob("*"), old, old.parent]:
        os.utime(path, (time.time() - age_s,) * 2)
    return old


def dead_process() -> str:
    mine = this_process()
    return Process(machine=mine.machine, pid=mine.pid, started_ticks=mine.started_ticks - 1).token + ".0"


@pytest.mark.parametrize("name", ["left-0123456789", "of a dead process"])
def test_what_version_0_1_left_is_taken_over(tmp_path: Path, name: str) -> None:
    left_by_0_1(tmp_path, dead_process() if name == "of a dead process" else name)
    with CheckpointManager([], memory=Memory(job="job", root=str(tmp_path))) as manager:
        assert_is_step(manager.load(), 5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("days", [0, 2])
def test_what_version_0_1_left_in_a_container_that_has_ended_is_removed_after_a_day(
    tmp_path: Path, days: int
) -> None:
    left_by_0_1(tmp_path, "ffffff-1-1.0", age_s=days * 86_400.0)
    assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == (["job"] if days else [])


# Generations.


def test_an_older_generation_is_refused_and_marks_nothing_more(tmp_path: Path) -> None:
    old, new = (CheckpointManager([], memory=Memory(job="job", root=str(tmp_path))) for _ in range(2))
    old._images().fence(3)
    old.save(small_state(1), step=1).result(30)
    new._images().fence(4)
    new.save(small_state(2), step=2).result(30)
    with pytest.raises(SaveFailed, match="generation 4 of this run has started") as caught:
        old.save(small_state(3), step=3).result(30)
    assert isinstance(caught.value.__cause__, Superseded)
    assert (caught.value.__cause__.generation, caught.value.__cause__.newest) == (3, 4)
    assert sorted(snapshot.manifest.step for snapshot in find_snapshots("job", root=tmp_path)) == [1, 2]
    late = Staging("job", root=tmp_path)
    with pytest.raises(Superseded):
        late.fence(3)
    late.fence(4)  # Another process of the same generation.
    for images in (late, new):
        images.close()
    with pytest.raises(SaveFailed):
        old.close()
    assert list(tmp_path.rglob("generation"))  # An older one must not forget a newer.


def test_an_unfenced_process_is_never_refused(tmp_path: Path) -> None:
    fenced = Staging("job", root=tmp_path)
    fenced.fence(7)
    with CheckpointManager([], memory=Memory(job="job", root=str(tmp_path))) as plain:
        plain._images().fence(0)
        plain.save(small_state(1), step=1).result(30)
    fenced.close()
    assert list(tmp_path.iterdir()) == []


def test_the_record_outlives_a_crash_and_a_kept_memory(tmp_path: Path) -> None:
    first = CheckpointManager([], memory=Memory(job="job", root=str(tmp_path)))
    first._images().fence(5)
    first.save(small_state(1), step=1).result(30)
    first.close(keep_memory=True)
    second = Staging("job", root=tmp_path)
    with pytest.raises(Superseded) as caught:
        second.fence(4)
    assert caught.value.newest == 5
    second.fence(6)
    second.close()
    assert list(tmp_path.iterdir()) == []


def race(job: str, root: Path, numbers: list[int], outcome: Any) -> None:
    images = Staging(job, root=root)
    for number in numbers:
        with contextlib.suppress(Superseded):
            images.fence(number)
        outcome.put(images._fence.newest() >= number)
    images.close(keep=True)


def test_generations_that_start_together_leave_the_newest_on_record(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    outcome = fork.Queue()
    some = [
        fork.Process(target=race, args=("job", tmp_path, list(range(first, 200, 3)), outcome))
        for first in (1, 2, 3)
    ]
    holder = Staging("job", root=tmp_path)
    holder.open()
    for process in some:
        process.start()
    seen = list(itertools.islice(iter(outcome.get, None), len(range(1, 200))))
    for process in some:
        process.join(60)
    assert all(seen)
    assert holder._fence.newest() == 199
    holder.fence(199)
    holder.close()


def test_holders_say_who_they_are_and_how_they_were_started(tmp_path: Path) -> None:
    one, other = Staging("job", root=tmp_path, launch="torchrun train.py"), Staging("job", root=tmp_path)
    one.open()
    (holder,) = other.live_holders()
    assert (holder.token, holder.pid) == (this_process().token, os.getpid())
    assert "torchrun train.py" in str(holder)
    assert holder.host in str(holder)
    assert one.live_holders() == []
    one.close()
    assert other.live_holders() == []


def test_an_owner_file_that_cannot_be_read_still_names_the_process(tmp_path: Path) -> None:
    one, other = Staging("job", root=tmp_path), Staging("job", root=tmp_path)
    one.open()
    (lock,) = one._locks.values()
    for text in ("", "abc", "abc\n[]", "abc\n" + json.dumps({"token": 1})):
        (lock.folder / "owner").write_text(text)
        assert [holder.token for holder in other.live_holders()] == [this_process().token]
    one.close()


def test_the_first_process_of_a_namespace_is_its_own_parent() -> None:
    if not can_isolate():
        pytest.skip("process namespaces cannot be made here (are you root?)")
    script = "from strata.processes import *; assert parent_process() == this_process()"
    command = [program("unshare"), *ISOLATION, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
