"""Commits carry what was trained, survive JSON, and refuse what cannot be."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.ledger import Coverage, DataCommit, LedgerChain, LedgerError, RankRecord
from strata.core.data.spans import Run, Spans

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
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "count": 0}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "count": 2**62}, {**GOOD["epochs"][0], "epoch": 7}]},
        {**GOOD, "epochs": [{**GOOD["epochs"][0], "count": 3}, {**GOOD["epochs"][0], "epoch": 2}]},
        {**GOOD, "base": 7},
        {**GOOD, "base": ""},
        {**GOOD, "unconfirmed": "a"},
        {**GOOD, "unconfirmed": [1]},
    ],
)
def test_a_record_that_cannot_be_is_a_ledger_error(broken: dict[str, Any]) -> None:
    with pytest.raises(LedgerError, match="Not a data record"):
        DataCommit.from_json(broken)


def test_undoing_a_commit_gives_what_it_continues_and_what_led_to_it() -> None:
    first = DataCommit().next([record(0, (0, 40))], world_size=1)
    second = first.next([record(1, (40, 70)), record(0, (0, 7), epoch=1, closed=True)], world_size=2)
    base, trained = second.undone()
    assert base.coverage("d", 0).covered == Spans([(0, 40)])
    assert base.find("d", 1) is None
    assert base.followed_by(trained, world_size=2).epochs == second.epochs


def test_what_a_rank_trained_between_many_snapshots_stays_one_run() -> None:
    chain = LedgerChain()
    for step in range(1_000):
        made = chain.commit(
            [record(r, (16 * step + 8 * r, 16 * step + 8 * r + 8), total=20_000) for r in (0, 1)],
            durable=False,
            world_size=2,
        )
    (epoch,) = made.epochs
    assert epoch.ranks == {r: (Run(start=8 * r, length=8, stride=16, count=1_000),) for r in (0, 1)}


# --- epochs that are alike ------------------------------------------------------------------------------------


def whole_epoch(epoch: int, total: int = 100) -> list[RankRecord]:
    half = total // 2
    return [
        record(0, (0, half), epoch=epoch, total=total, closed=True),
        record(
            1, (half, total - 4), epoch=epoch, total=total, closed=True, dropped=Spans([(total - 4, total)])
        ),
    ]


def test_thousands_of_epochs_fit_into_a_small_record_and_are_all_still_there() -> None:
    chain = LedgerChain()
    for first in range(0, 10_000, 100):
        epochs = range(first, first + 100)
        made = chain.commit([r for epoch in epochs for r in whole_epoch(epoch)], "c", world_size=2)
        chain.confirm("c")
    assert len(json.dumps(made.to_json())) < 2_000
    again = DataCommit.from_json(json.loads(json.dumps(made.to_json())))
    for epoch in (0, 1, 4_999, 9_998, 9_999):
        found = again.find("d", epoch)
        assert found is not None
        assert (found.epoch, found.count, found.closed) == (epoch, 1, True)
        assert found.after.covered == Spans([(0, 96)])
        assert found.dropped == Spans([(96, 100)])
    assert again.find("d", 10_000) is None


def test_epochs_since_the_base_are_bounded_too_and_so_is_a_restored_snapshot() -> None:
    chain = LedgerChain()
    made = chain.commit([r for epoch in range(10_000) for r in whole_epoch(epoch)], durable=False)
    assert len(json.dumps(made.to_json())) < 2_000
    other = LedgerChain()
    other.restore(made, durable=False)
    assert other.commit([], durable=False).epochs == made.epochs


def test_an_epoch_that_differs_is_separate_and_can_be_trained_again() -> None:
    chain = LedgerChain()
    for epoch in range(50):
        records = whole_epoch(epoch) if epoch != 20 else [record(0, (0, 90), epoch=20, closed=True)]
        chain.commit(records, "c")
        chain.confirm("c")
    made = chain.commit([record(0, (10, 15), epoch=30)], "again")
    assert [(e.epoch, e.last) for e in made.epochs] == [(0, 19), (20, 20), (21, 29), (30, 30), (31, 49)]
    assert made.coverage("d", 30).repeated == Spans([(10, 15)])
    assert not made.coverage("d", 29).repeated
    again = made.find("d", 30)
    assert again is not None
    assert (again.closed, again.dropped) == (True, Spans([(96, 100)]))
    with pytest.raises(LedgerError, match="Rank 0 counts 7 samples in epoch 31 of 'd', the ledger 100"):
        chain.commit([record(0, (0, 7), epoch=31, total=7)])


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3), st.booleans()), max_size=12)
)
def test_folding_keeps_what_every_epoch_held(rows: list[tuple[int, int, int, bool]]) -> None:
    """Beside a ledger that knows nothing of folding: one coverage per epoch."""
    chain, plain = LedgerChain(), dict[int, Coverage]()
    for first, count, length, confirmed in rows:
        epochs = range(first, first + count)
        made = chain.commit([record(0, (0, length), epoch=e) for e in epochs], "c")
        for epoch in epochs:
            plain[epoch] = plain.get(epoch, Coverage()).plus(np.array([[0, length]]))
        if confirmed:
            chain.confirm("c")
        made = DataCommit.from_json(json.loads(json.dumps(made.to_json())))
        assert {e for e in range(40) if made.find("d", e)} == set(plain)
        assert all(made.coverage("d", epoch) == coverage for epoch, coverage in plain.items())


# --- which checkpoint a record continues ----------------------------------------------------------------------


def spans_of(commit: DataCommit) -> tuple[list[list[int]], list[list[int]]]:
    found = commit.find("d", 0)
    assert found is not None
    return found.before.covered.to_json(), Spans(found.trained).to_json()


def test_a_record_continues_the_newest_confirmed_checkpoint() -> None:
    chain = LedgerChain()
    a = chain.commit([record(0, (0, 10))], "a")
    b = chain.commit([record(0, (10, 20))], "b")  # The save of a is still under way.
    assert (a.base_known, a.base, b.base) == (True, None, None)
    assert b.unconfirmed == ("a",)
    assert spans_of(b) == ([], [[0, 20]])
    chain.confirm("a")
    c = chain.commit([record(0, (20, 30))], "c")
    assert (c.base, c.unconfirmed) == ("a", ("b",))
    assert spans_of(c) == ([[0, 10]], [[10, 30]])
    chain.confirm("c")
    chain.confirm("b")  # Late: there is a newer one.
    chain.confirm("somebody else's")
    d = chain.commit([record(0, (30, 40))], "d")
    assert (d.base, d.unconfirmed) == ("c", ())
    assert spans_of(d) == ([[0, 30]], [[30, 40]])


def test_a_failed_save_changes_nothing_but_itself() -> None:
    chain = LedgerChain()
    for name, start in (("a", 0), ("b", 10), ("c", 20)):
        chain.commit([record(0, (start, start + 10))], name)
    chain.fail("b")
    chain.fail("never heard of")
    assert chain.pending == ("a", "c")
    chain.confirm("a")
    chain.confirm("b")  # It was given up.
    d = chain.commit([], "d")
    assert (d.base, d.unconfirmed) == ("a", ("c",))
    assert spans_of(d) == ([[0, 10]], [[10, 30]])
    chain.fail("d")
    chain.fail("c")
    assert spans_of(chain.commit([record(0, (30, 40))], "e")) == ([[0, 10]], [[10, 40]])


def test_what_a_snapshot_held_is_kept_when_the_save_before_it_is_confirmed() -> None:
    chain = LedgerChain()
    chain.commit([record(0, (0, 10))], "a")
    chain.commit([record(0, (10, 15))], durable=False)
    chain.confirm("a")
    assert spans_of(chain.commit([record(0, (15, 20))], "b")) == ([[0, 10]], [[10, 20]])


def test_a_snapshot_in_memory_is_never_continued_but_may_become_durable() -> None:
    chain = LedgerChain()
    chain.commit([record(0, (0, 10))], "a")
    chain.confirm("a")
    chain.commit([record(0, (10, 15))], "b")
    snapshot = chain.commit([record(0, (15, 20))], "s", durable=False)
    after_crash = LedgerChain()
    after_crash.restore(snapshot, checkpoint_id="s", durable=False)
    c = after_crash.commit([record(0, (20, 30))], "c")
    assert (c.base, c.unconfirmed) == ("a", ("b", "s"))
    assert spans_of(c) == ([[0, 10]], [[10, 30]])
    after_crash.confirm("s")
    assert spans_of(after_crash.commit([], "d")) == ([[0, 20]], [[20, 30]])


def test_without_ids_every_durable_commit_is_continued_by_the_next_and_leaves_the_link_to_the_manifest() -> (
    None
):
    chain = LedgerChain()
    assert "base" not in chain.commit([record(0, (0, 10))]).to_json()
    second = chain.commit([record(0, (10, 20))])
    assert not second.base_known
    assert spans_of(second) == ([[0, 10]], [[10, 20]])
    restored = LedgerChain()
    restored.restore(second)
    assert spans_of(restored.commit([record(0, (20, 30))])) == ([[0, 20]], [[20, 30]])
