"""Who deletes a checkpoint's file wants training to go on from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.checkpoint import CheckpointManager, LoadFailed, Memory
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
