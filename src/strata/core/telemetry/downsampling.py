"""Many values as few buckets, and a pyramid of them in which any range is a few pieces.

A bucket says of a run of values: which steps they belong to, the least and the greatest, their mean and the last one.
Values that are no finite number are counted and take no part in the others, but for the last. Level 0 of a pyramid has the
values themselves, and each bucket of a higher level is `FACTOR` of the level below; there are complete ones only, so what
is written never changes. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FACTOR = 16
TOP = 5
"""The highest level: a bucket of it is a million values."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Columns of equal length, oldest first."""

    first: Ints
    """The lowest step."""
    last: Ints
    """The highest step."""
    count: Ints
    bad: Ints
    """How many of the values are no finite number."""
    low: Floats
    high: Floats
    mean: Floats
    final: Floats
    """The last value, whatever it is."""

    @classmethod
    def of(cls, steps: npt.ArrayLike, values: npt.ArrayLike) -> Buckets:
        """Each value by itself."""
        at = np.asarray(steps, np.int64)
        final = np.asarray(values, np.float64)
        finite = np.isfinite(final)
        seen = np.where(finite, final, np.nan)
        return cls(at, at, np.ones(len(at), np.int64), (~finite).astype(np.int64), seen, seen, seen, final)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, which: slice | npt.NDArray[Any]) -> Buckets:
        return Buckets(*(getattr(self, f.name)[which] for f in fields(self)))

    def grouped(self, begins: Ints) -> Buckets:
        """One bucket from each of these positions to the next."""
        if len(begins) == len(self):
            return self
        if not len(begins):
            return self[:0]
        good = self.count - self.bad
        with np.errstate(all="ignore"):
            total = np.add.reduceat(np.where(good > 0, self.mean * good, 0.0), begins)
            low, high = np.fmin.reduceat(self.low, begins), np.fmax.reduceat(self.high, begins)
            goods = np.add.reduceat(good, begins)
            # A sum may round, or be more than a number holds; a mean lies between its values.
            mean = np.where(goods > 0, np.clip(total / np.maximum(goods, 1), low, high), np.nan)
        ends = np.append(begins[1:], len(self)) - 1
        return Buckets(
            np.minimum.reduceat(self.first, begins),
            np.maximum.reduceat(self.last, begins),
            np.add.reduceat(self.count, begins),
            np.add.reduceat(self.bad, begins),
            low,
            high,
            mean,
            self.final[ends],
        )

    def complete_groups(self) -> Buckets:
        """The next level: what is left of `FACTOR` at the end is left out."""
        whole = len(self) // FACTOR
        return self[: whole * FACTOR].grouped(np.arange(whole, dtype=np.int64) * FACTOR)

    def at_most(self, points: int) -> Buckets:
        """So many buckets or fewer, each of about as many values."""
        if len(self) <= points:
            return self
        before = np.cumsum(self.count) - self.count
        number = before * points // int(self.count.sum())
        return self.grouped(np.flatnonzero(np.diff(number, prepend=-1)))

    def within(self, first: int, last: int) -> Buckets:
        """Those with steps in this range, both included."""
        return self[(self.last >= first) & (self.first <= last)]


def joined(parts: Sequence[Buckets]) -> Buckets:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Buckets.of([], [])
    return Buckets(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Buckets)))


class Piece(NamedTuple):
    """Buckets `first` up to `stop` of a level."""

    level: int
    first: int
    stop: int


def cover(first: int, stop: int, level: int) -> list[Piece]:
    """Values `first` up to `stop`, in buckets of `level` wherever one lies within them, and of lower levels at the ends."""
    if first >= stop:
        return []
    if level == 0:
        return [Piece(0, first, stop)]
    width = FACTOR**level
    begin, end = -(-first // width), stop // width
    if begin >= end:
        return cover(first, stop, level - 1)
    return [
        *cover(first, begin * width, level - 1),
        Piece(level, begin, end),
        *cover(end * width, stop, level - 1),
    ]


def level_for(values: int, points: int) -> int:
    """The highest level that has at least half as many buckets for so many values: fewer than asked for are soon read, and the
    next level down has sixteen times as many."""
    level = 0
    while level < TOP and values // FACTOR ** (level + 1) * 2 >= points:
        level += 1
    return level
