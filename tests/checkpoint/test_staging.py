"""Images in shared memory: reused, bounded, taken over from the dead, and given back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from strata import shared_memory
from strata.checkpoint import (
    CheckpointError,
    CheckpointManager,
    Damaged,
    LoadFailed,
    Memory,
    MemoryLimitExceeded,
    SaveFailed,
)
from strata.checkpoint.copying.staging import ImageBuffer, Staging, find_snapshots, left_images
from strata.checkpoint.image.layout import prepare
from strata.processes import Process, this_process
from strata.shared_memory import job_folder, remove_dead_jobs, remove_tree
from strata.stores.memory import MemoryStore
from tests.checkpoint.states import assert_is_step, small_state

TRAINER = """
import sys, time
from strata.checkpoint import CheckpointManager, Memory
from tests.checkpoint.states import small_state
manager = CheckpointManager([], memory=Memory(job=sys.argv[1], root=sys.argv[2] or None))
for step in range(1, 4):
    manager.save(small_state(step), step=step).result(30)
print("saved", flush=True)
time.sleep(600)
"""


def trainer(job: str, *, root: Path | None = None) -> subprocess.Popen[str]:
    """A process that has made snapshots of steps 1 to 3 in memory, and waits to be killed."""
    command = [sys.executable, "-c", TRAINER, job, str(root or "")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    return process


def killed_trainer(job: str, *, root: Path | None = None) -> None:
    with trainer(job, root=root) as process:
        process.kill()


def test_after_a_kill_the_next_process_finds_the_newest_snapshot(job: str, memory: Memory) -> None:
    killed_trainer(job)
    assert [snapshot.manifest.step for snapshot in find_snapshots(job)] == [3, 2]
    with CheckpointManager([], memory=memory) as manager:
        restored = manager.restore()
        assert restored.tier == "MEMORY"
        assert_is_step(restored.state, 3)
        manager.save(small_state(4), step=4).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [4, 3]


def test_pages_of_a_killed_process_are_used_again_for_the_same_structure(job: str, memory: Memory) -> None:
    killed_trainer(job)
    before = {path.stat().st_ino for path in job_folder(job).rglob("archive.pt")}
    with CheckpointManager([], memory=memory) as manager:
        manager.restore()
        for step in (4, 5):
            manager.save(small_state(step), step=step).result(30)
            assert_is_step(manager.load(), step)
        assert {path.stat().st_ino for path in job_folder(job).rglob("archive.pt")} == before
        manager.save(small_state(6, tensors=2), step=6).result(30)
        assert_is_step(manager.load(), 6)
        assert {path.stat().st_ino for path in job_folder(job).rglob("archive.pt")} != before


def test_a_running_process_keeps_its_images_to_itself(job: str, memory: Memory) -> None:
    with trainer(job) as process:
        with CheckpointManager([], memory=memory) as manager:
            assert manager.get_latest() is None
            manager.save(small_state(9), step=9).result(30)
        assert [snapshot.manifest.step for snapshot in find_snapshots(job)] == [3, 2]
        process.kill()
    remove_tree(job_folder(job))


def test_two_managers_of_one_process_have_images_of_their_own(job: str) -> None:
    with (
        CheckpointManager([], memory=Memory(job=job)) as one,
        CheckpointManager([], memory=Memory(job=job)) as other,
    ):
        one.save(small_state(1), step=1).result(30)
        other.save(small_state(2), step=2).result(30)
        assert_is_step(one.load(), 1)
        assert_is_step(other.load(), 2)


def test_images_are_removed_after_close(job: str, memory: Memory) -> None:
    manager = CheckpointManager([], memory=memory)
    manager.save(small_state(1), step=1).result(30)
    assert job_folder(job).exists()
    manager.close()
    assert not job_folder(job).exists()


def come_and_go(job: str, root: Path, rounds: int) -> None:
    for _ in range(rounds):
        images = Staging(job, root=root)
        images.open()
        assert all(lock.folder.is_dir() for lock in images._locks.values()), "taken away by another"
        images.close()


def test_jobs_that_come_and_go_leave_nothing_and_take_nothing_from_each_other(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    some = [fork.Process(target=come_and_go, args=(job, tmp_path, 500)) for job in ("one", "one", "other")]
    for process in some:
        process.start()
    for process in some:
        process.join(120)
    assert [process.exitcode for process in some] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_images_stay_after_close_when_asked_to(job: str, memory: Memory) -> None:
    manager = CheckpointManager([], memory=memory)
    manager.save(small_state(1), step=1).result(30)
    manager.close(keep_memory=True)
    with CheckpointManager([], memory=memory) as again:
        assert_is_step(again.load(), 1)


def test_images_removed_from_under_a_save_cost_the_snapshot_and_nothing_else(
    folder: Path, job: str, memory: Memory
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step).result(30)
        remove_tree(job_folder(job))
        for step in (3, 4, 5):
            assert "NVME" in manager.save(small_state(step), step=step).result(30).tiers
        assert manager.restore().tier == "MEMORY"
        assert_is_step(manager.load(), 5)


def test_there_are_never_more_than_two_images(folder: Path, job: str, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        for step in range(6):
            manager.save(small_state(step), step=step)
            assert len(list(job_folder(job).rglob("archive.pt"))) <= 2
        manager.wait_pending(30)


def test_pages_are_reused_from_save_to_save(job: str, memory: Memory) -> None:
    with CheckpointManager([], memory=memory) as manager:
        for step in range(2):
            manager.save(small_state(step), step=step).result(30)
        before = {path: path.stat().st_ino for path in job_folder(job).rglob("archive.pt")}
        for step in range(2, 6):
            manager.save(small_state(step), step=step).result(30)
        assert {path: path.stat().st_ino for path in job_folder(job).rglob("archive.pt")} == before


def test_the_newest_snapshot_stays_intact_while_the_next_one_is_written(job: str, memory: Memory) -> None:
    with CheckpointManager([], memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step).result(30)
        staging = manager._images()
        buffer = staging.acquire(prepare(small_state(3), None).plan, timeout_s=0)
        assert buffer is not None
        buffer.begin()
        assert [snapshot.manifest.step for snapshot in find_snapshots(job)] == [2]
        staging.release(buffer)


@pytest.mark.parametrize("deleted", ["its mark", "its file", "its folder"])
def test_a_snapshot_that_somebody_has_deleted_does_not_count_as_the_one_that_is_kept(
    job: str, memory: Memory, deleted: str
) -> None:
    with CheckpointManager([], memory=memory) as manager:
        for step in (1, 2):
            manager.save(small_state(step), step=step).result(30)
        newest, older = find_snapshots(job)
        if deleted == "its mark":
            newest.path.with_name("mark.json").unlink()
        elif deleted == "its file":
            newest.path.unlink()
        else:
            remove_tree(newest.path.parent)
        plan = prepare(small_state(3), None).plan
        images = manager._images()
        ready = images.readiness(plan)
        assert ready.held == ready.kept == {older.manifest.checkpoint_id}
        buffer = images.acquire(plan, timeout_s=0)
        assert buffer is not None
        buffer.begin()
        assert [snapshot.manifest.step for snapshot in find_snapshots(job)] == [1]
        images.release(buffer)


def test_an_image_that_is_filled_again_while_it_is_looked_at_is_no_error(
    job: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of another thread unmarks it between two reads of its mark."""

    size_bytes = ImageBuffer.size_bytes.__get__

    def unmarked_meanwhile(buffer: ImageBuffer) -> int:
        buffer.marked = None
        return int(size_bytes(buffer))

    with CheckpointManager([], memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        monkeypatch.setattr(ImageBuffer, "size_bytes", property(unmarked_meanwhile))
        manager.save(small_state(2), step=2).result(30)


def test_a_state_larger_than_the_budget_is_refused_and_what_was_kept_stays(job: str) -> None:
    memory = Memory(job=job, budget_bytes=1 << 20)
    with CheckpointManager([], memory=memory) as manager:
        manager.save(small_state(1, elements=1000), step=1).result(30)
        handle = manager.save(small_state(2, elements=1_000_000), step=2)
        with pytest.raises(
            SaveFailed, match=r"Cannot save snapshot: 15\.\dMB required, but only 1\.0MB available"
        ):
            handle.result(30)
        assert isinstance(handle.exception().__cause__, MemoryLimitExceeded)  # type: ignore[union-attr]
        with pytest.raises(SaveFailed):
            manager.wait_pending()
        assert_is_step(manager.load(), 1)


def test_the_budget_is_for_all_images_together(job: str) -> None:
    plan = prepare(small_state(1), None).plan
    staging = Staging(job, budget_bytes=2 * plan.tensor_bytes - 1)
    first = staging.acquire(plan, timeout_s=0)
    assert first is not None
    assert staging.acquire(plan, timeout_s=0) is None
    staging.release(first)
    second = staging.acquire(plan, timeout_s=0)
    assert second is not None
    staging.release(second)
    staging.close()


def test_an_image_under_way_is_waited_for(job: str) -> None:
    staging = Staging(job, images=1)
    plan = prepare(small_state(1), None).plan
    buffer = staging.acquire(plan, timeout_s=0)
    assert buffer is not None
    assert staging.acquire(plan, timeout_s=0.01) is None
    threading.Timer(0.05, staging.release, [buffer]).start()
    assert staging.acquire(plan, timeout_s=30) is buffer
    staging.release(buffer)
    staging.close()


# Jobs that run beside the tests may be dead for a moment, before they are started again: a root of their own.


def test_a_dead_jobs_images_are_removed_after_a_grace_and_not_before(tmp_path: Path) -> None:
    killed_trainer("job", root=tmp_path)
    assert remove_dead_jobs(root=tmp_path) == []
    assert find_snapshots("job", root=tmp_path)
    assert remove_dead_jobs(root=tmp_path, grace_s=0.0) == ["job"]
    assert not job_folder("job", root=tmp_path).exists()


def test_the_images_of_a_job_whose_launcher_lives_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")  # The owner is then the parent: this test.
    killed_trainer("job", root=tmp_path)
    assert remove_dead_jobs(root=tmp_path, grace_s=0.0) == []
    assert find_snapshots("job", root=tmp_path)


def test_a_job_that_goes_while_the_dead_are_looked_for_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        job_folder(name, root=tmp_path).mkdir(parents=True)
    look, seen = shared_memory._job_is_dead, list[str]()

    def look_too_late(job: Path, grace_s: float) -> bool:
        if not seen:
            remove_tree(job)
        seen.append(job.name)
        return look(job, grace_s)

    monkeypatch.setattr(shared_memory, "_job_is_dead", look_too_late)
    removed = remove_dead_jobs(root=tmp_path, grace_s=-1.0)
    assert sorted(seen) == ["one", "other"]
    assert removed == seen[1:]


def test_values_of_the_same_job_are_left_alone(tmp_path: Path) -> None:
    """They are no images, and go with the job."""
    store = MemoryStore("job", shm=tmp_path)
    store.put("mark.json", b"a value like another")
    images = Staging("job", root=tmp_path)
    images.open()
    assert images.live_holders() == []
    assert (find_snapshots("job", root=tmp_path), list(left_images(root=tmp_path))) == ([], [])
    images.close()
    assert store.read("mark.json") == b"a value like another"
    killed_trainer("job", root=tmp_path)
    assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == []
    store.release()
    assert remove_dead_jobs(root=tmp_path, grace_s=-1.0) == ["job"]
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_remove_its_parents_images(job: str, memory: Memory) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        child = multiprocessing.get_context("fork").Process(target=manager._images().close)
        child.start()
        child.join(120)
        assert child.exitcode == 0
        assert_is_step(manager.load(), 1)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    staging = Staging("x", root=tmp_path)
    base = job_folder("x", root=tmp_path)
    base.mkdir(parents=True)
    os.chown(base, 12345, 12345)
    for _ in range(2):  # It stays so until somebody does something about it.
        with pytest.raises(CheckpointError, match="belongs to uid 12345"):
            staging.open()


class Interruption:
    """Ctrl-C for one wait of the main thread, sent until it is received: a signal that comes just before a thread lies down
    does not wake it."""

    def __init__(self) -> None:
        self.may_come, self._has_come = threading.Event(), threading.Event()
        self._sender = threading.Thread(target=self._send, args=(threading.get_ident(),))

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.join()
        signal.signal(signal.SIGINT, self._before)

    def _send(self, to_thread: int) -> None:
        assert self.may_come.wait(60)
        while not self._has_come.wait(0.1):
            signal.pthread_kill(to_thread, signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._has_come.is_set():
            self._has_come.set()
            raise KeyboardInterrupt


def test_an_interrupted_wait_for_an_image_leaves_nothing_pending(
    folder: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(folder, memory=Memory(job=job, images=1)) as manager:
        images = manager._images()
        held = images.acquire(prepare(small_state(1), None).plan, timeout_s=0)
        assert held is not None
        wait = images._changed.wait
        with Interruption() as interruption:

            def wait_and_tell(timeout: float | None = None) -> bool:
                interruption.may_come.set()
                return wait(timeout)

            monkeypatch.setattr(images._changed, "wait", wait_and_tell)
            with pytest.raises(KeyboardInterrupt):
                manager.save(small_state(1), step=1)
        assert manager.wait_pending(0)
        images.release(held)
        manager.save(small_state(2), step=2).result(30)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 129])
def test_a_job_name_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="job"):
        job_folder(name)


