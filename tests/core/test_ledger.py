"""Commits carry what was trained, survive JSON, and refuse what cannot be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.ledger import Coverage, DataCommit, LedgerError, RankRecord
from strata.core.spans import Run, Spans

spans = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=6
)


def record(rank: int, *rows: tuple[int, int], epoch: int = 0, total: int = 100, **more: Any) -> RankRecord:
    made = RankRecord(dataset="d", epoch=epoch, total=total, rank=rank, **more)
    for start, stop in rows:
        made = made.with_span(start, stop)
    return made


@given(spans, spans)
def test_coverage_counts_a_second_time_as_repeated(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    times = np.zeros(101, np.int64)
    coverage = Coverage()
    for rows in (first, second):
        coverage = coverage.plus(np.array(rows, np.int64).reshape(-1, 2))
        for start, stop in rows:
            times[start:stop] += 1
    assert coverage.covered.size == np.count_nonzero(times)
    assert coverage.repeated.size == np.count_nonzero(times > 1)


@given(spans, st.integers(1, 30), st.integers(1, 100))
def test_progress_per_shard_is_what_was_trained_of_it(
    rows: list[tuple[int, int]], size: int, total: int
) -> None:
    inside = [(start, min(stop, total)) for start, stop in rows if start < total]
    coverage = Coverage(covered=Spans(inside))
    done = coverage.per_shard(total=total, shard_size=size)
    trained = {p for start, stop in inside for p in range(start, stop)}
    assert done.tolist() == [
        len(trained & set(range(start, min(start + size, total)))) for start in range(0, total, size)
    ]
    for start in range(0, total, size):
        stop = min(start + size, total)
        assert coverage.remaining(start, stop).size == stop - start - done[start // size]


def test_a_commit_follows_another_and_remembers_it() -> None:
    first = DataCommit().next([record(0, (0, 4)), record(1, (4, 8))], world_size=2)
    second = first.next(
        [record(0, (8, 12)), record(1, (12, 16))], world_size=2, states={"d": {"position": 16}}
    )
    epoch = second.find("d", 0)
    assert epoch is not None
    assert epoch.before.covered == Spans([(0, 8)])
    assert epoch.ranks == {0: (Run(start=8, length=4),), 1: (Run(start=12, length=4),)}
    assert second.coverage("d", 0).covered == Spans([(0, 16)])
    assert second.states == {"d": {"position": 16}}
    assert second.coverage("other", 0) == Coverage()


def test_an_epoch_boundary_between_two_commits_keeps_both_epochs() -> None:
    commit = DataCommit().next([record(0, (90, 100), closed=True), record(0, (0, 7), epoch=1)], world_size=1)
    assert [e.key for e in commit.epochs] == [("d", 0), ("d", 1)]
    assert [e.closed for e in commit.epochs] == [True, False]


def test_a_rank_that_reports_twice_is_kept_twice() -> None:
    commit = DataCommit().next([record(0, (0, 5)), record(0, (3, 8))], world_size=1)
    assert commit.coverage("d", 0).repeated == Spans([(3, 5)])


@given(spans, st.lists(spans, min_size=1, max_size=3), st.booleans())
def test_json_keeps_everything(
    before: list[tuple[int, int]], ranks: list[list[tuple[int, int]]], closed: bool
) -> None:
    commit = DataCommit().next([record(0, *before)], world_size=1, states={"d": {"position": 3}})
    records = [record(r, *rows, closed=closed, dropped=Spans([(95, 100)])) for r, rows in enumerate(ranks)]
    assert [RankRecord.from_json(json.loads(json.dumps(r.to_json()))) for r in records] == records
    commit = commit.next(records, world_size=len(ranks))
    assert DataCommit.from_json(json.loads(json.dumps(commit.to_json()))) == commit


def test_a_dataset_that_changed_size_within_an_epoch_is_refused() -> None:
    commit = DataCommit().next([record(0, (0, 5))], world_size=1)
    with pytest.raises(LedgerError, match="Rank 0 counts 99 samples in epoch 0 of 'd', the ledger 100"):
        commit.next([record(0, (5, 9), total=99)], world_size=1)


GOOD = DataCommit().next([record(0, (0, 5))], world_size=1).to_json()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {**GOOD, "schema": 2},
        {**GOOD, "epochs": 3},
        {**GOOD, "epochs": [{"dataset": "d"}]},
        {**GOOD, "world_size": None},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "covered": [[5, 1]]}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "ranks": {"0": [[0, -3, 1, 1]]}}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "ranks": {"0": [[0, 1, 3, 10**12]]}}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "ranks": {"0": [[0, 1, 2**40, 2**40]]}}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "covered": [[0, 2**80]]}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "total": -1}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "epoch": 2**80}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "ranks": {"zero": []}}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "ranks": [1]}]},
    ],
)
def test_a_record_that_cannot_be_is_a_ledger_error(broken: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match="Not a data record"):
        DataCommit.from_json(broken)


def test_records_lead_from_any_ancestor_to_a_commit() -> None:
    first = DataCommit().next(
        [RankRecord(dataset="d", epoch=0, total=100, rank=0).with_span(0, 40)], world_size=1
    )
    record = RankRecord(dataset="d", epoch=0, total=100, rank=1).with_span(40, 70)
    second = first.next([record], world_size=2)
    assert second.since(first) == [record]
    for base in (DataCommit(), first, second):
        again = base.next(second.since(base), world_size=2)
        assert again.coverage("d", 0) == second.coverage("d", 0)
        assert not again.coverage("d", 0).repeated
