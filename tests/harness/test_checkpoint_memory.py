"""Snapshots in memory: bounded, kept over a crash, and removed with the job."""

from __future__ import annotations

import gc
import glob
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_harness.checkpoint import CheckpointState, MemorySnapshotBackend
from elastic_harness.checkpoint.memory_snapshot import MemoryLimitExceeded
from elastic_harness.errors import CheckpointError, CheckpointSaveError, ConfigurationError
from strata.shared_memory import images_folder, job_folder, remove_tree
from tests.harness.checkpoint_states import assert_is, state_of

OWN = f"{images_folder()}/{os.getpid()}-*"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(glob.glob(OWN))
    yield
    gc.collect()
    assert set(glob.glob(OWN)) <= before


def megabytes(step: int, count: float) -> CheckpointState:
    return CheckpointState(
        step=step, model_state_dict={"weight": torch.full((int(count * 2**18),), float(step))}
    )


def test_the_newest_comes_back_and_any_other_by_step() -> None:
    with MemorySnapshotBackend(max_snapshots=3) as backend:
        for step in (10, 20, 30):
            backend.save(state_of(step))
        assert_is(backend.load(), 30)
        assert_is(backend.load(10), 10)
        assert_is(backend.load_by_step(20), 20)
        assert backend.load(11) is None


def test_only_the_last_are_kept() -> None:
    with MemorySnapshotBackend(max_snapshots=2) as backend:
        for step in range(5):
            backend.save(state_of(step))
            assert backend.num_snapshots == min(step + 1, 2)
            assert backend.latest_step == step
        assert_is(backend.load(3), 3)
        assert backend.load(2) is None


def test_nothing_is_there_before_and_after() -> None:
    with MemorySnapshotBackend() as backend:
        assert backend.load() is None
        assert (backend.num_snapshots, backend.latest_step, backend.latest_timestamp) == (0, None, None)
        assert backend.get_stats()["num_snapshots"] == 0
        backend.save(state_of(1))
        assert backend.memory_usage_bytes() >= 4000
        stats = backend.get_stats()
        assert (stats["num_snapshots"], stats["latest_step"], stats["oldest_step"]) == (1, 1, 1)
        backend.clear()
        assert backend.load() is None
        assert backend.memory_usage_bytes() == 0
        backend.save(state_of(2))
        assert_is(backend.load(), 2)


def test_a_snapshot_is_a_copy() -> None:
    with MemorySnapshotBackend() as backend:
        state = state_of(1)
        backend.save(state)
        state.model_state_dict["weight"].zero_()
        loaded = backend.load()
        assert_is(loaded, 1)
        assert loaded is not None
        loaded.model_state_dict["weight"].zero_()
        assert_is(backend.load(), 1)


def test_what_cannot_fit_is_refused_and_what_was_there_stays() -> None:
    with MemorySnapshotBackend(max_snapshots=2, max_memory_mb=5) as backend:
        backend.save(megabytes(1, 1))
        backend.save(megabytes(2, 1))
        with pytest.raises(MemoryLimitExceeded) as caught:
            backend.save(megabytes(3, 20))
        assert caught.value.message == "Cannot save snapshot: 20.0MB required, but only 5.0MB available"
        assert isinstance(caught.value, CheckpointError)
        assert (caught.value.required_mb, caught.value.available_mb) == (20, 5)
        assert backend.num_snapshots == 2
        loaded = backend.load()
        assert loaded is not None
        assert loaded.step == 2


def test_older_snapshots_are_evicted_for_a_new_one() -> None:
    with MemorySnapshotBackend(max_snapshots=10, max_memory_mb=5) as backend:
        for step in range(1, 5):
            backend.save(megabytes(step, 2))
            assert backend.latest_step == step
            assert backend.num_snapshots == min(step, 2)
        assert backend.memory_usage_bytes() < 5 * 2**20


def test_full_shared_memory_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_MEMORY_ROOT", "/dev/shm")  # Or a disk would do.
    room = os.statvfs("/dev/shm")
    # Of a file without content: no machine has to have so much memory.
    larger = torch.from_file(
        str(tmp_path / "larger"), shared=True, size=room.f_blocks * room.f_frsize // 4 + 2**20
    )
    with MemorySnapshotBackend() as backend:
        backend.save(state_of(1))
        with pytest.raises(MemoryLimitExceeded, match="required, but only"):
            backend.save(CheckpointState(step=2, model_state_dict={"a": larger}))
        assert_is(backend.load(), 1)


def test_what_no_safe_load_could_bring_back_is_refused_by_name() -> None:
    with MemorySnapshotBackend() as backend:
        with pytest.raises(CheckpointSaveError, match=r"metrics\.when"):
            backend.save(CheckpointState(step=1, metrics={"when": Path("/")}))
        assert backend.num_snapshots == 0


@pytest.mark.parametrize("options", [{"max_snapshots": 0}, {"max_memory_mb": 0}, {"max_memory_mb": -1.0}])
def test_impossible_limits_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        MemorySnapshotBackend(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        MemorySnapshotBackend(**options)  # type: ignore[arg-type]


def test_a_killed_process_leaves_its_snapshot_to_the_next_and_a_clean_end_leaves_nothing() -> None:
    job = f"test-{uuid.uuid4().hex}"
    script = textwrap.dedent(
        """
        import os, signal, sys
        from elastic_harness.checkpoint import MemorySnapshotBackend
        from tests.harness.checkpoint_states import assert_is, state_of
        backend = MemorySnapshotBackend(job=sys.argv[1])
        if sys.argv[2] == "die":
            backend.save(state_of(7))
            os.kill(os.getpid(), signal.SIGKILL)
        assert_is(backend.load(), 7)
        if sys.argv[2] == "raise":
            raise RuntimeError("a crash of the program")
        """
    )

    def run(how: str) -> int:
        return subprocess.run(
            [sys.executable, "-c", script, job, how], stderr=subprocess.DEVNULL, timeout=100
        ).returncode

    try:
        assert run("die") == -signal.SIGKILL
        assert run("raise") == 1  # An exception nobody caught keeps it as well.
        assert run("end") == 0
        assert not job_folder(job).exists()
    finally:
        remove_tree(job_folder(job))
