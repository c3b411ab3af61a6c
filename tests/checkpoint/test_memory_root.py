"""Where images live: below the root that was named, else in shared memory, else on disk; and what no root can hold."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import shared_memory
from strata.agent.trace import Footprints, last_footprint, note_rendezvous
from strata.checkpoint import CheckpointError, CheckpointManager, Memory, MemoryLimitExceeded, SaveFailed
from strata.checkpoint.copying.staging import Staging, find_snapshots
from strata.checkpoint.image.layout import prepare
from strata.shared_memory import folders_of, forget_jobs, job_folder, memory_root, memory_roots, run_folder
from tests.checkpoint.states import assert_is_step, small_state
from tests.stores.mounts import small_tmpfs
from tests.support_programs import program

IMAGE_BYTES = prepare(small_state(1), None).plan.bound_bytes
"""Of a small state."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def shm(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shared memory with space for one image, and a disk beside it, both of which nobody has named."""
    with small_tmpfs(tmp_path / "shm", size_bytes=IMAGE_BYTES * 3 // 2) as at:
        monkeypatch.delenv("STRATA_MEMORY_ROOT", raising=False)
        monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", at)
        monkeypatch.setattr(shared_memory, "_DISK", disk)
        yield at


def images_in(root: Path) -> int:
    return len(list(root.rglob("archive.pt")))


def test_the_root_is_the_one_named_by_the_caller_else_by_the_environment_else_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STRATA_MEMORY_ROOT", raising=False)
    assert memory_root() == Path("/dev/shm")
    assert len(memory_roots()) == 2
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path))  # Decided at each call, not at import.
    assert memory_roots() == [tmp_path]
    assert memory_root("/elsewhere") == Path("/elsewhere")
    assert all(folder.is_relative_to(tmp_path) for folder in folders_of("job"))
    monkeypatch.setenv("STRATA_MEMORY_ROOT", "")
    assert memory_root() == Path("/dev/shm")


def test_agents_with_different_roots_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("one", "other")):
        monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path / name))
        assert last_footprint("job") is None
        footprints = Footprints("job", rank=0)
        footprints.leave(number + 1, 1)
        footprints.close()
        note_rendezvous("job", 1.0, 2.0)
        with CheckpointManager([], memory=Memory(job="job")) as manager:
            assert manager.get_latest() is None
            manager.save(small_state(number), step=number).result(30)
            assert find_snapshots("job")[0].path.is_relative_to(tmp_path / name)
            manager.close(keep_memory=True)
        found = last_footprint("job")
        assert found is not None
        assert found.step == number + 1
    forget_jobs("job")
    assert not run_folder("job").exists()
    monkeypatch.setenv("STRATA_MEMORY_ROOT", str(tmp_path / "one"))
    with CheckpointManager([], memory=Memory(job="job")) as manager:
        assert_is_step(manager.load(), 0)


