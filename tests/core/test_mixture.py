"""What comes at a position depends on nothing but the definition, keeps its proportions, and can be counted and inverted."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.data.mixture import (
    ENDLESS,
    Change,
    Definition,
    MixtureError,
    MixturePlan,
    Source,
    Split,
)
from strata.core.data.order import EpochOrder, samples_of
from strata.core.data.spans import Spans

WINDOW = 10_000


def defined(
    sizes: list[int], weights: list[float], *, epochs: list[int | None] | None = None, **more: object
) -> Definition:
    sources = tuple(
        Source(name=f"s{i}", size=size, epochs=epochs[i] if epochs else None) for i, size in enumerate(sizes)
    )
    return Definition(
        sources=sources,
        weights={f"s{i}": weight for i, weight in enumerate(weights)},
        **more,  # type: ignore[arg-type]
    )


def deviation(plan: MixturePlan, first: int, weights: list[float]) -> float:
    """The largest distance, in draws, of any window from the weights."""
    leaf = plan.draw(np.arange(first, first + 3 * WINDOW)).leaf
    before = np.zeros((len(leaf) + 1, len(weights)))
    before[1:] = np.cumsum(leaf[:, None] == np.arange(len(weights)), axis=0)
    counts = before[WINDOW:] - before[:-WINDOW]
    return float(np.abs(counts - WINDOW * np.asarray(weights)).max())


@pytest.mark.parametrize("seed", range(8))
def test_any_window_of_ten_thousand_draws_has_the_weights_within_a_thousandth(seed: int) -> None:
    draw = random.Random(seed)
    raw = [draw.choice([draw.random(), draw.random() ** 6, 1.0]) + 1e-6 for _ in range(draw.randint(1, 40))]
    weights = [weight / sum(raw) for weight in raw]
    plan = MixturePlan(definition=defined([10**9] * len(raw), raw, seed=seed))
    for first in (0, 10**6 + 13, 10**9, 10**14):
        assert deviation(plan, first, weights) < 10  # Of 10,000: a thousandth.


def test_one_large_and_a_thousand_small_sources_keep_their_weights() -> None:
    weights = [0.9, *[0.1 / 999] * 999]
    plan = MixturePlan(definition=defined([10**6] * 1000, weights))
    assert deviation(plan, 10**7, weights) < 10


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any),
    st.integers(0, 2**40),
    st.integers(0, 10**15),
)
def test_draws_counts_and_places_are_one_thing(parts: list[int], seed: int, start: int) -> None:
    split = Split(parts, seed=seed)
    source, number = split.draw(np.arange(start, start + 200))
    counts = split.counts(start)
    for position, (which, count) in enumerate(zip(source.tolist(), number.tolist(), strict=True), start):
        assert counts[which] == count
        assert split.position_of(which, count) == position
        counts[which] += 1
    assert counts == split.counts(start + 200)


def test_each_source_is_read_in_epochs_of_its_own() -> None:
    plan = MixturePlan(definition=defined([1000, 37, 5], [0.5, 0.3, 0.2], seed=4))
    leaf, epoch, sample = plan.choose(np.arange(5_000))
    for index, each in enumerate(plan.leaves):
        mine = sample[leaf == index]
        for number in range(len(mine) // each.size):
            part = mine[number * each.size : (number + 1) * each.size]
            assert np.array_equal(part, EpochOrder(total=each.size, seed=each.seed, epoch=number)[:])
            assert (epoch[leaf == index][number * each.size : (number + 1) * each.size] == number).all()


def test_many_orders_at_once_are_what_each_of_them_is() -> None:
    orders = [
        EpochOrder(total=total, seed=9, epoch=epoch, shuffle=shuffle)
        for epoch, (total, shuffle) in enumerate(
            [
                (1, True),
                (2, True),
                (5, True),
                (5, False),
                (64, True),
                (65, True),
                (5_000, True),
                (10**9, True),
            ]
        )
    ]
    draw = random.Random(2)
    pairs = [
        (which, draw.randrange(orders[which].total)) for which in draw.choices(range(len(orders)), k=500)
    ]
    which, positions = np.asarray(pairs, np.int64).T
    expected = [int(orders[index].take(position)[0]) for index, position in pairs]
    assert samples_of(orders, which, positions).tolist() == expected


def test_a_schedule_changes_the_weights_at_its_step_and_rescales_the_rest() -> None:
    definition = defined([10**6] * 3, [0.7, 0.2, 0.1], schedule=(Change(step=100, weights={"s1": 0.4}),))
    plan = MixturePlan(definition=definition, global_batch_size=32)
    assert plan.settings() == [
        (0, (Fraction(7, 10), Fraction(1, 5), Fraction(1, 10))),
        (3200, (Fraction(21, 40), Fraction(2, 5), Fraction(3, 40))),
    ]
    assert plan.counts(3200) == [2240, 640, 320]
    # What came before a change does not depend on it.
    before = MixturePlan(definition=defined([10**6] * 3, [0.7, 0.2, 0.1]), global_batch_size=32)
    assert np.array_equal(before.draw(np.arange(3200)).leaf, plan.draw(np.arange(3200)).leaf)


def test_a_source_that_has_run_out_stops_the_mixture_or_leaves_it() -> None:
    sizes, weights = [50, 10_000], [0.5, 0.5]
    stops = MixturePlan(definition=defined(sizes, weights, epochs=[2, None]))
    assert (stops.ended_by, stops.counts(stops.total)[0]) == ("s0", 100)
    assert stops.total in (200, 201)  # The draw that would be the next of s0 is the first that is not there.
    goes_on = MixturePlan(definition=defined(sizes, weights, epochs=[2, None], when_exhausted="continue"))
    assert goes_on.is_endless
    assert goes_on.draw(np.arange(stops.total, 2_000)).leaf.tolist() == [1] * (2_000 - stops.total)
    ends = MixturePlan(definition=defined(sizes, weights, epochs=[2, 1], when_exhausted="continue"))
    assert (ends.total, ends.counts(ends.total)) == (10_100, [100, 10_000])
    with pytest.raises(IndexError):
        ends.draw([10_100])


def test_mixtures_can_be_nested() -> None:
    inner = defined([40, 60], [1, 3], seed=5)
    outer = Definition(
        sources=(Source(name="a", size=100), Source(name="in", mixture=inner)), weights={"a": 1, "in": 1}
    )
    plan = MixturePlan(definition=outer)
    assert [leaf.name for leaf in plan.leaves] == ["a", "in/s0", "in/s1"]
    leaf, number = plan.draw(np.arange(8_000))
    assert np.bincount(leaf).tolist() == plan.counts(8_000)
    assert plan.counts(8_000) == [4000, 1000, 3000]
    for index in range(3):
        assert number[leaf == index].tolist() == list(range(plan.counts(8_000)[index]))


def test_spans_of_positions_are_spans_of_draws() -> None:
    plan = MixturePlan(definition=defined([100, 7], [0.6, 0.4]))
    leaf, number = plan.draw(np.arange(500))
    chosen = Spans([(3, 90), (200, 301), (499, 500)])
    mine = np.zeros(500, bool)
    for start, stop in chosen.bounds.tolist():
        mine[start:stop] = True
    for index, draws in enumerate(plan.draws_of(chosen)):
        assert draws == Spans([(n, n + 1) for n in number[mine & (leaf == index)].tolist()])


def test_a_record_of_a_mixture_gives_the_same_mixture() -> None:
    inner = defined([40, 60], [1, 3], seed=5)
    definition = Definition(
        sources=(Source(name="a", size=100, epochs=3), Source(name="in", mixture=inner)),
        weights={"a": 0.3, "in": 1 / 3},
        schedule=(Change(step=4, weights={"a": 0.25}),),
        seed=11,
        when_exhausted="continue",
    )
    again = Definition.from_json(json.loads(json.dumps(definition.to_json())))
    assert again == definition
    one, other = (MixturePlan(definition=each, global_batch_size=8) for each in (definition, again))
    assert np.array_equal(one.choose(np.arange(3_000)).sample, other.choose(np.arange(3_000)).sample)


@settings(max_examples=50)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_a_damaged_record_is_refused(value: object) -> None:
    record = defined([5], [1]).to_json() | {"sources": value}
    with pytest.raises(MixtureError):
        Definition.from_json(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": {"s0": 1}}, "'s1' has no weight"),
        ({"weights": {"s0": 1, "s1": -1}}, "must be a number that is not negative"),
        ({"weights": {"s0": 1, "s1": float("nan")}}, "must be a number that is not negative"),
        ({"weights": {"s0": 0, "s1": 0}}, "all weights are 0"),
        ({"weights": {"s0": 1, "s1": 1, "s2": 1}}, "there is no source 's2'"),
        ({"schedule": (Change(step=3, weights={"s0": 0.7, "s1": 0.7}),)}, "add up to 1.4"),
        ({"schedule": (Change(step=-1, weights={"s0": 0.7}),)}, "cannot begin at step -1"),
        ({"sources": (Source(name="s0", size=0), Source(name="s1", size=1))}, "has no samples"),
        ({"sources": ()}, "at least one source"),
        ({"when_exhausted": "repeat"}, "'stop' or 'continue'"),
    ],
)
def test_what_cannot_be_mixed_is_refused_with_the_reason(change: dict[str, object], message: str) -> None:
    base: dict[str, object] = {
        "sources": (Source(name="s0", size=3), Source(name="s1", size=4)),
        "weights": {"s0": 1.0, "s1": 1.0},
    }
    with pytest.raises(MixtureError, match=message):
        Definition(**{**base, **change})  # type: ignore[arg-type]


def test_seeking_far_costs_nothing() -> None:
    plan = MixturePlan(definition=defined([10**6] * 8, [1.0] * 8), global_batch_size=256)
    assert plan.is_endless
    assert sum(plan.counts(10**15)) == 10**15
    assert plan.draw([10**9, 10**15, ENDLESS - 1]).leaf.shape == (3,)
