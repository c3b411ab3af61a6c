"""A histogram as columns of numbers, so that it is kept, downsampled and rolled back like every other metric.

What is kept of many values is their quantiles: the mean of quantiles over steps is again a distribution between those of the
steps, which the mean of counts in buckets that move is not. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PERCENTS = (0, 1, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 99, 100)
MARK = "#"
QUANTILE_PARTS = tuple(f"q{percent}" for percent in PERCENTS)
PARTS = (*QUANTILE_PARTS, "mean", "std", "count")
"""The columns of one histogram: the least and the greatest value are its first and last quantile."""

Floats = npt.NDArray[np.float64]


def column(name: str, part: str) -> str:
    """Under which name a part of a histogram is kept."""
    return f"{name}{MARK}{part}"


@dataclass(frozen=True, slots=True)
class HistogramBuckets:
    """Values by buckets: `counts[i]` of them lie from `edges[i]` to `edges[i + 1]`."""

    edges: Floats
    counts: Floats
    mean: float
    std: float

    @property
    def count(self) -> float:
        return float(self.counts.sum())


def split(names: Sequence[str]) -> tuple[dict[str, list[int]], list[int]]:
    """Which columns are histograms, with the places of their parts in the order of `PARTS`, and which are metrics of their own."""
    where = {name: index for index, name in enumerate(names)}
    stems = [name.rpartition(MARK)[0] for name in names if name.endswith(column("", PARTS[0]))]
    found = {
        stem: [where[column(stem, part)] for part in PARTS]
        for stem in stems
        if all(column(stem, part) in where for part in PARTS)
    }
    taken = {index for parts in found.values() for index in parts}
    return found, [index for index in range(len(names)) if index not in taken]


def buckets(parts: Floats) -> HistogramBuckets | None:
    """Of the values of `PARTS`; None where nothing that was logged is a finite number."""
    edges = np.asarray(parts[: len(PERCENTS)], np.float64)
    mean, std, count = (float(value) for value in parts[len(PERCENTS) :])
    if not (np.isfinite(edges).all() and np.isfinite([mean, std]).all() and count > 0):
        return None
    shares = np.diff(np.array(PERCENTS)) / 100
    # A value that many have is several quantiles: what lies on an edge counts to the bucket that begins there.
    begins = np.flatnonzero(np.diff(edges) > 0)
    if not len(begins):
        return HistogramBuckets(edges[[0, -1]], np.array([count]), mean, std)
    groups = np.concatenate([[0], begins[:-1] + 1])
    counts = np.add.reduceat(shares, groups)
    return HistogramBuckets(np.append(edges[begins], edges[-1]), counts * count, mean, std)
