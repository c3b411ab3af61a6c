"""The order is a permutation, looks random, seeks in constant time, and is divided without loss."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.order import EpochOrder, loss_weight, slice_for

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
HUGE = 10**10 + 7


def chi_square_z(observed: np.ndarray, expected: float) -> float:
    """How many standard deviations the chi-square statistic lies from what chance gives."""
    degrees = observed.size - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_small_total_is_a_permutation(shuffle: bool) -> None:
    for total in [*range(300), 1_003, 4_095, 4_096, 4_097, 65_537]:
        order = EpochOrder(total=total, seed=3, epoch=total % 5, shuffle=shuffle)
        samples = order[:]
        assert np.array_equal(np.sort(samples), np.arange(total))
        assert np.array_equal(order.positions_of(samples), np.arange(total))


@given(st.integers(1, 2**62), seeds, epochs, st.data())
def test_the_inverse_undoes_the_order_at_any_size(
    total: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20))
    order = EpochOrder(total=total, seed=seed, epoch=epoch)
    samples = order.take(positions)
    assert samples.min() >= 0
    assert samples.max() < total
    assert order.positions_of(samples).tolist() == positions


@given(st.integers(1, 10**12), seeds, epochs, st.integers(0, 10**12), st.integers(0, 50), st.integers(0, 50))
def test_a_slice_is_the_same_wherever_reading_began(
    total: int, seed: int, epoch: int, start: int, before: int, count: int
) -> None:
    start = start % total
    order = EpochOrder(total=total, seed=seed, epoch=epoch)
    assert np.array_equal(
        order[max(0, start - before) : start + count][min(before, start) :], order[start : start + count]
    )


def test_without_shuffle_a_position_is_its_sample() -> None:
    order = EpochOrder(total=10, shuffle=False)
    assert order[2:6].tolist() == [2, 3, 4, 5]


def test_seed_and_epoch_each_change_the_order_and_nothing_else_does() -> None:
    total = 10_000
    orders = [EpochOrder(total=total, seed=s, epoch=e)[:] for s in range(4) for e in range(4)]
    for a, b in itertools.combinations(orders, 2):
        assert np.count_nonzero(a == b) < 12  # Two random permutations agree in one place on average.
    assert np.array_equal(orders[0], EpochOrder(total=total)[:])


@pytest.mark.parametrize("total", [2, 3, 4, 5, 6])
def test_every_permutation_of_a_few_samples_is_equally_likely(total: int) -> None:
    draws = min(40 * math.factorial(total), 4_000)
    seen = Counter(tuple(EpochOrder(total=total, seed=7, epoch=e)[:].tolist()) for e in range(draws))
    counts = np.array([seen[p] for p in itertools.permutations(range(total))])
    assert abs(chi_square_z(counts, draws / counts.size)) < 5


@pytest.mark.parametrize("total", [1_000, 5_000, 65_536, 100_003])
def test_every_part_of_the_epoch_draws_from_every_part_of_the_dataset(total: int) -> None:
    """The joint histogram of (position, sample) in a grid is flat."""
    cells = 16
    grid = np.zeros((cells, cells))
    for epoch in range(40):
        samples = EpochOrder(total=total, seed=1, epoch=epoch)[:]
        rows = np.arange(total) * cells // total
        np.add.at(grid, (rows, samples * cells // total), 1)
    sizes = np.bincount(np.arange(total) * cells // total)
    expected = 40 * np.outer(sizes, sizes) / total
    # Rows and columns are full by construction: that takes degrees of freedom, and lowers the statistic.
    degrees = (cells - 1) ** 2
    statistic = float(((grid - expected) ** 2 / expected).sum())
    assert abs(statistic - degrees) / math.sqrt(2 * degrees) < 5


@pytest.mark.parametrize("total", [1_000, 65_536, 100_003, HUGE])
def test_displacement_follows_that_of_a_random_permutation(total: int) -> None:
    """How far a sample travels, cyclically, is uniform."""
    positions = np.unique(np.linspace(0, total - 1, 50_000).astype(np.int64))
    bins = np.zeros(50)
    for epoch in range(8):
        moved = (EpochOrder(total=total, seed=5, epoch=epoch).take(positions) - positions) % total
        bins += np.bincount((moved.astype(np.float64) * 50 / total).astype(np.int64), minlength=50)[:50]
    assert abs(chi_square_z(bins, bins.sum() / 50)) < 5


@pytest.mark.parametrize("total", [5_000, 65_536, 100_003, HUGE])
@pytest.mark.parametrize("lag", [1, 2, 64, 1_024])
def test_neighbours_in_the_order_are_uncorrelated(total: int, lag: int) -> None:
    count = min(total, 200_000)
    samples = EpochOrder(total=total, seed=9)[:count].astype(np.float64)
    correlation = np.corrcoef(samples[:-lag], samples[lag:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(count)


@pytest.mark.parametrize("total", [5_000, 100_003, HUGE])
def test_consecutive_epochs_are_uncorrelated(total: int) -> None:
    count = min(total, 200_000)
    a, b = (EpochOrder(total=total, seed=9, epoch=e)[:count].astype(np.float64) for e in (0, 1))
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(count)


def test_the_tail_of_a_huge_epoch_costs_no_memory() -> None:
    order = EpochOrder(total=HUGE, seed=2)
    tracemalloc.start()
    order[HUGE - 1_000 : HUGE]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_the_order_is_the_same_in_another_process_and_for_all_time() -> None:
    script = "from strata.core.data.order import EpochOrder; print(EpochOrder(total=1003, seed=42, epoch=3)[:8].tolist())"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # A change of these numbers breaks every run that resumes across it.
    assert (
        out.stdout.strip()
        == str(EpochOrder(total=1003, seed=42, epoch=3)[:8].tolist())
        == "[544, 265, 100, 953, 761, 420, 124, 845]"
    )
    assert EpochOrder(total=HUGE, seed=42, epoch=3)[:3].tolist() == [5897045098, 4925244794, 743655978]


def test_positions_outside_the_epoch_are_refused() -> None:
    order = EpochOrder(total=10)
    with pytest.raises(IndexError, match="outside an epoch of 10 samples"):
        order.take([10])
    with pytest.raises(IndexError):
        order.take([-1])
    with pytest.raises(ValueError, match="total must be between"):
        EpochOrder(total=-1)
    with pytest.raises(ValueError, match="epoch must not be negative"):
        EpochOrder(total=1, epoch=-1)


def test_an_empty_and_a_single_sample_epoch_work() -> None:
    assert EpochOrder(total=0)[:].tolist() == []
    assert EpochOrder(total=1, seed=8)[:].tolist() == [0]


@given(st.integers(1, 64), st.integers(0, 10**10), st.integers(0, 2_000))
def test_slices_cover_the_batch_exactly_and_differ_by_at_most_one(world: int, start: int, size: int) -> None:
    slices = [slice_for(rank, world, start, size) for rank in range(world)]
    assert slices[0].start == start
    assert slices[-1].stop == start + size
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    lengths = [len(s) for s in slices]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 64), st.integers(1, 500), st.integers(0, 2**32))
def test_weighted_means_average_to_the_mean_of_the_whole_batch(world: int, size: int, seed: int) -> None:
    losses = np.random.default_rng(seed).normal(size=size)
    slices = [slice_for(rank, world, 0, size) for rank in range(world)]
    averaged = sum(s.weight * losses[s.start : s.stop].mean() for s in slices if len(s)) / world
    assert averaged == pytest.approx(losses.mean(), rel=1e-9, abs=1e-12)
    assert all(s.weight == 0 for s in slices if not len(s))


def test_a_batch_of_nothing_weighs_nothing() -> None:
    assert loss_weight(0, 4, 0) == 0.0


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4 is not in a world of 4"):
        slice_for(4, 4, 0, 8)
    with pytest.raises(ValueError, match="must not be negative"):
        slice_for(0, 4, 0, -1)
