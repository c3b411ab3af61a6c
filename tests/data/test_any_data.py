"""Whatever a script reads from gets an exact position, or a sentence that says why it cannot have one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from strata.data import (
    DataError,
    DataLedger,
    ElasticIterableDataset,
    ElasticLoader,
    ElasticSampler,
    StateMismatch,
    StreamLoader,
)
from strata.data.loading.adapt import as_elastic_loader
from strata.data.loading.commits import Gather

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
TOTAL = 50


class Squares(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return TOTAL


class Stream(IterableDataset[int]):
    """Numbers in an order that changes with the epoch; says where it is."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self.at = 0
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.at < self.total:
            self.at += 1
            yield 1000 * self.epoch + self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class TensorState(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


class Stateless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(TOTAL))


def taken(loader: ElasticLoader, batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(loader, start=1):
        found += batch.data.tolist() if len(batch.step) else []
        if number == batches:
            break
    return found


def in_worlds(make: Any, worlds: list[int], *, steps: int) -> tuple[list[int], Any]:
    """One epoch, in another world after every `steps` steps; what was trained in which order, and the audit's record."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    commit: dict[str, Any] | None = None
    for turn, world in enumerate(worlds):
        last = turn == len(worlds) - 1
        loaders: list[ElasticLoader] = []
        for rank in range(world):
            loader = as_elastic_loader(make(), global_batch_size=6)
            loader.set_world(rank, world)
            if state is not None:
                loader.load_state_dict(state)
            loaders.append(loader)
        readings = [iter(loader) for loader in loaders]
        for _ in range(10**6 if last else steps):
            batches = [next(reading, None) for reading in readings]
            if batches[0] is None:
                assert all(batch is None for batch in batches)
                break
            for batch in batches:
                assert batch is not None
                seen += batch.data.tolist() if len(batch.step) else []
        everyone = [[record.to_json() for record in loader.records()] for loader in loaders]
        ledger = DataLedger(loaders[0], gather=_given(everyone))
        if commit is not None:
            ledger._chain.restore(_commit(commit))
        commit = ledger.commit()
        state = json.loads(json.dumps(loaders[0].state_dict()))
    return seen, commit


def _given(everyone: Any) -> Gather:
    return lambda _: everyone


def _commit(record: dict[str, Any]) -> Any:
    from strata.core.data.ledger import DataCommit

    return DataCommit.from_json(record)


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plain_loader_is_exact_in_any_world(kind: Any, shuffle: bool) -> None:
    seen, commit = in_worlds(lambda: kind(Squares(), batch_size=6, shuffle=shuffle), [1, 3, 2], steps=3)
    assert sorted(seen) == list(range(TOTAL))
    assert (seen == sorted(seen)) is not shuffle
    undisturbed, _ = in_worlds(lambda: kind(Squares(), batch_size=6, shuffle=shuffle), [1], steps=0)
    assert seen == undisturbed
    assert commit["epochs"][0]["closed"]


def test_everything_but_the_sampling_of_a_loader_is_kept() -> None:
    loader = as_elastic_loader(
        DataLoader(Squares(), batch_size=8, drop_last=True, collate_fn=tuple, num_workers=1)
    )
    batches = list(loader)
    assert [len(batch.data) for batch in batches] == [8] * 6
    assert isinstance(batches[0].data, tuple)
    one_by_one = as_elastic_loader(DataLoader(Squares(), batch_size=None))
    assert [batch.data for batch in one_by_one] == list(range(TOTAL))


def test_the_seed_of_a_sampler_is_kept() -> None:
    seeded: DistributedSampler[int] = DistributedSampler(Squares(), num_replicas=2, rank=0, seed=9)
    one = as_elastic_loader(DataLoader(Squares(), batch_size=8, sampler=seeded))
    assert one.sampler.seed == 9
    generator = torch.Generator().manual_seed(5)
    two = as_elastic_loader(DataLoader(Squares(), batch_size=8, shuffle=True, generator=generator))
    assert two.sampler.seed == 5
    some = SubsetRandomSampler([3, 5, 7])
    assert sorted(taken(as_elastic_loader(DataLoader(Squares(), batch_size=2, sampler=some)))) == [3, 5, 7]


def test_an_order_that_cannot_be_continued_is_refused_with_what_to_do() -> None:
    weighted = WeightedRandomSampler([1.0] * TOTAL, TOTAL)
    with pytest.raises(DataError, match="WeightedRandomSampler is not a function of seed") as refused:
        as_elastic_loader(DataLoader(Squares(), batch_size=4, sampler=weighted))
    assert "shuffle=True" in refused.value.hint


def test_elastic_parts_inside_a_plain_loader_stay_what_they_are() -> None:
    sampler = ElasticSampler(TOTAL, global_batch_size=10, seed=3, dataset="mine")
    loader = as_elastic_loader(DataLoader(Squares(), batch_sampler=sampler))
    assert loader.sampler is sampler
    iterable = ElasticIterableDataset(Squares(), ElasticSampler(TOTAL, global_batch_size=10))
    for given in (iterable, DataLoader(iterable, batch_size=None)):
        assert sorted(taken(as_elastic_loader(given))) == list(range(TOTAL))


def test_paths_globs_and_lists_of_them_are_read(tmp_path: Path) -> None:
    for part in range(3):
        rows = "".join(json.dumps({"id": 10 * part + i}) + "\n" for i in range(10))
        (tmp_path / f"part-{part}.jsonl").write_text(rows)
    for given in (
        tmp_path,
        str(tmp_path / "*.jsonl"),
        [tmp_path / "part-0.jsonl", f"{tmp_path}/part-[12].jsonl"],
    ):
        loader = as_elastic_loader(given, global_batch_size=4)
        assert sorted(i for batch in loader for i in batch.data["id"].tolist()) == list(range(30))
    with pytest.raises(DataError, match="no batch size"):
        as_elastic_loader([tmp_path / "part-0.jsonl"])
    with pytest.raises(DataError, match="listed twice"):
        as_elastic_loader([tmp_path, tmp_path / "part-0.jsonl"], global_batch_size=4)
    with pytest.raises(DataError, match="no such file"):
        as_elastic_loader(tmp_path / "nothing-*.jsonl", global_batch_size=4)


@pytest.mark.parametrize("given", [7, {"a": 1}, None, object()])
def test_what_is_no_data_is_said_to_be_none(given: object) -> None:
    with pytest.raises(DataError, match=r"data must be a strata\.ElasticLoader"):
        as_elastic_loader(given)


@pytest.mark.parametrize("kind", [Stream, TensorState])
@pytest.mark.parametrize("worlds", [[1], [1, 3], [4, 1, 7], [2, 64]])
def test_a_stream_with_state_is_exact_in_any_world(kind: type[Stream], worlds: list[int]) -> None:
    seen, commit = in_worlds(lambda: DataLoader(kind(), batch_size=6), worlds, steps=3)
    assert seen == list(range(TOTAL))
    (epoch,) = commit["epochs"]
    assert epoch["closed"]
    left_out = sum(stop - start for start, stop in epoch["dropped"])
    assert epoch["total"] - left_out == TOTAL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_stream_read_ahead_is_read_again(num_workers: int) -> None:
    loader = StreamLoader(Stream(), global_batch_size=8, num_workers=num_workers, commit="explicit")
    for number, batch in enumerate(loader):
        if number == 2:
            break
        loader.commit(batch)
    state = loader.state_dict()
    again = StreamLoader(Stream(), global_batch_size=8, num_workers=num_workers)
    again.load_state_dict(state)
    assert taken(again) == list(range(16, TOTAL))
    assert taken(loader) == list(range(16, TOTAL))


@pytest.mark.parametrize("total", [48, 50])
@pytest.mark.parametrize("drop_last", [True, False])
def test_epochs_of_a_stream_follow_each_other_also_after_a_restart(total: int, drop_last: bool) -> None:
    loader = StreamLoader(Stream(total), global_batch_size=8, drop_last=drop_last)
    kept = 48 if drop_last else total
    assert taken(loader) == list(range(kept))
    assert (loader.epoch, loader.position) == (1, 0)
    again = StreamLoader(Stream(total), global_batch_size=8, drop_last=drop_last)
    again.load_state_dict(loader.state_dict())
    assert taken(loader) == taken(again) == [1000 + i for i in range(kept)]


def test_a_stream_that_is_not_as_long_as_it_was_said_to_be_is_refused() -> None:
    assert taken(StreamLoader(Stream(), global_batch_size=8, length=TOTAL)) == list(range(TOTAL))
    for wrong in (TOTAL - 10, TOTAL + 10):
        with pytest.raises((DataError, StateMismatch), match=f"{wrong} samples|of {wrong}"):
            taken(StreamLoader(Stream(), global_batch_size=8, length=wrong))
    with pytest.raises(DataError, match="no samples"):
        taken(StreamLoader(Stream(0), global_batch_size=8))


def test_a_stream_without_state_is_refused_or_replayed() -> None:
    with pytest.raises(
        DataError, match="neither exactly-once nor the same order can be guaranteed"
    ) as refused:
        as_elastic_loader(DataLoader(Stateless(), batch_size=4))
    assert "replay=True" in refused.value.hint
    with pytest.raises(DataError, match="exactly-once"):
        as_elastic_loader(iter([1, 2]), global_batch_size=2)
    loader = StreamLoader(Stateless(), global_batch_size=8, replay=True)
    first = taken(loader, batches=3)
    again = StreamLoader(Stateless(), global_batch_size=8, replay=True)
    again.load_state_dict(loader.state_dict())
    assert first + taken(again) == list(range(TOTAL))


def saved_after_a_batch(stream: Stream) -> dict[str, Any]:
    loader = StreamLoader(stream, global_batch_size=8)
    taken(loader, batches=1)
    return loader.state_dict()


def test_a_stream_whose_state_cannot_be_kept_says_so() -> None:
    class Odd(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "lock": Subset}

    with pytest.raises(StateMismatch, match="cannot be kept in a checkpoint"):
        saved_after_a_batch(Odd())

    class Large(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "buffer": "x" * 2_000_000}

    with pytest.raises(StateMismatch, match="more than 1,048,576"):
        saved_after_a_batch(Large())


def test_nodes_of_torchdata_keep_their_place() -> None:
    nodes = pytest.importorskip("torchdata.nodes")

    def make() -> Any:
        return nodes.Loader(nodes.IterableWrapper(range(TOTAL)))

    loader = as_elastic_loader(make(), global_batch_size=8)
    first = taken(loader, batches=3)
    again = as_elastic_loader(make(), global_batch_size=8)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first + taken(again) == list(range(TOTAL))
