"""Buckets lose no extreme, no value and no step, whichever way they were put together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.telemetry.downsampling import FACTOR, Buckets, cover, joined, level_for

VALUES = st.lists(st.floats(width=64, allow_nan=True, allow_infinity=True), min_size=1, max_size=200)


def check_same_values(whole: Buckets, values: list[float]) -> None:
    """That these buckets together are of exactly these values, at steps 0, 1, 2…"""
    finite = [v for v in values if math.isfinite(v)]
    assert int(whole.count.sum()) == len(values)
    assert int(whole.bad.sum()) == len(values) - len(finite)
    assert (whole.first[0], whole.last[-1]) == (0, len(values) - 1)
    assert (whole.first[1:] == whole.last[:-1] + 1).all()
    np.testing.assert_equal(whole.final[-1], values[-1])
    if finite:
        assert np.nanmin(whole.low) == min(finite)
        assert np.nanmax(whole.high) == max(finite)
        assert (whole.low[whole.count > whole.bad] <= whole.mean[whole.count > whole.bad]).all()
        assert (whole.mean[whole.count > whole.bad] <= whole.high[whole.count > whole.bad]).all()
    assert np.isnan(whole.mean[whole.count == whole.bad]).all()


@given(VALUES, st.integers(1, 50))
def test_fewer_points_keep_every_extreme(values: list[float], points: int) -> None:
    buckets = Buckets.of(range(len(values)), values).at_most(points)
    assert len(buckets) <= points
    check_same_values(buckets, values)


@given(VALUES.filter(lambda v: all(abs(x) < 1e6 for x in v)), st.integers(1, 50))
def test_mean_of_means_is_the_mean(values: list[float], points: int) -> None:
    once = Buckets.of(range(len(values)), values).at_most(points).at_most(1)
    assert once.mean[0] == pytest.approx(float(np.mean(values)), abs=1e-6)


@given(st.integers(0, 9_000), st.integers(0, 9_000), st.integers(0, 4))
def test_pieces_of_a_range_are_in_order_and_exactly_the_range(first: int, stop: int, level: int) -> None:
    pieces = cover(first, stop, level)
    at = first
    for piece in pieces:
        assert piece.level <= level
        assert piece.first * FACTOR**piece.level == at
        at = piece.stop * FACTOR**piece.level
    assert at == max(first, stop) or first >= stop
    assert sum(1 for piece in pieces if piece.level == level) <= 1
    assert len(pieces) <= 2 * level + 1


@given(st.integers(0, 5_000), st.integers(0, 5_000), st.integers(1, 100))
def test_a_range_read_from_a_pyramid_is_the_range(first: int, stop: int, points: int) -> None:
    values = np.random.default_rng(7).standard_normal(5_000)
    pyramid = [Buckets.of(range(len(values)), values)]
    while len(pyramid[-1]) >= FACTOR:
        pyramid.append(pyramid[-1].complete_groups())
    level = min(level_for(stop - first, points), len(pyramid) - 1)
    parts = [pyramid[p.level][p.first : p.stop] for p in cover(first, stop, level)]
    got = joined(parts)
    if first >= stop:
        assert len(got) == 0
        return
    assert (got.first[0], got.last[-1], int(got.count.sum())) == (first, stop - 1, stop - first)
    assert got.low.min() == values[first:stop].min()
    assert len(got) < FACTOR * points + 2 * FACTOR * level + FACTOR
