"""The registry through a real coordinator: two workers share a dataset, and a checkpoint moves both on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.core.data.ledger import DataCommit
from strata.core.messages import InvalidArgument
from strata.data.errors import DataError
from strata.data.reader import DatasetReader
from strata.data.shards.registry import DatasetRegistry
from strata.data.shards.stream import ShardStream
from strata.errors import StrataError
from strata.worker.errors import NotRegistered
from strata.worker.orchestrator import TrainingOrchestrator
from tests.support import Coordinator


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(4):
        rows = range(part * 25, part * 25 + 25)
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"id": i}) + "\n" for i in rows))
    return folder


def test_workers_of_a_coordinator_divide_the_files_between_them(
    coordinator: Coordinator, files: Path
) -> None:
    with TrainingOrchestrator(coordinator.address) as a, TrainingOrchestrator(coordinator.address) as b:
        a.register_worker("a", "host", 1)
        b.register_worker("b", "host", 2)
        registries = [DatasetRegistry(a), DatasetRegistry(b)]
        assert registries[0].register("d", files, "jsonl", shard_size=10) == 10  # Counted there: 100 samples.
        shards = [registry.get_shards("d", epoch=0) for registry in registries]
        assert [len(mine) for mine in shards] == [5, 5]
        assert sorted(shard.start for mine in shards for shard in mine) == list(range(0, 100, 10))
        assert all(Path(path).exists() for mine in shards for shard in mine for path in shard.file_paths)

        reader = DatasetReader(files)
        seen = [
            row["id"]
            for rank, mine in enumerate(shards)
            for batch in ShardStream(reader, mine, total=100, batch_size=4, rank=rank)
            for row in batch.data
        ]
        assert sorted(seen) == list(range(100))


def test_a_shard_continues_where_the_committed_checkpoint_left_it(
    coordinator: Coordinator, files: Path
) -> None:
    with TrainingOrchestrator(coordinator.address) as worker:
        worker.register_worker("a", "host", 1)
        registry = DatasetRegistry(worker)
        registry.register("d", files, "jsonl", shard_size=10)
        stream = ShardStream(DatasetReader(files), registry.get_shards("d"), total=100, batch_size=4)
        reading = iter(stream)
        first = [next(reading) for _ in range(4)]  # One whole shard, and four of the next.
        data = DataCommit().next(stream.records(), world_size=1)
        worker.notify_checkpoint("c1", step=4, path="/c1", status="completed", data=data.to_json())
        done = {shard.id: shard.done for shard in registry.get_shards("d")}
        assert done[first[0].shard.id] == 10
        assert done[first[-1].shard.id] == 4
        assert sum(done.values()) == 14


def test_each_rank_has_its_own_files_whoever_asks(coordinator: Coordinator, files: Path) -> None:
    with TrainingOrchestrator(coordinator.address) as a, TrainingOrchestrator(coordinator.address) as b:
        a.register_worker("a", "host", 1)
        b.register_worker("b", "host", 2)
        mine, yours = DatasetRegistry(a), DatasetRegistry(b)
        mine.register("d", files, "jsonl", shard_size=25)
        by_rank = [mine.get_shard("d", worker_rank=rank) for rank in (0, 1)]
        assert [yours.get_shard("d", worker_rank=rank) for rank in (0, 1)] == by_rank
        assert [len(found) for found in by_rank] == [2, 2]
        assert sorted(by_rank[0] + by_rank[1]) == sorted(map(str, files.glob("*.jsonl")))
        own = {path for shard in yours.get_shards("d") for path in shard.file_paths}
        assert own == set(by_rank[b.topology.rank])
        with pytest.raises(StrataError, match="there are 2 workers"):
            mine.get_shard("d", worker_rank=2)


def test_shards_of_another_worker_are_given_by_its_id(coordinator: Coordinator, files: Path) -> None:
    with TrainingOrchestrator(coordinator.address) as a, TrainingOrchestrator(coordinator.address) as b:
        a.register_worker("a", "host", 1)
        b.register_worker("b", "host", 2)
        mine, yours = DatasetRegistry(a), DatasetRegistry(b)
        mine.register("d", files, "jsonl", shard_size=25)
        assert mine.get_shards("d", "b", 0) == yours.get_shards("d", epoch=0) != mine.get_shards("d", "a", 0)
        assert {shard.total_shards for shard in mine.get_shards("d")} == {4}
        with pytest.raises(StrataError, match="'nobody' is not known") as refusal:
            mine.get_shards("d", "nobody", 0)
        assert refusal.value.hint == "Workers of this job: a, b."


def test_who_is_no_worker_may_ask_about_one_and_does_not_become_one(
    coordinator: Coordinator, files: Path
) -> None:
    registry = DatasetRegistry(coordinator_url=f"http://{coordinator.address}")
    with TrainingOrchestrator(coordinator.address) as worker:
        registry.register("d", files, "jsonl", shard_size=25)
        with pytest.raises(StrataError, match="there are 0 workers"):
            registry.get_shard("d", worker_rank=0)
        worker.register_worker("a", "host", 1)
        assert sorted(registry.get_shard("d", worker_rank=0)) == sorted(map(str, files.glob("*.jsonl")))
        assert len(registry.get_shards("d", "a")) == 4
        with pytest.raises(NotRegistered):
            registry.get_shards("d")
    registry.close()


@pytest.mark.parametrize("numbers", [{"shard_size": 0}, {"total_samples": 0}, {"shard_size": -1}])
def test_sizes_that_cannot_be_are_refused_before_anything_is_registered(
    coordinator: Coordinator, files: Path, numbers: dict[str, Any]
) -> None:
    registry = DatasetRegistry(f"http://{coordinator.address}")
    with pytest.raises(InvalidArgument, match="at least 1"):
        registry.register("d", files, "jsonl", **numbers)
    assert coordinator.get("/api/datasets") == []
    registry.close()


def test_files_are_found_where_only_the_worker_sees_them(coordinator: Coordinator, files: Path) -> None:
    """Registered with a count, so that the coordinator never looks at the folder."""
    with TrainingOrchestrator(coordinator.address) as worker:
        worker.register_worker("a", "host", 1)
        registry = DatasetRegistry(worker)
        registry.register("far", files, "jsonl", total_samples=100, shard_size=25)
        assert sorted(registry.get_shard("far", 0)) == sorted(map(str, files.glob("*.jsonl")))
        worker.register_dataset("absent", "/only/there", "jsonl", 50, 25)
        with pytest.raises(DataError, match="has no files here"):
            registry.get_shard("absent", 0)


def test_an_address_is_enough(coordinator: Coordinator, files: Path) -> None:
    registry = DatasetRegistry(f"http://{coordinator.address}")
    try:
        assert registry.register("d", files, "jsonl", shard_size=50) == 2
        registry.register_worker("solo")
        assert len(registry.get_shard("d", 0)) == 4
        assert registry.get_shards("d")[0].dataset_id == "d"
        registry.remove_worker("solo")
    finally:
        registry.close()
