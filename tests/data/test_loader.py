"""Loaders hand out the epoch in order, and know what the trainer took from what was only read ahead."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from strata.core.data.audit import Commit, audit
from strata.core.data.ledger import DataCommit
from strata.core.data.order import EpochOrder
from strata.data.errors import StateMismatch
from strata.data.iterable import ElasticIterableDataset
from strata.data.loading.commits import DataLedger
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch

TOTAL = 103


class Numbers(Dataset[int]):
    """A map-style dataset whose sample is its own id."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        return index


def sampler(**options: Any) -> ElasticSampler:
    options = {"global_batch_size": 10, "seed": 3, **options}
    return ElasticSampler(TOTAL, **options)


def make_loader(kind: str, chosen: ElasticSampler, **options: Any) -> ElasticLoader:
    if kind == "map":
        return ElasticLoader(Numbers(), chosen, **options)
    return ElasticLoader(ElasticIterableDataset(Numbers(), chosen), **options)


def calm(epoch: int = 0) -> list[int]:
    return list(map(int, EpochOrder(total=TOTAL, seed=3, epoch=epoch)[:]))


def flat(batches: Iterator[Batch] | list[Batch]) -> list[int]:
    return [sample for batch in batches for sample in batch.data.tolist()]


kinds = pytest.mark.parametrize("kind", ["map", "iterable"])
workers = pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "prefetch_factor": 4},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=["in-process", "prefetching", "persistent"],
)


@kinds
@workers
def test_epochs_follow_each_other_in_the_order_of_the_permutation(kind: str, options: dict[str, Any]) -> None:
    loader = make_loader(kind, sampler(), **options)
    assert len(loader) == 11
    assert flat(iter(loader)) == calm(0)
    assert (loader.epoch, loader.position) == (1, 0)
    assert flat(iter(loader)) == calm(1)


@kinds
@workers
def test_read_ahead_batches_do_not_count(kind: str, options: dict[str, Any]) -> None:
    loader = make_loader(kind, sampler(), **options)
    taken = list(islice(loader, 3))
    assert loader.position == 30
    state = loader.state_dict()
    rest = list(loader)
    assert flat(taken) + flat(rest) == calm(0)

    again = make_loader(kind, sampler(), **options)
    again.load_state_dict(state)
    assert flat(list(again)) == flat(rest)


@kinds
@workers
def test_explicit_commits_count_only_what_was_committed(kind: str, options: dict[str, Any]) -> None:
    loader = make_loader(kind, sampler(), commit="explicit", **options)
    reading = iter(loader)
    first = next(reading)
    second = next(reading)
    assert loader.position == 0
    loader.commit(first)
    assert loader.position == 10
    with pytest.raises(StateMismatch, match="out of order"):
        loader.commit(first)
    loader.commit(second)
    assert loader.position == 20


@kinds
def test_a_world_that_changes_mid_epoch_continues_where_the_last_one_was(kind: str) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world, steps in ((4, 3), (3, 2), (5, 2), (2, None)):
        loaders = [make_loader(kind, sampler(rank=r, world_size=world), num_workers=1) for r in range(world)]
        if state:
            for loader in loaders:
                loader.load_state_dict(state)
        columns = [list(islice(loader, steps)) for loader in loaders]
        for ranks in zip(*columns, strict=True):
            seen += flat([batch for batch in ranks if len(batch.step)])
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert seen == calm(0)


@kinds
@workers
def test_persistent_workers_follow_a_change_of_world_and_position(kind: str, options: dict[str, Any]) -> None:
    loader = make_loader(kind, sampler(), **options)
    list(islice(loader, 2))
    loader.set_world(1, 2)
    assert flat(list(islice(loader, 1))) == calm()[25:30]
    loader.load_state_dict({**loader.state_dict(), "position": 50})
    loader.set_world(0, 1)
    assert flat(list(loader)) == calm()[50:]
    loader.set_epoch(4)
    assert flat(list(loader)) == calm(4)