def test_a_process_that_has_ended_is_distinguished_from_one_that_has_not() -> None:
    mine = this_process()
    assert Process.parse(mine.token) == mine
    assert not mine.has_ended()
    recycled = Process(machine=mine.machine, pid=mine.pid, started_ticks=mine.started_ticks - 1)
    assert recycled.has_ended()
    elsewhere = Process(machine="ffffff", pid=1, started_ticks=1)
    assert not elsewhere.has_ended()


def test_a_zombie_counts_as_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/stat").read_text()
        child = Process(
            machine=this_process().machine,
            pid=process.pid,
            started_ticks=int(status.rpartition(")")[2].split()[19]),
        )
        assert not child.has_ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # Dead, and not yet waited for.
        assert child.has_ended()


def test_a_failed_copy_ends_in_the_handle_and_leaves_the_engine_usable(
    folder: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        with monkeypatch.context() as patch:
            patch.setattr("strata.checkpoint.copying.filling.Filling.copy", fail)
            handle = manager.save(small_state(2), step=2)
        with pytest.raises(SaveFailed, match="device lost"):
            handle.result(30)
        with pytest.raises(SaveFailed, match="device lost"):
            manager.save(small_state(3), step=3)  # Reported once more, at the next call.
        manager.save(small_state(3), step=3).result(30)
        assert [info.step for info in manager.all_checkpoints()] == [3, 1]


def test_images_that_move_while_they_are_looked_for_are_no_error(job: str, memory: Memory) -> None:
    """Ranks that start together take over what a dead one left, each looking while another renames."""
    folder = job_folder(job)
    here, there = folder / "left-a", folder / "left-b"
    (here / "image").mkdir(parents=True)
    done = threading.Event()

    def move() -> None:
        while not done.is_set():
            here.rename(there)
            there.rename(here)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(3_000):
            assert find_snapshots(job) == []
    finally:
        done.set()
        mover.join()
        remove_tree(folder)


# Images that are not what their mark says.


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("damage", ["missing", "empty", "shorter", "longer", "a folder"])
@pytest.mark.parametrize("by", ["this process", "a process that is gone"])
def test_an_image_that_is_not_as_long_as_its_mark_says_is_damaged_and_another_copy_is_used(
    folder: Path, job: str, memory: Memory, damage: str, by: str, into: bool
) -> None:
    manager = CheckpointManager(folder, memory=memory)
    manager.save(small_state(1), step=1).result(30)
    manager.save(small_state(2), step=2).result(30)
    if by == "a process that is gone":
        manager.close(keep_memory=True)
        manager = CheckpointManager(folder, memory=memory)
    image = find_snapshots(job)[0].path
    if damage == "missing":
        image.unlink()
    elif damage == "a folder":
        image.unlink()
        image.mkdir()
    else:
        size_bytes = image.stat().st_size
        os.truncate(image, {"empty": 0, "shorter": size_bytes - 4096, "longer": size_bytes + 4096}[damage])
    with manager:
        target = small_state(0) if into else None
        restored = manager.restore(into=target)
        assert_is_step(restored.state, 2)
        assert restored.tier == "NVME"
        assert "step 2 in MEMORY" in restored.reasons[0]
        with pytest.raises(LoadFailed, match="the image"):
            manager.load(step=2, tiers=["MEMORY"])
        assert_is_step(manager.load(step=1, tiers=["MEMORY"]), 1)
        for step in (3, 4, 5):  # And the image is of use again.
            manager.save(small_state(step), step=step).result(30)
            assert_is_step(manager.load(tiers=["MEMORY"]), step)


def test_a_mark_that_cannot_be_read_is_no_snapshot(
    folder: Path, job: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(folder, memory=memory)
    manager.save(small_state(1), step=1).result(30)
    manager.close(keep_memory=True)
    mark = find_snapshots(job)[0].path.with_name("mark.json")
    mark.unlink()
    mark.mkdir()
    assert find_snapshots(job) == []
    assert "ignored a memory image" in caplog.text
    with CheckpointManager(folder, memory=memory) as again:
        assert again.restore().tier == "NVME"


def test_an_image_that_vanishes_while_it_is_being_read_is_damaged(job: str, memory: Memory) -> None:
    with CheckpointManager([], memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        images = manager._images()
        (snapshot,) = images.snapshots()
        snapshot.path.unlink()
        with images.held(snapshot) as buffer, pytest.raises(Damaged, match="cannot be read"):
            buffer.mapped()
