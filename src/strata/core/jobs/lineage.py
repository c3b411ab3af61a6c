"""How checkpoints descend from each other: where a new one belongs, what training falls back to, what may be removed.

A checkpoint's **lineage** is named after its first ancestor: every checkpoint that descends from one beginning carries
the same name. `parent` is the nearest ancestor, in whatever tier and whatever became of it; `durable_parent` the nearest
one that was known to be durable. Order in time is (generation, sequence): not the step, which goes back when training
does, and not the clock, which machines disagree about.

Pure: nothing here reads or writes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from strata.core.types import CheckpointId

ORDER_KEPT = 64


class CompletionOrder:
    """Which save of one generation is the newest, whatever the order in which they end.

    A save that a newer one overtook on the way to a slow destination is over before the one that is being uploaded there. Who
    learns of their ends one by one must not take the last to end for the newest.
    """

    def __init__(self) -> None:
        self._steps: dict[CheckpointId, int] = {}

    def completed(self, checkpoint_id: CheckpointId, step: int) -> CheckpointId | None:
        """The next newer one that has completed already; None where this is the newest."""
        newer = [each for each, known in self._steps.items() if known > step]
        self._steps[checkpoint_id] = step
        while len(self._steps) > ORDER_KEPT:
            del self._steps[min(self._steps, key=self._steps.__getitem__)]
        return min(newer, key=self._steps.__getitem__, default=None)

    def removed(self, checkpoint_id: CheckpointId) -> None:
        self._steps.pop(checkpoint_id, None)


class Descendant(Protocol):
    """A checkpoint, as far as its descent goes."""

    @property
    def checkpoint_id(self) -> CheckpointId: ...

    @property
    def order(self) -> tuple[Any, ...]: ...

    @property
    def generation(self) -> int: ...

    @property
    def lineage(self) -> str: ...

    @property
    def parent(self) -> CheckpointId | None: ...

    @property
    def durable_parent(self) -> CheckpointId | None: ...


D = TypeVar("D", bound=Descendant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where in the history of a run one checkpoint stands."""

    checkpoint_id: CheckpointId
    run: str = ""
    generation: int = 0
    sequence: int = 0
    lineage: str = ""
    parent: CheckpointId | None = None
    durable_parent: CheckpointId | None = None


@dataclass(slots=True)
class Lineage:
    """The end of the history that training is on: what the next checkpoint continues."""

    run: str = ""
    name: str = ""
    generation: int = 0
    sequence: int = 0
    parent: CheckpointId | None = None
    durable_parent: CheckpointId | None = None
    _last: Placement | None = None
    _pending: list[CheckpointId] = field(default_factory=list)
    """Meant to be durable, and not known to be or not to be; oldest first."""

    def place(self, checkpoint_id: CheckpointId, *, now_ms: int, durable: bool) -> Placement:
        """Give a checkpoint its place, which the next one continues.

        The sequence counts on from the highest that was seen, and is at least the time, for the case that something was
        not seen.
        """
        self.sequence = max(self.sequence + 1, now_ms)
        if not self.name and self.parent is None:
            self.name = checkpoint_id
        placed = Placement(
            checkpoint_id=checkpoint_id,
            run=self.run,
            generation=self.generation,
            sequence=self.sequence,
            lineage=self.name,
            parent=self.parent,
            durable_parent=self.durable_parent,
        )
        self.parent, self._last = checkpoint_id, placed
        if durable:
            self._pending.append(checkpoint_id)
        return placed

    def confirm(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint is durable. One that has been overtaken, or left behind by going back, changes nothing."""
        if checkpoint_id in self._pending:
            del self._pending[: self._pending.index(checkpoint_id) + 1]
            self.durable_parent = checkpoint_id

    def fail(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint is in no tier: what comes next continues the one before it."""
        if checkpoint_id in self._pending:
            self._pending.remove(checkpoint_id)
        if self._last is not None and self._last.checkpoint_id == checkpoint_id == self.parent:
            self.parent = self._last.parent

    def go_back_to(self, checkpoint: Descendant, *, durable: bool) -> None:
        """Training continues from this checkpoint."""
        self.name = checkpoint.lineage
        self.parent = checkpoint.checkpoint_id
        self.durable_parent = checkpoint.checkpoint_id if durable else checkpoint.durable_parent
        self._pending.clear()
        self._last = None


def fallback_order(checkpoints: Iterable[D]) -> list[D]:
    """The newest checkpoint and its ancestors, newest first, then all others, newest first."""
    ordered = sorted({c.checkpoint_id: c for c in checkpoints}.values(), key=lambda c: c.order, reverse=True)
    followed = list(_ancestors(ordered))
    names = {checkpoint.checkpoint_id for checkpoint in followed}
    return followed + [checkpoint for checkpoint in ordered if checkpoint.checkpoint_id not in names]


def removable(
    checkpoints: Sequence[D],
    *,
    keep_count: int,
    in_use: Collection[CheckpointId] = (),
    damaged: Collection[CheckpointId] = (),
) -> list[D]:
    """What retention may remove, oldest first.

    The newest `keep_count` intact ones among the newest checkpoint and its ancestors are kept. What is older than those
    may go, if it is of the same lineage: an ancestor, or a branch that was left behind by going back. What the newest
    does not share a beginning with is never touched, nor what is being read or written.
    """
    if keep_count < 1:
        raise ValueError(f"keep_count ({keep_count}) must be at least 1")
    intact = [checkpoint for checkpoint in checkpoints if checkpoint.checkpoint_id not in damaged]
    ordered = sorted(intact, key=lambda c: c.order, reverse=True)
    kept = list(_ancestors(ordered))[:keep_count]
    if len(kept) < keep_count:
        return []
    older = [c for c in checkpoints if c.order < kept[-1].order and c.lineage == kept[0].lineage]
    return sorted((c for c in older if c.checkpoint_id not in in_use), key=lambda c: c.order)


def _ancestors(ordered: Sequence[D]) -> Iterator[D]:
    """From the newest to its ancestors. The checkpoints of one generation are a straight line, so the next is the one before
    in it; then comes the parent, or (it was only in memory, failed, is damaged or was removed) the durable parent, or else
    the newest older one of the lineage."""
    known = {checkpoint.checkpoint_id: checkpoint for checkpoint in ordered}
    current = ordered[0] if ordered else None
    while current is not None:
        yield current
        older = [other for other in ordered if other.order < current.order]
        related = [other for other in older if other.lineage == current.lineage]
        candidates = [
            *(other for other in related if other.generation == current.generation > 0),
            *(known[name] for name in (current.parent, current.durable_parent) if name in known),
            *related,
        ]
        current = next((other for other in candidates if other.order < current.order), None)
