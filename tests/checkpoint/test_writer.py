"""Writing a checkpoint piece by piece: complete and verified, or nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint import (
    AsyncCheckpointWriter,
    CheckpointManager,
    InvalidSave,
    ManagerClosed,
    Memory,
    SaveFailed,
)
from strata.stores import open_store
from strata.stores.faulty import Fault, FaultyStore, Operation


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file()) if folder.exists() else []


def test_pieces_of_any_size_make_one_checkpoint(folder: Path, memory: Memory) -> None:
    chance = random.Random(1)
    data = chance.randbytes(3_000_000)
    with AsyncCheckpointWriter(
        folder, step=500, epoch=2, metadata={"loss": 1.5}, buffer_bytes=100_000
    ) as writer:
        start = 0
        while start < len(data):
            size = chance.choice([1, 7, 1000, 99_999, 250_000])
            writer.write(memoryview(data)[start : start + size])
            start += size
        assert writer.bytes_written == len(data)
        assert not list(folder.glob("*.manifest.json"))  # No checkpoint before the end.
    assert writer.info is not None
    assert (writer.info.step, writer.info.epoch, writer.info.size_bytes) == (500, 2, len(data))
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.load() == data
        latest = manager.get_latest()
    assert latest is not None
    assert latest.metadata == {"loss": 1.5}
    assert latest.digest == writer.info.digest


async def test_it_can_be_awaited(folder: Path, memory: Memory) -> None:
    async with AsyncCheckpointWriter(folder, step=1) as writer:
        await writer.write_async(b"one")
        await writer.write_async(b"two")
    with CheckpointManager(folder, memory=memory) as manager:
        assert await manager.load_async() == b"onetwo"


def test_an_exception_in_the_block_leaves_nothing(folder: Path) -> None:
    def interrupted() -> None:
        with AsyncCheckpointWriter(folder, step=1, buffer_bytes=10) as writer:
            writer.write(b"x" * 1000)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        interrupted()
    assert files(folder) == []


def test_abort_leaves_nothing(folder: Path) -> None:
    writer = AsyncCheckpointWriter(folder, step=1, buffer_bytes=10)
    writer.write(b"x" * 1000)
    writer.abort()
    writer.abort()
    assert files(folder) == []
    with pytest.raises(ManagerClosed):
        writer.write(b"more")
    with pytest.raises(ManagerClosed):
        writer.close()


def test_closing_twice_is_closing_once(folder: Path) -> None:
    writer = AsyncCheckpointWriter(folder, step=1)
    writer.write(b"x")
    assert writer.close() == writer.close()


def test_an_empty_checkpoint_is_refused(folder: Path) -> None:
    writer = AsyncCheckpointWriter(folder, step=1)
    with pytest.raises(InvalidSave):
        writer.close()
    assert files(folder) == []


@pytest.mark.parametrize(
    "arguments", [{"step": -1}, {"step": 1, "epoch": -1}, {"step": 1, "buffer_bytes": 0}]
)
def test_impossible_arguments_are_refused(folder: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidSave):
        AsyncCheckpointWriter(folder, **arguments)
    assert files(folder) == []


@pytest.mark.parametrize("operation", ["write", "commit"])
@pytest.mark.parametrize("suffix", [".bin", ".manifest.json"])
def test_a_store_that_fails_leaves_nothing_and_says_so(folder: Path, operation: str, suffix: str) -> None:
    def choose(found: Operation, chance: object) -> Fault | None:
        return Fault.REFUSED if found.name == operation and found.key.endswith(suffix) else None

    writer = AsyncCheckpointWriter(FaultyStore(open_store(folder), choose=choose), step=1, buffer_bytes=10)

    def write_it_all() -> None:
        for _ in range(1000):
            writer.write(b"x" * 10)
        writer.close()

    with pytest.raises(SaveFailed, match=r"\[NVME\] Failed to save checkpoint"):
        write_it_all()
    writer.abort()
    assert files(folder) == []


def losing_the_reply_to_the_manifest(folder: Path, then: Fault | None = None) -> FaultyStore:
    """A store that keeps the manifest and does not say so; `then` is what becomes of reading it."""

    def choose(found: Operation, chance: object) -> Fault | None:
        if not found.key.endswith(".manifest.json"):
            return None
        return {"commit": Fault.LOST_REPLY, "read": then}.get(found.name)

    return FaultyStore(open_store(folder), choose=choose)


def test_a_lost_reply_to_the_manifest_is_no_failure(folder: Path, memory: Memory) -> None:
    store = losing_the_reply_to_the_manifest(folder)
    with AsyncCheckpointWriter(store, step=1) as writer:
        writer.write(b"kept")
    assert "lost" in store.log[0]
    assert writer.info is not None
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.load() == b"kept"


@pytest.mark.parametrize("then", [Fault.REFUSED, Fault.BIT_FLIP])
def test_a_payload_stays_as_long_as_its_manifest_may_be_there(
    folder: Path, memory: Memory, then: Fault
) -> None:
    writer = AsyncCheckpointWriter(losing_the_reply_to_the_manifest(folder, then), step=1)
    writer.write(b"kept")
    with pytest.raises(SaveFailed, match="the reply was lost"):
        writer.close()
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.load() == b"kept"


def test_it_continues_the_history_of_the_destination(folder: Path, memory: Memory) -> None:
    with CheckpointManager(folder, memory=memory) as manager:
        first = manager.save(b"one", step=9).result(30)
    with AsyncCheckpointWriter(folder, step=1) as writer:
        writer.write(b"two")
    assert writer.info is not None
    assert writer.info.parent == first.checkpoint_id
    with CheckpointManager(folder, memory=memory) as manager:
        assert manager.load() == b"two"
