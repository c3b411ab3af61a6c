"""All three tiers with a real S3 server as the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.checkpoint import AsyncCheckpointWriter, CheckpointManager, Memory, Policy, SaveFailed
from strata.checkpoint.catalog.naming import step_stem
from strata.stores import Store, open_store
from tests.checkpoint.states import assert_is_step, assert_same, every_kind, small_state
from tests.support_seaweed import READER_KEY, Seaweed

pytestmark = pytest.mark.s3


def test_a_state_goes_through_three_tiers_and_comes_back_from_the_last(
    folder: Path, s3: Store, memory: Memory
) -> None:
    state = every_kind()
    with CheckpointManager([folder, s3], memory=memory) as manager:
        info = manager.save(state, step=1).result(60)
        assert info.tiers == ("MEMORY", "NVME", "S3")
        assert manager.restore().tier == "MEMORY"
    with CheckpointManager([folder, s3], memory=memory) as manager:
        assert manager.restore().tier == "NVME"
        for payload in folder.glob("*.pt"):
            payload.unlink()
        restored = manager.restore()
    assert restored.tier == "S3"
    assert "payload is missing" in restored.reasons[0]
    assert_same(restored.state, state)


def test_every_tier_has_the_same_bytes(folder: Path, s3: Store, memory: Memory) -> None:
    with CheckpointManager([folder, s3], memory=memory) as manager:
        info = manager.save(small_state(1, elements=2_000_000), step=1).result(
            60
        )  # Several parts of an upload.
        key = Path(info.path).name
        assert Path(info.path).read_bytes() == s3.read(key)


@pytest.mark.parametrize("stem", ["unique", "step"])
def test_retention_and_names_work_on_object_storage(s3: Store, memory: Memory, stem: str) -> None:
    options = {"stem": step_stem} if stem == "step" else {}
    with CheckpointManager(s3, keep_count=2, memory=memory, **options) as manager:  # type: ignore[arg-type]
        for step in range(4):
            manager.save(small_state(step), step=step).result(60)
    assert len(list(s3.list())) == 4  # Two payloads, two manifests.
    with CheckpointManager(s3, memory=memory) as manager:
        assert [info.step for info in manager.all_checkpoints()] == [3, 2]
        assert_is_step(manager.load(), 3)


def test_a_streamed_checkpoint_is_complete_or_absent(s3: Store, memory: Memory) -> None:
    data = bytes(range(256)) * 50_000
    with AsyncCheckpointWriter(s3, step=2, buffer_bytes=1 << 20) as writer:
        writer.write(data)
    lost = AsyncCheckpointWriter(s3, step=3)
    lost.write(data)
    lost.abort()
    with CheckpointManager(s3, memory=memory) as manager:
        assert manager.load() == data
        assert [info.step for info in manager.all_checkpoints()] == [2]


def test_a_store_that_may_only_be_read_refuses_by_name_and_still_restores(
    s3_server: Seaweed, s3: Store, memory: Memory
) -> None:
    with CheckpointManager(s3, memory=memory) as manager:
        manager.save(small_state(1), step=1).result(60)
    reader = open_store(s3.url, **s3_server.options(READER_KEY))
    with CheckpointManager(reader, memory=memory, policy=Policy(on_error="warn")) as manager:
        assert_is_step(manager.load(), 1)
        with pytest.raises(SaveFailed, match=r"\[S3\] Failed to save checkpoint") as caught:
            manager.save(small_state(2), step=2).result(60)
        assert "s3:PutObject" in str(caught.value)