@kinds
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_that_was_not_finished_is_started_again(kind: str, num_workers: int) -> None:
    loader = make_loader(kind, sampler(micro_batch_size=4), num_workers=num_workers)
    assert [len(batch.step) for batch in islice(loader, 4)] == [4, 3, 3, 4]
    assert loader.position == 10  # One step, and a part of the next.
    assert flat(list(loader)) == calm()[10:]
    list(islice(loader, 1))
    loader.set_world(0, 2)
    assert flat(list(islice(loader, 1))) == calm(1)[:3]


def test_changing_the_world_during_an_iteration_is_refused() -> None:
    loader = make_loader("map", sampler())
    reading = iter(loader)
    next(reading)
    loader.set_world(0, 2)
    with pytest.raises(StateMismatch, match="iterate again after set_world"):
        next(reading)


@kinds
def test_a_rank_with_nothing_to_do_takes_part_with_weight_zero(kind: str) -> None:
    loaders = [
        make_loader(kind, ElasticSampler(5, global_batch_size=3, rank=r, world_size=4, shuffle=False))
        for r in range(4)
    ]
    columns = [list(loader) for loader in loaders]
    assert [len(batches) for batches in columns] == [2, 2, 2, 2]
    idle = columns[3][0]
    assert (len(idle.step), idle.weight, len(idle.data)) == (0, 0.0, 1)
    assert sum(batch.weight for batches in columns for batch in batches[:1]) == pytest.approx(4)
    (nothing,) = loaders[3].records()
    assert nothing.runs == ()


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("micro", [None, 2, 3])
def test_weighted_gradients_equal_those_of_one_worker_at_any_world_size(
    world: int, micro: int | None
) -> None:
    """A real model: the average over ranks of accumulated, weighted gradients is the gradient of the batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    target = functools.partial(torch.mul, 3.0)

    def gradients(rank: int, size: int) -> list[torch.Tensor]:
        chosen = sampler(rank=rank, world_size=size, micro_batch_size=micro if size > 1 else None)
        found, step_gradient = [], torch.zeros(1, 1)
        for batch in ElasticLoader(Numbers(), chosen):
            x = batch.data.float().unsqueeze(1) / TOTAL
            model.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(x), target(x)) * batch.weight)
            assert model.weight.grad is not None
            step_gradient = step_gradient + model.weight.grad
            if batch.step.ends_step:
                found.append(step_gradient)
                step_gradient = torch.zeros(1, 1)
        return found

    alone = gradients(0, 1)
    together = [gradients(rank, world) for rank in range(world)]
    for step, expected in enumerate(alone):
        averaged = sum((g[step] for g in together), torch.zeros(1, 1)) / world
        torch.testing.assert_close(averaged, expected, rtol=1e-4, atol=1e-6)


@kinds
def test_the_ledger_holds_what_each_rank_took_and_nothing_that_was_read_ahead(kind: str) -> None:
    commits: list[Commit] = []
    data: dict[str, Any] = {}
    parent = None
    for name, world, steps in (("a", 4, 4), ("b", 3, 3), ("c", 5, None)):
        loaders = [make_loader(kind, sampler(rank=r, world_size=world), num_workers=1) for r in range(world)]
        ledgers = [DataLedger(loader, gather=lambda mine: [mine]) for loader in loaders]
        if data:
            for ledger in ledgers:
                ledger.restore(data)
        for loader in loaders:
            list(islice(loader, steps))
        everyone = [record for loader in loaders for record in loader.records()]
        committed = (DataCommit.from_json(data) if data else DataCommit()).next(
            everyone, world_size=world, states={"data": loaders[0].state_dict()}
        )
        data = committed.to_json()
        commits.append(Commit(checkpoint_id=name, parent_id=parent, step=0, data=committed))
        parent = name
    report = audit(commits, "data", 0)
    assert report.exact, report.reason
    first = commits[0].data
    assert first is not None
    assert sorted(first.epochs[0].ranks) == [0, 1, 2, 3]


def test_pinned_memory_goes_through() -> None:
    if not torch.cuda.is_available():
        pytest.skip("page-locked memory needs an accelerator")
    for kind in ("map", "iterable"):
        batch = next(iter(make_loader(kind, sampler(), num_workers=1, pin_memory=True)))
        assert batch.data.is_pinned()


def test_a_plain_dataloader_works_with_commits_by_count() -> None:
    chosen = sampler()
    loader = DataLoader(Numbers(), batch_sampler=chosen, num_workers=2)
    for i, _ in enumerate(loader):
        chosen.commit()
        if i == 4:
            break
    assert chosen.position == 50


def test_a_plain_dataloader_works_with_the_iterable_dataset() -> None:
    dataset = ElasticIterableDataset(Numbers(), sampler())
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        batches = []
        for batch in loader:
            batches.append(batch)
            dataset.commit(batch)
        assert flat(batches) == calm(epoch)
    assert dataset.state_dict()["epoch"] == 3


@kinds
def test_an_epoch_with_no_full_batch_ends_at_once_when_the_last_is_dropped(kind: str) -> None:
    loader = make_loader(kind, sampler(global_batch_size=200, drop_last=True))
    assert list(loader) == []
    assert loader.epoch == 1
    (record,) = loader.records()
    assert record.closed
    assert record.dropped.size == TOTAL


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"total": 99},
        {"seed": 4},
        {"shuffle": False},
        {"dataset": "other"},
        {"version": 9},
        {"position": TOTAL + 1},
        {"position": -1},
    ],
)
def test_a_state_of_other_data_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    chosen = sampler()
    chosen.move(2, 40)
    state = {**chosen.state_dict(), "position": 10, **wrong} if wrong else {"position": 3}
    with pytest.raises(StateMismatch):
        chosen.load_state_dict(state)
    assert (chosen.epoch, chosen.position) == (2, 40)


def test_between_epochs_the_dataset_may_have_grown() -> None:
    chosen = sampler()
    chosen.load_state_dict({**chosen.state_dict(), "epoch": 3, "position": 0, "total": 50, "seed": 8})
    assert (chosen.epoch, chosen.total) == (3, TOTAL)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly one of global_batch_size, batch_size"):
        ElasticSampler(10)
    with pytest.raises(ValueError, match="exactly one of"):
        ElasticSampler(10, global_batch_size=2, batch_size=2)
    with pytest.raises(ValueError, match="micro_batch_size must be positive"):
        ElasticSampler(10, batch_size=2, micro_batch_size=0)
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        ElasticSampler(10, batch_size=2, rank=2, world_size=2)
    with pytest.raises(ValueError, match="needs an ElasticSampler"):
        ElasticLoader(Numbers())
    with pytest.raises(ValueError, match="has its own sampler"):
        ElasticLoader(ElasticIterableDataset(Numbers(), sampler()), sampler())
    with pytest.raises(ValueError, match="in_order"):
        ElasticLoader(Numbers(), sampler(), in_order=False)
    with pytest.raises(ValueError, match="'taken' or 'explicit'"):
        ElasticLoader(Numbers(), sampler(), commit="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "total", [np.int64(TOTAL), torch.tensor(TOTAL), range(TOTAL), np.zeros(TOTAL), Numbers()]
)
def test_number_of_samples_may_be_any_whole_number_or_the_dataset_itself(total: Any) -> None:
    assert ElasticSampler(total, batch_size=4).total == TOTAL


@pytest.mark.parametrize("total", [10.0, None, object(), True])
def test_number_of_samples_that_is_none_is_an_error_and_never_nothing_to_train(total: Any) -> None:
    with pytest.raises(TypeError, match="number of samples"):
        ElasticSampler(total, batch_size=4)
