"""The registry deals shards that exist, refuses what cannot be, and works alone or through a coordinator."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.data.audit import Commit, audit
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.messages import Conflict, InvalidArgument, Unknown
from strata.data.errors import DataError
from strata.data.shards.manager import Shard, ShardInfo, ShardManager
from strata.data.shards.registry import DatasetRegistry
from strata.data.shards.stream import ShardStream
from strata.errors import StrataError


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """25 samples in five files of five."""
    for i in range(5):
        (tmp_path / f"part-{i}.jsonl").write_text(
            "".join(json.dumps({"id": 5 * i + j}) + "\n" for j in range(5))
        )
    return tmp_path


def test_the_shard_manager_works_as_documented() -> None:
    manager = ShardManager()
    manager.register_dataset_params("imagenet-1k", 1281167, 10000, True, 42)
    shards = manager.get_shard_for_worker("imagenet-1k", "worker-01", 0)
    assert sorted(s.id for s in shards) == list(range(129))
    assert sum(len(s) for s in shards) == 1_281_167
    last = next(s for s in shards if s.id == 128)
    assert (last.start, last.stop) == (1_280_000, 1_281_167)
    other = manager.get_shard_for_worker("imagenet-1k", "worker-02", 0)
    assert len(other) == 64
    assert not {s.id for s in other} & {
        s.id for s in manager.get_shard_for_worker("imagenet-1k", "worker-01", 0)
    }


def test_shards_have_the_field_names_of_the_messages_too() -> None:
    shard = ShardInfo(id=3, start=30, stop=40, file_paths=("a",))
    assert (shard.shard_id, shard.start_index, shard.end_index, shard.num_samples) == (3, 30, 40, 10)
    assert ShardInfo is Shard


def test_the_order_of_shards_follows_seed_and_epoch_only_when_shuffled() -> None:
    manager = ShardManager()
    manager.register_dataset_params("plain", 1_000, 10)
    manager.register_dataset_params("mixed", 1_000, 10, True, 7)
    plain = [s.id for s in manager.get_shard_for_worker("plain", "w", 3)]
    assert plain == sorted(plain)
    orders = [[s.id for s in manager.get_shard_for_worker("mixed", "w", epoch)] for epoch in (0, 1, 1)]
    assert orders[0] != sorted(orders[0])
    assert orders[0] != orders[1] == orders[2]


def test_registered_files_are_counted_and_shards_name_files_that_exist(files: Path) -> None:
    registry = DatasetRegistry()
    assert registry.register("d", files, "jsonl", shard_size=10) == 3
    for worker in ("w0", "w1"):
        registry.register_worker(worker)
    shards = [s for w in registry.active_workers() for s in registry.get_shards("d", w, 0)]
    assert sorted((s.start, s.stop) for s in shards) == [(0, 10), (10, 20), (20, 25)]
    middle = next(s for s in shards if s.start == 10)
    assert middle.file_paths == (str(files / "part-2.jsonl"), str(files / "part-3.jsonl"))
    assert all(Path(p).exists() for s in shards for p in s.file_paths)
    assert list(middle.indices) == list(range(10, 20))
    assert registry.reader("d")[17] == {"id": 17}
    both = [set(registry.get_shard("d", rank, 0)) for rank in (0, 1)]
    assert both[0] | both[1] == {str(p) for p in files.glob("*.jsonl")}
    assert registry.datasets() == ["d"]


def test_epochs_advance() -> None:
    registry = DatasetRegistry()
    assert registry.current_epoch == registry.current_epoch() == 0
    assert registry.advance_epoch() == 1
    assert registry.current_epoch == 1


def test_a_dataset_advances_by_itself_too() -> None:
    registry = DatasetRegistry()
    registry.register_worker("w")
    for dataset in ("a", "b"):
        registry.register_dataset(dataset, 1_000, 10)
    assert (registry.worker_count, registry.dataset_count) == (1, 2)
    assert registry.advance_epoch("a") == registry.current_epoch("a") == 1
    assert registry.current_epoch("b") == registry.current_epoch == 0
    assert {shard.epoch for shard in registry.get_shards("a", "w")} == {1}
    assert registry.get_shards("a", "w") == registry.get_shards("a", "w", 1)
    assert registry.get_shards("b", "w") == registry.get_shards("b", "w", 0)
    assert registry.advance_epoch() == 1
    assert (registry.current_epoch("a"), registry.current_epoch("b")) == (2, 1)
    with pytest.raises(Unknown, match="dataset"):
        registry.advance_epoch("c")


def test_an_old_epoch_can_be_asked_for_after_many_others() -> None:
    manager = ShardManager()
    manager.register_dataset_params("d", 100, 10)
    first = manager.get_shard_for_worker("d", "w", 0)
    for epoch in range(1, 8):
        manager.get_shard_for_worker("d", "w", epoch)
    assert manager.get_shard_for_worker("d", "w", 0) == first


def test_a_worker_that_leaves_hands_its_shards_on() -> None:
    registry = DatasetRegistry()
    registry.register_dataset("d", 1_000, 10)
    for worker in ("a", "b", "c"):
        registry.register_worker(worker)
    before = {w: {s.id for s in registry.get_shards("d", w)} for w in "abc"}
    registry.remove_worker("b")
    after = {w: {s.id for s in registry.get_shards("d", w)} for w in "ac"}
    assert before["a"] <= after["a"]
    assert before["c"] <= after["c"]
    assert after["a"] | after["c"] == set(range(100))


def test_the_same_registration_again_is_no_change_and_another_is_a_conflict(files: Path) -> None:
    registry = DatasetRegistry()
    assert registry.register("d", files, "jsonl", shard_size=10) == 3
    assert registry.register("d", files, "jsonl", shard_size=10) == 3
    with pytest.raises(Conflict, match="other parameters"):
        registry.register("d", files, "jsonl", shard_size=5)
    registry.register_worker("w")
    assert len(registry.get_shards("d", "w")) == 3


def test_files_only_the_workers_see_need_a_count(files: Path) -> None:
    registry = DatasetRegistry()
    assert (
        registry.register("far", "s3://bucket-of-others/data", "parquet", total_samples=100, shard_size=10)
        == 10
    )
    with pytest.raises(DataError, match="no such file"):
        registry.register("gone", files / "nothing", "jsonl")
    (files / "none").mkdir()
    (files / "none" / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no samples"):
        registry.register("empty", files / "none", "jsonl")
    registry.register("short", files, "jsonl", total_samples=26)
    registry.register_worker("w")
    with pytest.raises(DataError, match="holds 25 samples, but was registered with 26"):
        registry.get_shards("short", "w")
    registry.register("numbers", "/only/there", "jsonl", total_samples=7)
    assert registry.get_shards("numbers", "w")[0].file_paths == ()
    with pytest.raises(DataError, match="has no files here"):
        registry.get_shard("numbers", 0, 0)
    assert registry.datasets() == ["far", "short", "numbers"]


@pytest.mark.parametrize(
    ("name", "total", "size"),
    [("", 10, 1), ("d", 0, 1), ("d", -1, 1), ("d", 10, 0), ("d", 10, -5), ("x" * 10**6, 1, 1)],
)
def test_impossible_values_are_refused_and_change_nothing(name: str, total: int, size: int) -> None:
    registry = DatasetRegistry()
    with pytest.raises(InvalidArgument):
        registry.register_dataset(name, total, size)
    assert registry.datasets() == []


def test_unregistered_callers_learn_what_to_do_first() -> None:
    registry = DatasetRegistry()
    with pytest.raises(Unknown, match="dataset 'd' is not known"):
        registry.get_shards("d", "w")
    registry.register_dataset("d", 10, 5)
    with pytest.raises(Unknown, match="register_worker"):
        registry.get_shards("d", "w")
    with pytest.raises(Unknown):
        registry.remove_worker("w")
    with pytest.raises(InvalidArgument, match="there are 0 workers"):
        registry.get_shard("d", 0)
    with pytest.raises(InvalidArgument):
        registry.register_worker("")


def test_fewer_samples_than_workers_leaves_some_with_none() -> None:
    registry = DatasetRegistry()
    registry.register_dataset("d", 3, 1)
    for i in range(5):
        registry.register_worker(f"w{i}")
    assert sorted(len(registry.get_shards("d", f"w{i}")) for i in range(5)) == [0, 0, 1, 1, 1]


class Coordinator:
    """The two calls of a coordinator, as the worker library makes them."""

    def __init__(self) -> None:
        self.registered: list[tuple[Any, ...]] = []

    def register_dataset(
        self,
        dataset_id: str,
        path: str,
        format: str,
        total_samples: int | None = None,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        self.registered.append((dataset_id, path, format, total_samples, shard_size, shuffle, seed))
        return 4

    def get_shards(
        self, dataset_id: str, epoch: int = 0, *, worker_rank: int | None = None, worker_id: str = ""
    ) -> Sequence[Any]:
        class Assigned:
            shard_id, start, stop, done, file_paths, total_shards = 3, 30, 40, 2, ("a", "b"), 4

        return [Assigned()]


def test_with_a_coordinator_calls_go_there() -> None:
    coordinator = Coordinator()
    registry = DatasetRegistry(coordinator)
    assert registry.register("d", "/data", "parquet", shard_size=10) == 4
    assert registry.register_dataset("e", 100, 10) == 4
    assert coordinator.registered == [
        ("d", "/data", "parquet", None, 10, False, 0),
        ("e", "e", "samples", 100, 10, True, 42),
    ]
    assert registry.get_shards("d", "w", 2) == [
        Shard(id=3, start=30, stop=40, done=2, file_paths=("a", "b"), dataset_id="d", epoch=2, total_shards=4)
    ]
    assert registry.get_shard("d", 0, 2) == ["a", "b"]
    for call in (registry.datasets, registry.active_workers, lambda: registry.register_worker("w")):
        with pytest.raises(StrataError, match="only for a registry without a coordinator"):
            call()
    with pytest.raises(TypeError, match="TrainingOrchestrator"):
        DatasetRegistry(50051)  # type: ignore[arg-type]


class Numbers:
    def __getitem__(self, i: int) -> int:
        return i


@settings(max_examples=80)
@given(
    total=st.integers(1, 200),
    size=st.integers(1, 40),
    batch=st.integers(1, 15),
    shuffle=st.booleans(),
    schedule=st.lists(
        st.tuples(st.sampled_from(["train", "save", "crash", "join"]), st.integers(0, 9)), max_size=30
    ),
)
def test_sharded_reading_is_exact_through_joins_crashes_and_rollbacks(
    total: int, size: int, batch: int, shuffle: bool, schedule: list[tuple[str, int]]
) -> None:
    """Workers read their own shards; what a crash takes back is read again by whoever has the shard then."""
    manager = ShardManager()
    manager.register_dataset_params("d", total, size, shuffle, 5)
    workers = ["w0", "w1"]
    for worker in workers:
        manager.add_worker(worker)
    committed, commits, learned, saved = DataCommit(), list[Commit](), list[int](), list[int]()
    streams: dict[str, tuple[ShardStream, Any]] = {}

    def start() -> None:
        streams.clear()
        for rank, worker in enumerate(workers):
            shards = manager.get_shard_for_worker("d", worker, 0)
            stream = ShardStream(
                Numbers(), shards, total=total, batch_size=batch, rank=rank, shuffle=shuffle, seed=5
            )
            streams[worker] = (stream, iter(stream))

    def train(worker: str) -> bool:
        found = next(streams[worker][1], None)
        learned.extend(found.data if found else [])
        return found is not None

    def save() -> None:
        nonlocal committed
        records: list[RankRecord] = [r for stream, _ in streams.values() for r in stream.records()]
        committed = committed.next(records, world_size=len(workers))
        commits.append(
            Commit(
                checkpoint_id=f"c{len(commits)}",
                parent_id=commits[-1].checkpoint_id if commits else None,
                step=0,
                data=committed,
            )
        )
        manager.commit(committed.to_json())
        saved[:] = learned

    start()
    for event, value in schedule:
        if event == "train":
            train(workers[value % len(workers)])
        elif event == "save":
            save()
        else:
            if event == "crash" and len(workers) > 1:
                manager.remove_worker(workers.pop(value % len(workers)))
            elif event == "join":
                workers.append(f"n{len(commits)}-{value}")
                workers = list(dict.fromkeys(workers))
                manager.add_worker(workers[-1])
            learned[:] = saved  # Everyone goes back to the checkpoint, with its data position.
            start()
    while sum(train(worker) for worker in workers):
        pass
    save()
    report = audit(commits, "d", 0)
    assert report.exact, report.reason
    assert sorted(learned) == list(range(total))
