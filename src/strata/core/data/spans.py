"""Sets of positions as sorted, disjoint half-open spans, and regular runs of spans.

`Spans` is the algebra the ledger rests on: union, intersection and difference are one vectorised sweep over
edges, so that their cost follows the number of spans and never the number of positions. `Run` writes down what
one rank read over many steps (slices of equal length at equal distance) in four numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_POSITION = 2**62
MAX_ROWS = 10_000_000

Bounds = NDArray[np.int64]
"""Rows of (start, stop); may overlap, in any order."""


class Spans:
    """An immutable set of positions."""

    __slots__ = ("bounds",)

    bounds: Bounds
    """Rows of (start, stop): sorted, disjoint, not touching, not empty."""

    def __init__(self, bounds: ArrayLike = ()) -> None:
        """The union of any rows of (start, stop)."""
        self.bounds = _sweep(as_bounds(bounds), at_least=1)

    @property
    def size(self) -> int:
        """How many positions it holds."""
        return int((self.bounds[:, 1] - self.bounds[:, 0]).sum())

    def __bool__(self) -> bool:
        return len(self.bounds) > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spans) and np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def __or__(self, other: Spans) -> Spans:
        # The usual case: the ledger adds up many records of which few have dropped anything.
        if not self or not other:
            return self or other
        return Spans(np.concatenate([self.bounds, other.bounds]))

    def __and__(self, other: Spans) -> Spans:
        if not self or not other:
            return Spans()
        return overlaps(np.concatenate([self.bounds, other.bounds]))

    def __sub__(self, other: Spans) -> Spans:
        weights = np.r_[np.ones(len(self.bounds), np.int64), np.full(len(other.bounds), -1)]
        return _raw(_sweep(np.concatenate([self.bounds, other.bounds]), at_least=1, weights=weights))

    def count_below(self, edges: ArrayLike) -> NDArray[np.int64]:
        """For each edge, how many positions lie before it."""
        edges = np.asarray(edges, np.int64)
        if not self:
            return np.zeros(edges.shape, np.int64)
        total_before = np.r_[0, np.cumsum(self.bounds[:, 1] - self.bounds[:, 0])]
        # Spans that start at or before the edge.
        index = np.searchsorted(self.bounds[:, 0], edges, side="right")
        # The part of the last one that does not count.
        beyond = np.maximum(self.bounds[index - 1, 1] - edges, 0)
        return np.asarray(total_before[index] - np.where(index > 0, beyond, 0))

    def to_json(self) -> list[list[int]]:
        return [[int(start), int(stop)] for start, stop in self.bounds]

    def __repr__(self) -> str:
        return f"Spans({self.to_json()})"

    def __str__(self) -> str:
        """For people: `0–99, 200–249 and 3 more`, both ends included."""
        shown = [f"{a:,}" if b - a == 1 else f"{a:,}–{b - 1:,}" for a, b in self.bounds[:5].tolist()]
        more = len(self.bounds) - len(shown)
        return (", ".join(shown) or "none") + (f" and {more:,} more" if more else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` spans of `length` positions, the first at `start`, each `stride` after the one before."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1 or self.count < 1 or self.stride < 0 or self.stop > MAX_POSITION:
            raise ValueError(f"not a run of positions: {self}")

    @property
    def stop(self) -> int:
        return self.start + self.stride * (self.count - 1) + self.length

    def extended(self, start: int, stop: int) -> Run | None:
        """This run with one more span, or None where that span does not continue it."""
        if stop - start != self.length or start < self.start:
            return None
        if self.count == 1:
            return Run(start=self.start, length=self.length, stride=start - self.start, count=2)
        if start != self.start + self.count * self.stride:
            return None
        return Run(start=self.start, length=self.length, stride=self.stride, count=self.count + 1)

    def followed_by(self, other: Run) -> Run | None:
        """Both as one run, or None where the other does not continue this one."""
        if other.count == 1:
            return self.extended(other.start, other.stop)
        stride = other.stride if self.count == 1 else self.stride
        if (other.length, other.stride, other.start) != (
            self.length,
            stride,
            self.start + self.count * stride,
        ):
            return None
        return Run(start=self.start, length=self.length, stride=stride, count=self.count + other.count)


def joined(runs: Sequence[Run], more: Iterable[Run]) -> tuple[Run, ...]:
    """The runs of one record and those of the next: what continues stays one run."""
    together = list(runs)
    for run in more:
        longer = together[-1].followed_by(run) if together else None
        together[-1:] = [longer] if longer else [*together[-1:], run]
    return tuple(together)


def recorded(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """The runs with one more span read. Steps of equal size stay one run however many they are."""
    if stop <= start:
        return tuple(runs)
    longer = runs[-1].extended(start, stop) if runs else None
    return (*runs[:-1], longer) if longer else (*runs, Run(start=start, length=stop - start))


def expanded(runs: Iterable[Run]) -> Bounds:
    """Every span of the runs, repeats included.

    Ranks that read side by side, step after step, leave no gap: their runs are one span, found without going
    through the steps. Raises `ValueError` where runs are so irregular that they would take too much memory.
    """
    rows = [np.empty((0, 2), np.int64)]
    budget = MAX_ROWS
    by_rhythm: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        by_rhythm.setdefault((run.stride, run.count), []).append(run)
    for (stride, count), group in by_rhythm.items():
        first = as_bounds([(run.start, run.start + run.length) for run in group])
        merged = Spans(first)
        if not overlaps(first) and len(merged.bounds) == 1 and merged.size == stride:
            start = int(merged.bounds[0, 0])
            rows.append(as_bounds([(start, start + stride * count)]))
            continue
        budget -= len(first) * count
        if budget < 0:
            raise ValueError(f"more than {MAX_ROWS:,} separate spans")
        steps = stride * np.arange(count, dtype=np.int64)
        rows.append((first[:, None, :] + steps[None, :, None]).reshape(-1, 2))
    return np.concatenate(rows)


def overlaps(bounds: ArrayLike) -> Spans:
    """The positions that stand in at least two of the rows."""
    return _raw(_sweep(as_bounds(bounds), at_least=2))


def as_bounds(rows: ArrayLike) -> Bounds:
    return np.asarray(rows, np.int64).reshape(-1, 2)


def _raw(bounds: Bounds) -> Spans:
    spans = Spans.__new__(Spans)
    spans.bounds = bounds
    return spans


def _sweep(bounds: Bounds, *, at_least: int, weights: NDArray[np.int64] | None = None) -> Bounds:
    """Where the summed weight of the rows reaches `at_least`, as canonical rows."""
    if not len(bounds):
        return bounds
    weights = np.ones(len(bounds), np.int64) if weights is None else weights
    edges = np.concatenate([bounds[:, 0], bounds[:, 1]])
    order = np.argsort(edges, kind="stable")
    edges = edges[order]
    depth = np.cumsum(np.concatenate([weights, -weights])[order])
    final = np.r_[edges[1:] != edges[:-1], True]  # Depth counts only once every row at an edge is in.
    edges, inside = edges[final], depth[final] >= at_least
    was_inside = np.r_[False, inside[:-1]]
    return np.stack([edges[inside & ~was_inside], edges[~inside & was_inside]], axis=1)
