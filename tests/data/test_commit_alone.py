"""What other ranks have trained, without asking them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.ledger import DataCommit, trained_by
from strata.data import ElasticSampler, StateMismatch
from strata.data.loading.commits import DataLedger
from strata.data.loading.sampler import WithSampler


class Reader(WithSampler):
    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler


def sampler(rank: int, world: int, **options: Any) -> ElasticSampler:
    return ElasticSampler(options.pop("total"), rank=rank, world_size=world, **options)


@given(
    total=st.integers(1, 60),
    batch=st.integers(1, 12),
    micro=st.none() | st.integers(1, 4),
    world=st.integers(1, 5),
    before=st.integers(0, 20),
    steps=st.integers(0, 40),
    drop_last=st.booleans(),
)
def test_the_records_of_all_ranks_follow_from_one(
    total: int, batch: int, micro: int | None, world: int, before: int, steps: int, drop_last: bool
) -> None:
    drop_last = drop_last and total >= batch
    options = {"total": total, "global_batch_size": batch, "micro_batch_size": micro, "drop_last": drop_last}
    ranks = [sampler(rank, world, **options) for rank in range(world)]

    def make(count: int) -> None:
        for each in ranks:
            for _ in range(count):
                epoch, position = each.epoch, each.position
                while (each.epoch, each.position) == (epoch, position):
                    each.commit()

    make(before)
    since = (ranks[0].epoch, ranks[0].position)
    for each in ranks:
        each.records()
    make(steps)
    for observer in ranks:
        derived = [record for rank in range(world) for record in observer.records_of(rank, since)]
        for rank, other in enumerate(ranks):
            assert trained_by([r for r in derived if r.rank == rank]) == trained_by(
                list(other._records.values())
            )


class Broken(Exception):
    """A peer is lost."""


def broken(mine: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    raise Broken


def two_ranks(**options: Any) -> tuple[list[Reader], DataLedger]:
    readers = [Reader(sampler(rank, 2, total=40, global_batch_size=4, **options)) for rank in range(2)]

    def gather(mine: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        return [mine, [record.to_json() for record in readers[1].records()]]

    return readers, DataLedger(readers[0], gather=gather)


def test_a_commit_alone_says_what_all_would_have_said_together() -> None:
    readers, ledger = two_ranks()
    same, together = two_ranks()
    for each in (*readers, *same):
        each.sampler.commit()
    ledger.commit("first", durable=True)
    together.commit("first", durable=True)
    for each in (*readers, *same):
        for _ in range(7):
            each.sampler.commit()
    assert ledger.commit_alone("second") == together.commit("second", durable=False)


def test_an_exchange_that_failed_has_lost_nothing() -> None:
    readers, ledger = two_ranks()
    for each in readers:
        each.sampler.commit()
    working, ledger._gather = ledger._gather, broken
    with pytest.raises(Broken):
        ledger.commit("first")
    for each in readers:
        each.sampler.commit()
    assert DataCommit.from_json(ledger.commit_alone("second")).coverage("data", 0).covered.to_json() == [
        [0, 8]
    ]
    ledger._gather = working


def test_a_position_that_was_moved_explicitly_is_refused() -> None:
    readers, ledger = two_ranks()
    readers[0].sampler.commit()
    readers[0].sampler.move(0, 20)
    readers[0].sampler.commit()
    with pytest.raises(StateMismatch, match="cannot be derived from it"):
        ledger.commit_alone("first")
