"""The registry through a real coordinator: two workers share a dataset, and a checkpoint moves both on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata.core.ledger import DataCommit
from strata.data.reader import DatasetReader
from strata.data.registry import DatasetRegistry
from strata.data.shard_stream import ShardStream
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


def test_a_shard_goes_on_where_the_committed_checkpoint_left_it(
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
