"""Spans behave like the sets of integers they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.spans import Run, Spans, expanded, overlaps, recorded

rows = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=12,
)


def members(pairs: list[tuple[int, int]]) -> set[int]:
    return {p for start, stop in pairs for p in range(start, stop)}


def members_of(pairs: Sequence[Sequence[int]]) -> list[int]:
    """With repeats, in order."""
    return [p for start, stop in pairs for p in range(start, stop)]


def positions(run: Run) -> list[int]:
    return members_of(
        [(run.start + i * run.stride, run.start + i * run.stride + run.length) for i in range(run.count)]
    )


def as_set(spans: Spans) -> set[int]:
    return members([(a, b) for a, b in spans.to_json()])


@given(rows, rows)
def test_the_algebra_is_that_of_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = Spans(a), Spans(b)
    assert as_set(left) == members(a)
    assert as_set(left | right) == members(a) | members(b)
    assert as_set(left & right) == members(a) & members(b)
    assert as_set(left - right) == members(a) - members(b)
    assert left.size == len(members(a))
    assert bool(left) == bool(members(a))
    assert (left == right) == (members(a) == members(b))


@given(rows, rows)
def test_bounds_are_canonical(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    for spans in (Spans(a), Spans(a) | Spans(b), Spans(a) & Spans(b), Spans(a) - Spans(b), overlaps(a)):
        flat = spans.bounds.ravel()
        assert (np.diff(flat) > 0).all()
        assert Spans(spans.to_json()) == spans
        assert hash(Spans(spans.to_json())) == hash(spans)


@given(rows)
def test_overlaps_are_the_positions_in_two_rows(a: list[tuple[int, int]]) -> None:
    counts: dict[int, int] = {}
    for start, stop in a:
        for p in range(start, stop):
            counts[p] = counts.get(p, 0) + 1
    assert as_set(overlaps(a)) == {p for p, n in counts.items() if n > 1}


@given(rows, st.lists(st.integers(-5, 90), max_size=8))
def test_count_below_counts_positions_before_each_edge(a: list[tuple[int, int]], edges: list[int]) -> None:
    assert Spans(a).count_below(edges).tolist() == [len([p for p in members(a) if p < e]) for e in edges]


@given(rows)
def test_runs_keep_every_span_in_order(a: list[tuple[int, int]]) -> None:
    runs: tuple[Run, ...] = ()
    for start, stop in a:
        runs = recorded(runs, start, stop)
    assert sorted(members_of(expanded(runs).tolist())) == sorted(members_of(a))
    assert [p for run in runs for p in positions(run)] == members_of(a)


def test_a_thousand_equal_steps_are_one_run() -> None:
    runs: tuple[Run, ...] = ()
    for step in range(1_000):
        runs = recorded(runs, 7 + step * 32, 11 + step * 32)
    assert runs == (Run(start=7, length=4, stride=32, count=1_000),)


runs = st.lists(
    st.builds(
        Run,
        start=st.integers(0, 30),
        length=st.integers(1, 6),
        stride=st.integers(0, 12),
        count=st.integers(1, 6),
    ),
    max_size=8,
)


@given(runs, st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=3))
def test_runs_side_by_side_hold_every_position_as_often_as_they_say(
    found: list[Run], worlds: list[tuple[int, int]]
) -> None:
    for world, count in worlds:  # Ranks that divide batches among them, as trainers do.
        found += [Run(start=3 * rank, length=3, stride=3 * world, count=count) for rank in range(world)]
    expected = sorted(p for run in found for p in positions(run))
    assert sorted(members_of(expanded(found).tolist())) == expected


def test_a_thousand_ranks_of_a_million_steps_are_one_span() -> None:
    ranks = [Run(start=8 * rank, length=8, stride=8_000, count=1_000_000) for rank in range(1_000)]
    assert expanded(ranks).tolist() == [[0, 8_000_000_000]]


def test_runs_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"length": 0},
        {"start": -1},
        {"count": 0},
        {"stride": -1},
        {"count": 2**40, "stride": 2**40},
    ):
        with pytest.raises(ValueError, match="not a run of positions"):
            Run(**{"start": 0, "length": 1, **wrong})
    with pytest.raises(ValueError, match="separate spans"):
        expanded([Run(start=0, length=1, stride=3, count=10**12)])


def test_people_read_both_ends() -> None:
    assert str(Spans([(0, 100), (200, 201)])) == "0–99, 200"
    assert str(Spans()) == "none"
    assert str(Spans([(i * 10, i * 10 + 2) for i in range(8)])).endswith("40–41 and 3 more")