def test_images_that_do_not_fit_in_shared_memory_live_on_disk_and_are_found_there_again(
    shm: Path, disk: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(folder, memory=Memory(job="job"))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            info = manager.save(small_state(step), step=step).result(30)
            assert info.tiers == ("MEMORY", "NVME")
    assert (images_in(shm), images_in(disk)) == (0, 2)
    (warning,) = [record.message for record in caplog.records]
    for word in ("do not fit", str(shm), str(disk), "--shm-size", "STRATA_MEMORY_ROOT"):
        assert word in warning
    manager.close(keep_memory=True)
    with CheckpointManager([], memory=Memory(job="job")) as again:
        assert_is_step(again.load(), 4)
        again.save(small_state(5), step=5).result(30)
        assert_is_step(again.load(), 5)
    assert images_in(disk) == 0
    assert [path for root in (shm, disk) for path in root.iterdir()] == []


def test_a_state_that_grows_out_of_shared_memory_moves_to_the_disk(shm: Path, disk: Path) -> None:
    with CheckpointManager([], memory=Memory(job="job")) as manager:
        for step in (1, 2):
            manager.save(small_state(step, elements=500), step=step).result(30)
        assert (images_in(shm), images_in(disk)) == (2, 0)
        manager.save(small_state(3), step=3).result(30)
        assert (images_in(shm), images_in(disk)) == (1, 1)
        assert [info.step for info in manager.snapshots()] == [3, 2]
        manager.save(small_state(4), step=4).result(30)
        assert (images_in(shm), images_in(disk)) == (0, 2)
        for step in (3, 4):
            assert_is_step(manager.load(step=step), step)
        manager.save(small_state(5, elements=500), step=5).result(30)
        assert (images_in(shm), images_in(disk)) == (1, 1)
        assert_is_step(manager.load(), 5)
    assert [path for root in (shm, disk) for path in root.iterdir()] == []


def test_images_left_on_disk_are_forgotten_with_the_job(shm: Path, disk: Path) -> None:
    manager = CheckpointManager([], memory=Memory(job=shared_memory.folder_name("job")))
    manager.save(small_state(1), step=1).result(30)
    manager.close(keep_memory=True)
    assert images_in(disk) == 1
    forget_jobs("job")
    assert [path for root in (shm, disk) for path in root.iterdir()] == []


def test_where_one_image_fits_there_is_one(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_tmpfs(tmp_path / "shm", size_bytes=IMAGE_BYTES * 3 // 2) as at:
        with CheckpointManager(folder, memory=Memory(job="job", root=str(at))) as manager:
            for step in range(1, 5):
                assert manager.save(small_state(step), step=step).result(30).tiers == ("MEMORY", "NVME")
                assert [info.step for info in manager.snapshots()] == [step]
            assert images_in(at) == 1
            assert_is_step(manager.load(tiers=["MEMORY"]), 4)
        assert list(at.iterdir()) == []
    assert caplog.text.count("no space for two images") == 1


def test_one_image_that_is_busy_is_waited_for(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm", size_bytes=IMAGE_BYTES * 3 // 2) as at:
        images = Staging("job", root=at)
        plan = prepare(small_state(1), None).plan
        only = images.acquire(plan, timeout_s=0)
        assert only is not None
        assert images.acquire(plan, timeout_s=0) is None
        images.release(only)
        again = images.acquire(plan, timeout_s=0)
        assert again is only
        images.release(again)
        images.close()


def test_where_no_image_fits_durable_checkpoints_are_still_written(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_tmpfs(tmp_path / "shm", size_bytes=IMAGE_BYTES * 3 // 4) as at:
        with CheckpointManager([folder, tmp_path / "far"], memory=Memory(job="job", root=str(at))) as manager:
            for step in range(1, 5):
                info = manager.save(small_state(step), step=step).result(30)
                assert info.tiers == ("NVME", "NVME")
                assert info.failures == ()
            assert manager.snapshots() == []
            assert_is_step(manager.load(), 4)
            with pytest.raises(SaveFailed, match="required, but only") as caught:
                manager.save(small_state(5), step=5, tiers=["MEMORY"]).result(30)
            assert isinstance(caught.value.__cause__, MemoryLimitExceeded)
            with pytest.raises(SaveFailed):
                manager.raise_failure()
            manager.save(small_state(6, elements=100), step=6).result(30)  # This one does fit.
            assert manager.restore().tier == "MEMORY"
        assert list(at.iterdir()) == []
    assert caplog.text.count("no snapshot in memory is made") == 1


def test_a_disk_that_was_not_configured_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is left for the checkpoints themselves, which may be kept on the same disk."""
    large_bytes = prepare(small_state(1, elements=200_000), None).plan.bound_bytes
    with (
        small_tmpfs(tmp_path / "shm", size_bytes=64 << 10) as shm,
        small_tmpfs(tmp_path / "disk", size_bytes=large_bytes * 3 + (2 << 20)) as disk,
    ):
        monkeypatch.delenv("STRATA_MEMORY_ROOT", raising=False)
        monkeypatch.setattr(shared_memory, "_SHARED_MEMORY", shm)
        monkeypatch.setattr(shared_memory, "_DISK", disk)
        with CheckpointManager(disk / "checkpoints", 1, memory=Memory(job="job")) as manager:
            for step in range(1, 4):
                manager.save(small_state(step, elements=200_000), step=step).result(30)
            assert images_in(disk) == 1


TENSOR_BYTES = prepare(small_state(1), None).plan.tensor_bytes


def test_what_never_fits_an_explicit_budget_is_an_error(folder: Path, job: str) -> None:
    with CheckpointManager(folder, memory=Memory(job=job, budget_bytes=TENSOR_BYTES - 1)) as manager:
        with pytest.raises(SaveFailed, match="required, but only"):
            manager.save(small_state(1), step=1).result(30)
        with pytest.raises(SaveFailed):
            manager.raise_failure()


def test_older_snapshots_make_way_within_a_budget(job: str) -> None:
    memory = Memory(job=job, images=4, budget_bytes=TENSOR_BYTES + IMAGE_BYTES)
    with CheckpointManager([], memory=memory) as manager:
        for step in range(1, 5):
            manager.save(small_state(step), step=step).result(30)
            assert [info.step for info in manager.snapshots()] == [step, step - 1][: min(step, 2)]


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_a_root_that_cannot_be_used_is_named(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        root = tmp_path / "file"
        root.write_text("not a folder")
    else:
        root = Path("/proc/nowhere")
    with pytest.raises(CheckpointError, match=str(root)) as caught:
        Staging("job", root=root).open()
    assert "STRATA_MEMORY_ROOT" in caught.value.hint


SMALL = ("--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")


def test_in_a_container_with_a_small_dev_shm_a_killed_process_finds_its_snapshot_again(folder: Path) -> None:
    """As Docker starts one: nothing was chosen, and /dev/shm is too small."""
    if subprocess.run([program("unshare"), *SMALL, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces cannot be made here (are you root?)")
    job = f"test-{uuid.uuid4().hex[:12]}"
    script = textwrap.dedent(
        """
        import os, sys
        from strata.checkpoint import CheckpointManager, Memory
        from tests.checkpoint.states import assert_is_step, small_state
        manager = CheckpointManager(sys.argv[1], memory=Memory(job=sys.argv[2]))
        if sys.argv[3] == "first":
            manager.save(small_state(6), step=6).result(60)
            manager.save(small_state(7), step=7, tiers=["MEMORY"]).result(60)
            os.kill(os.getpid(), 9)
        restored = manager.restore()
        assert_is_step(restored.state, 7)
        assert restored.tier == "MEMORY", restored
        manager.close()
        """
    )
    environment = {name: value for name, value in os.environ.items() if name != "STRATA_MEMORY_ROOT"}
    for turn, code in (("first", -9), ("second", 0)):
        done = subprocess.run(
            [program("unshare"), *SMALL, sys.executable, "-c", script, str(folder), job, turn],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert done.returncode == code, done.stderr
    assert not any(job_folder(job, root=root).exists() for root in memory_roots())


def test_where_no_name_in_shared_memory_is_free_the_disk_is_used(
    shm: Path, disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(
        "HOME", str(tmp_path / "nowhere")
    )  # No key can be kept, from which another name would follow.
    taken = shared_memory.images_folder(shm)
    taken.mkdir()
    os.chown(taken, 12345, 12345)
    with CheckpointManager([], memory=Memory(job="job")) as manager:
        manager._images().fence(1)
        manager.save(small_state(1, elements=100), step=1).result(30)
        assert images_in(disk) == 1
    assert list(disk.iterdir()) == []
    assert "belongs to uid 12345" in caplog.text


def test_a_disk_that_belongs_to_another_user_costs_the_snapshot_alone(
    shm: Path, disk: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    taken = shared_memory.images_folder(disk)
    taken.mkdir()
    os.chown(taken, 12345, 12345)
    with CheckpointManager(folder, memory=Memory(job="job")) as manager:
        for step in range(1, 4):
            assert "NVME" in manager.save(small_state(step), step=step).result(30).tiers
