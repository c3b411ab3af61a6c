"""Who deletes a checkpoint's file wants training to continue from the one before; what is removed goes entirely."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.checkpoint import CheckpointManager, LoadFailed, Memory
from strata.checkpoint.catalog.naming import step_stem
from tests.checkpoint.states import assert_is_step, small_state


def test_a_deleted_file_makes_the_next_older_resume_although_memory_still_has_it(
    folder: Path, memory: Memory
) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        infos = [manager.save(small_state(step), step=step).result(30) for step in (1, 2)]
        assert manager.restore().tier == "MEMORY"
        Path(infos[1].path).unlink()
        assert [info.step for info in manager.all_checkpoints()] == [1]
        restored = manager.restore()
        assert_is_step(restored.state, 1)
        assert "was removed" in restored.reasons[0]
        with pytest.raises(LoadFailed, match="was removed"):
            manager.load(step=2)


def test_what_has_reached_memory_only_is_used(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(30)
        manager.save(small_state(2), step=2, tiers=["MEMORY"]).result(30)
        assert_is_step(manager.load(), 2)


def test_a_copy_in_another_durable_tier_keeps_it_alive(tmp_path: Path, memory: Memory) -> None:
    with CheckpointManager([tmp_path / "near", tmp_path / "far"], memory=memory) as manager:
        info = manager.save(small_state(1), step=1).result(30)
        Path(info.path).unlink()
        assert_is_step(manager.load(), 1)


REMOVER = """
import sys
from strata.checkpoint import CheckpointManager, Memory
from strata.checkpoint.catalog.naming import step_stem
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, crash_by_signal
from tests.checkpoint.states import small_state

def choose(operation, _):
    is_payload = operation.name == "delete" and operation.key == "checkpoint_step_00000001.pt"
    return Fault.CRASH_BEFORE if is_payload else None

store = FaultyStore(open_store(sys.argv[1]), choose=choose, crash=crash_by_signal)
manager = CheckpointManager(store, keep_count=1, stem=step_stem, memory=Memory(job=sys.argv[2]))
for step in (1, 2):
    manager.save(small_state(step), step=step).result(60)
manager.wait_pending(60)
"""


def test_what_a_process_was_killed_while_removing_is_removed_by_the_next(
    folder: Path, memory: Memory
) -> None:
    """Named like the payload of a step, it would otherwise be taken for a file of another program."""
    done = subprocess.run([sys.executable, "-c", REMOVER, str(folder), str(memory.job)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (folder / "checkpoint_step_00000001.pt").exists()
    with CheckpointManager(folder, keep_count=1, stem=step_stem, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints() if "NVME" in info.tiers] == [2]
        manager.save(small_state(3), step=3).result(60)
    assert not list(folder.glob("checkpoint_step_00000001*"))
