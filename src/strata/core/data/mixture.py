"""What comes at each position of a mixture of sources: a pure function of its definition and the position.

A `Split` divides the positions 0, 1, 2, … among sources by their weights. It is a binary tree: at each node the n-th draw
goes left or right so that the left side has had floor((n * left + phase) / all) of the first n. Whatever stretch of
positions one looks at, each node is less than one draw away from its weights; so a source is less than four away, over
any stretch, and its counts need no table: how often a source has come before a position is arithmetic, and so is where
its n-th draw stands. Weights are exact fractions where their common denominator is small, else parts of a million or so.

A `MixturePlan` is a list of splits, one after the other: where the schedule, a live change or a source that has run out
gives other weights, the next one begins. Each source counts its own draws across all of them: draw n of a source is
sample `EpochOrder(epoch=n // size)` at `n % size`. So a source is read in epochs of its own, each sample exactly once in
each, whatever happens to the weights; and because the draws of a source among consecutive positions are consecutive,
spans of positions are spans of draws, which is what an audit by source adds up.

A nested mixture is a source whose draws are the positions of another plan. Pure.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strata.core.data.order import EpochOrder, Samples, samples_of
from strata.core.data.spans import Spans

ENDLESS = 2**53 - 1
"""How many positions a mixture has that never ends; and what the ledger takes for the length of every mixture, since a
live change may move its end. As large as JSON readers can tell apart."""
UNITS = 2**20
VERSION = 1
FEW = 1_024
"""Where the draws of one epoch of a source are fewer than this on average, all orders are computed together."""

WhenExhausted = Literal["stop", "continue"]


class MixtureError(ValueError):
    """A mixture that cannot be read, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From a step on, these sources have these shares; the others divide the rest as they did before."""

    step: int
    weights: Mapping[str, float]
    number: int = 0
    """Of one that was made while training: which request it was; see `strata.core.data.mixture_changes`."""

    def to_json(self) -> dict[str, Any]:
        number = {"number": self.number} if self.number else {}
        return {"step": self.step, "weights": dict(self.weights), **number}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Change:
        return cls(
            step=int(value["step"]),
            weights={str(k): float(w) for k, w in dict(value["weights"]).items()},
            number=int(value.get("number", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a mixture must know of one of its sources."""

    name: str
    size: int = 0
    """Samples in an epoch of it."""
    epochs: int | None = None
    """How often it may be read; None: it repeats."""
    shuffle: bool = True
    mixture: Definition | None = None
    """A nested one; then `size` is 0."""

    def to_json(self) -> dict[str, Any]:
        nested = {"mixture": self.mixture.to_json()} if self.mixture is not None else {}
        return {
            "name": self.name,
            "size": self.size,
            "epochs": self.epochs,
            "shuffle": self.shuffle,
            **nested,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Source:
        epochs, nested = value["epochs"], value.get("mixture")
        return cls(
            name=str(value["name"]),
            size=int(value["size"]),
            epochs=None if epochs is None else int(epochs),
            shuffle=bool(value["shuffle"]),
            mixture=None if nested is None else Definition.from_json(nested),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """All that decides what comes where, but for live changes: what a checkpoint keeps so that it can be replayed."""

    sources: tuple[Source, ...]
    weights: Mapping[str, float]
    schedule: tuple[Change, ...] = ()
    seed: int = 0
    when_exhausted: WhenExhausted = "stop"

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise MixtureError("a mixture needs at least one source")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MixtureError(f"two sources are called {twice[0]!r}")
        if self.when_exhausted not in ("stop", "continue"):
            raise MixtureError(f"when_exhausted must be 'stop' or 'continue', not {self.when_exhausted!r}")
        for source in self.sources:
            if not source.name or "/" in source.name:
                raise MixtureError(
                    f"{source.name!r} is not a valid source name: it must not be empty or contain '/'"
                )
            if source.mixture is None and source.size < 1:
                raise MixtureError(f"source {source.name!r} has no samples: there is nothing to draw from it")
            if source.epochs is not None and source.epochs < 1:
                raise MixtureError(f"epochs of source {source.name!r} must be positive, got {source.epochs}")
            if source.mixture is not None and source.mixture.schedule:
                raise MixtureError(
                    f"mixture {source.name!r} is part of another one and has a schedule: steps belong to the outermost "
                    "mixture. Give the schedule there"
                )
        _check_weights(self.weights, names)
        if missing := [name for name in names if name not in self.weights]:
            raise MixtureError(f"source {missing[0]!r} has no weight; give 0 to leave it out for now")
        if not any(self.weights.values()):
            raise MixtureError("all weights are 0: there is nothing to draw")
        for change in self.schedule:
            self.check_change(change)

    def check_change(self, change: Change) -> None:
        """Raise `MixtureError` where a change says something impossible."""
        if change.step < 0:
            raise MixtureError(f"a schedule cannot begin at step {change.step}")
        if not change.weights:
            raise MixtureError(f"the change at step {change.step:,} names no source")
        _check_weights(change.weights, [source.name for source in self.sources])
        total = sum(_exact(weight) for weight in change.weights.values())
        if total > 1:
            raise MixtureError(
                f"the shares given from step {change.step:,} on add up to {float(total):g}, more than 1"
            )
        if total == 0 and len(change.weights) == len(self.sources):
            raise MixtureError(
                f"from step {change.step:,} on all weights would be 0: there is nothing to draw"
            )

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "sources": [source.to_json() for source in self.sources],
            "weights": dict(self.weights),
            "schedule": [change.to_json() for change in self.schedule],
            "seed": self.seed,
            "when_exhausted": self.when_exhausted,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Definition:
        """Raises `MixtureError` where a record is not that of a mixture."""
        try:
            if value["version"] != VERSION:
                raise ValueError(f"version {value['version']} is not {VERSION}")
            return cls(
                sources=tuple(Source.from_json(source) for source in value["sources"]),
                weights={str(k): float(w) for k, w in dict(value["weights"]).items()},
                schedule=tuple(Change.from_json(change) for change in value["schedule"]),
                seed=int(value["seed"]),
                when_exhausted=value["when_exhausted"],
            )
        except MixtureError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MixtureError(f"not the record of a mixture ({type(error).__name__}: {error})") from error


class Leaf(NamedTuple):
    """A source that is no mixture, wherever it stands."""

    name: str
    """With the names of the mixtures it is in: `code/python`."""
    size: int
    seed: int
    shuffle: bool


class Drawn(NamedTuple):
    """What stands at some positions, one entry each."""

    leaf: NDArray[np.int64]
    """Which of the plan's `leaves`."""
    number: Samples
    """Which draw of that source it is, counted from 0."""


class Chosen(NamedTuple):
    leaf: NDArray[np.int64]
    epoch: Samples
    """Of the source."""
    sample: Samples


class Split:
    """Positions divided among sources by whole-numbered parts. Sources with 0 parts get none."""

    def __init__(self, parts: Sequence[int], *, seed: int, number: int = 0) -> None:
        if not any(parts):
            raise MixtureError("all weights are 0: there is nothing to draw")
        self.parts = tuple(parts)
        # A tree in which heavy sources stand near the root: few levels, and small deviations. (parts, order, node)
        heap: list[tuple[int, int, _Node]] = [
            (part, at, _Node(source=at)) for at, part in enumerate(parts) if part
        ]
        heapq.heapify(heap)
        made = len(parts)
        while len(heap) > 1:
            (small, _, right), (large, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            all_parts = small + large
            phase = _hashed(f"{seed}/{number}/{made}") % all_parts
            node = _Node(left=left, right=right, share=large, of=all_parts, phase=phase)
            heapq.heappush(heap, (all_parts, made, node))
            made += 1
        self._root = heap[0][2]
        self._paths: dict[int, tuple[tuple[_Node, bool], ...]] = dict(_paths(self._root, ()))

    def draw(self, positions: Samples) -> Drawn:
        """Which source each position has, and how many draws that source has had before it."""
        source = np.empty(len(positions), np.int64)
        number = np.empty(len(positions), np.int64)
        todo: list[tuple[_Node, NDArray[np.int64] | None, Samples]] = [(self._root, None, positions)]
        while todo:
            node, where, at = todo.pop()
            if node.left is None or node.right is None:
                if where is None:
                    source[:], number[:] = node.source, at
                else:
                    source[where], number[where] = node.source, at
                continue
            rounds, rest = np.divmod(at, node.of)
            rest *= node.share
            rest += node.phase
            more, rest = np.divmod(rest, node.of)
            before = rounds * node.share + more
            goes_left = rest >= node.of - node.share
            chosen, others = np.flatnonzero(goes_left), np.flatnonzero(~goes_left)
            todo.append((node.left, chosen if where is None else where[chosen], before[chosen]))
            todo.append((node.right, others if where is None else where[others], (at - before)[others]))
        return Drawn(source, number)

    def counts(self, position: int) -> list[int]:
        """How many draws each source has had before a position."""
        counts = [0] * len(self.parts)
        todo = [(self._root, position)]
        while todo:
            node, at = todo.pop()
            if node.left is None or node.right is None:
                counts[node.source] = at
            else:
                before = (at * node.share + node.phase) // node.of
                todo += [(node.left, before), (node.right, at - before)]
        return counts

    def position_of(self, source: int, number: int) -> int | None:
        """Where draw `number` of a source stands; None where it has no part."""
        if source not in self._paths:
            return None
        for node, is_left in reversed(self._paths[source]):
            # The smallest n so that floor(((n + 1) * share + phase) / of) > number, of whichever side it is.
            share = node.share if is_left else node.of - node.share
            phase = node.phase if is_left else node.of - 1 - node.phase
            number = -((phase - (number + 1) * node.of) // share) - 1
        return number


class _Node(NamedTuple):
    source: int = -1
    left: Any = None
    right: Any = None
    share: int = 0
    """Of `of` draws, so many go left."""
    of: int = 1
    phase: int = 0


def _paths(
    node: _Node, above: tuple[tuple[_Node, bool], ...]
) -> Iterator[tuple[int, tuple[tuple[_Node, bool], ...]]]:
    if node.left is None:
        yield node.source, above
    else:
        yield from _paths(node.left, (*above, (node, True)))
        yield from _paths(node.right, (*above, (node, False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Positions from `start` on, with the same weights."""

    start: int
    weights: tuple[Fraction, ...]
    """As they are set, whether or not a source has run out."""
    split: Split
    before: tuple[int, ...]
    """Draws that each source had had when it began."""


@dataclass(frozen=True, kw_only=True)
class MixturePlan:
    """A definition, with what has been changed since, laid out over positions."""

    definition: Definition
    changes: tuple[Change, ...] = ()
    """Made while training, in the order they were made."""
    global_batch_size: int = 1
    """Positions of a step."""
    path: str = ""
    """Of a nested one: the names of those around it."""
    segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    total: int = field(init=False, compare=False)
    """Positions there are; `ENDLESS` where it never ends."""
    ended_by: str = field(init=False, default="", compare=False)
    """The source that ran out last."""

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise MixtureError(f"global_batch_size must be positive, got {self.global_batch_size}")
        for change in self.changes:
            self.definition.check_change(change)
        segments, total, ended_by = self._laid_out()
        object.__setattr__(self, "segments", tuple(segments))
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "ended_by", ended_by)

    @cached_property
    def nested(self) -> tuple[MixturePlan | None, ...]:
        """The plan of each source that is a mixture."""
        return tuple(
            None
            if source.mixture is None
            else MixturePlan(definition=source.mixture, path=f"{self.path}{source.name}/")
            for source in self.definition.sources
        )

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        found: list[Leaf] = []
        for source, nested in zip(self.definition.sources, self.nested, strict=True):
            if nested is not None:
                found += nested.leaves
            else:
                name = f"{self.path}{source.name}"
                seed = _hashed(f"{self.definition.seed}/{name}")
                found.append(Leaf(name=name, size=source.size, seed=seed, shuffle=source.shuffle))
        return tuple(found)

    @cached_property
    def _first_leaf(self) -> list[int]:
        sizes = [1 if nested is None else len(nested.leaves) for nested in self.nested]
        return list(accumulate(sizes, initial=0))

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.start for segment in self.segments]

    @property
    def is_endless(self) -> bool:
        return self.total == ENDLESS

    def changed(self, change: Change) -> MixturePlan:
        return replace(self, changes=(*self.changes, change))

    def settings(self) -> list[tuple[int, tuple[Fraction, ...]]]:
        """From which position on which weights are set, as shares of 1."""
        names = [source.name for source in self.definition.sources]
        weights = _shares([_exact(self.definition.weights[name]) for name in names])
        found = [(0, weights)]
        changes = sorted(
            [*self.definition.schedule, *self.changes], key=lambda change: (change.step, change.number)
        )
        for change in changes:
            weights = _rescaled(weights, {names.index(name): w for name, w in change.weights.items()})
            found.append((change.step * self.global_batch_size, weights))
        # Of several at the same position the last one counts; it was rescaled from those before it.
        return sorted(dict(found).items())

    def _laid_out(self) -> tuple[list[Segment], int, str]:
        sources = self.definition.sources
        limits = [
            source.size * source.epochs
            if nested is None and source.epochs is not None
            else ENDLESS
            if nested is None
            else nested.total
            for source, nested in zip(sources, self.nested, strict=True)
        ]
        before = [0] * len(sources)
        settings = self.settings()
        ends = [*(start for start, _ in settings[1:]), ENDLESS]
        segments: list[Segment] = []
        ended_by = ""
        for (at, weights), end in zip(settings, ends, strict=True):
            while at < end:
                left = [
                    weight
                    if before[i] < limits[i] or self.definition.when_exhausted == "stop"
                    else Fraction(0)
                    for i, weight in enumerate(weights)
                ]
                if not any(left):
                    return segments, at, ended_by
                split = Split(_parts(left), seed=self.definition.seed, number=len(segments))
                stop, run_out = end, -1
                for i, limit in enumerate(limits):
                    place = split.position_of(i, limit - before[i]) if limit < ENDLESS else None
                    if place is not None and at + place < stop:
                        stop, run_out = at + place, i
                if stop > at:
                    segments.append(Segment(start=at, weights=weights, split=split, before=tuple(before)))
                    before = [b + n for b, n in zip(before, split.counts(stop - at), strict=True)]
                at = stop
                if run_out >= 0:
                    ended_by = f"{self.path}{sources[run_out].name}"
                    if self.definition.when_exhausted == "stop":
                        return segments, at, ended_by
        return segments, ENDLESS, ""

    def draw(self, positions: ArrayLike) -> Drawn:
        """What stands at some positions, in any order."""
        at = np.atleast_1d(np.asarray(positions, np.int64))
        if at.size and (int(at.min()) < 0 or int(at.max()) >= self.total):
            raise IndexError(f"position outside a mixture of {self.total:,} positions")
        if not at.size:
            return Drawn(at, at)
        first = bisect_right(self._starts, int(at.min())) - 1
        last = bisect_right(self._starts, int(at.max())) - 1
        if first == last:
            source, number = self._draw_in(first, at)
        else:
            source, number = np.empty_like(at), np.empty_like(at)
            which = np.searchsorted(self._starts, at, side="right") - 1
            for index in range(first, last + 1):
                chosen = np.flatnonzero(which == index)
                source[chosen], number[chosen] = self._draw_in(index, at[chosen])
        leaf = np.asarray(self._first_leaf, np.int64)[source]
        for index, nested in enumerate(self.nested):
            if nested is not None:
                chosen = np.flatnonzero(source == index)
                inner = nested.draw(number[chosen])
                leaf[chosen] += inner.leaf
                number[chosen] = inner.number
        return Drawn(leaf, number)

    def _draw_in(self, index: int, at: Samples) -> Drawn:
        segment = self.segments[index]
        source, number = segment.split.draw(at - segment.start)
        return Drawn(source, number + np.asarray(segment.before, np.int64)[source])

    def choose(self, positions: ArrayLike) -> Chosen:
        """The samples at some positions: each source in its own order of its own epoch."""
        leaf, number = self.draw(positions)
        epoch, place = np.divmod(number, np.asarray([each.size for each in self.leaves], np.int64)[leaf])
        # One number for each epoch of each source that occurs.
        first = int(epoch.min()) if len(epoch) else 0
        groups, which = np.unique((epoch - first) * len(self.leaves) + leaf, return_inverse=True)
        pairs = [(first + group // len(self.leaves), group % len(self.leaves)) for group in groups.tolist()]
        orders = [_order(self.leaves[index], number) for number, index in pairs]
        if len(number) < FEW * len(orders):
            return Chosen(leaf, epoch, samples_of(orders, which, place))
        sample = np.empty_like(place)
        for index, order in enumerate(orders):
            chosen = np.flatnonzero(which == index)
            sample[chosen] = order.take(place[chosen])
        return Chosen(leaf, epoch, sample)

    def counts(self, position: int) -> list[int]:
        """How many draws each leaf has had before a position."""
        at = min(position, self.total)
        by_source = [0] * len(self.definition.sources)
        if self.segments:
            segment = self.segments[bisect_right(self._starts, at) - 1]
            drawn = segment.split.counts(at - segment.start)
            by_source = [b + n for b, n in zip(segment.before, drawn, strict=True)]
        counts: list[int] = []
        for count, nested in zip(by_source, self.nested, strict=True):
            counts += [count] if nested is None else nested.counts(count)
        return counts

    def draws_of(self, positions: Spans) -> list[Spans]:
        """Which draws of each leaf stand in a set of positions."""
        rows = [(self.counts(start), self.counts(stop)) for start, stop in positions.bounds.tolist()]
        return [Spans([(a[i], b[i]) for a, b in rows if b[i] > a[i]]) for i in range(len(self.leaves))]


@lru_cache(maxsize=4096)
def _order(leaf: Leaf, epoch: int) -> EpochOrder:
    return EpochOrder(total=leaf.size, seed=leaf.seed, epoch=epoch, shuffle=leaf.shuffle)


def _check_weights(weights: Mapping[str, float], names: Iterable[str]) -> None:
    known = list(names)
    for name, weight in weights.items():
        if name not in known:
            raise MixtureError(f"there is no source {name!r}; there are {', '.join(map(repr, known))}")
        if not _is_weight(weight):
            raise MixtureError(
                f"the weight of {name!r} must be a number that is not negative, got {weight!r}"
            )


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _exact(weight: float) -> Fraction:
    """As it was written: 0.7 is seven tenths."""
    return Fraction(str(float(weight)))


def _shares(weights: Sequence[Fraction]) -> tuple[Fraction, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _rescaled(weights: tuple[Fraction, ...], given: Mapping[int, float]) -> tuple[Fraction, ...]:
    """The given ones as they are given, the others in their proportion to each other."""
    exact = {i: _exact(weight) for i, weight in given.items()}
    rest = 1 - sum(exact.values())
    others = sum(weight for i, weight in enumerate(weights) if i not in exact)
    if not others:  # No source is there to take the rest.
        new = [exact.get(i, Fraction(0)) for i in range(len(weights))]
        return _shares(new) if any(new) else weights
    return tuple(exact[i] if i in exact else weight * rest / others for i, weight in enumerate(weights))


def _parts(weights: Sequence[Fraction]) -> list[int]:
    """Whole numbers in the proportion of the weights, as exactly as `UNITS` allow; no source with a weight is left out."""
    shares = _shares(weights)
    denominator = math.lcm(*(share.denominator for share in shares))
    if denominator <= UNITS:
        return [int(share * denominator) for share in shares]
    return [max(1, round(share * UNITS)) if share else 0 for share in shares]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
