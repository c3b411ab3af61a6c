"""One rank's way through an epoch, as arithmetic.

A **step** is one global batch: the positions that one optimizer step learns from. Each rank has a contiguous
slice of it; a slice larger than `micro_batch_size` is cut into micro-batches, as many on every rank, so that
all ranks meet in the same number of forward passes. `StepPlan` answers "what is micro-batch number m of this
rank?" in constant time for any m, which is why resuming at the end of an epoch costs what resuming at its
beginning does. Pure; no samples, only positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from strata.core.data.order import loss_weight, slice_for
from strata.core.data.spans import Run, Spans, recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One micro-batch of one rank, and the global step it belongs to."""

    epoch: int
    start: int
    stop: int
    """Positions [start, stop) of this micro-batch; none at all when a rank has nothing to do in this step."""
    slice_start: int
    slice_stop: int
    """This rank's complete part of the step."""
    batch_start: int
    batch_stop: int
    """The whole global batch."""
    weight: float
    """Multiply a mean loss over this micro-batch with it; see `strata.core.data.order.slice_for`."""
    ends_step: bool
    """The last micro-batch of the step: synchronise gradients and let the optimizer step."""

    def __len__(self) -> int:
        return self.stop - self.start


class MapDataset(Protocol):
    """Samples by number: any map-style dataset, a list, a range."""

    def __getitem__(self, index: int, /) -> object: ...


class SizedDataset(MapDataset, Protocol):
    """One that knows how many samples it has."""

    def __len__(self) -> int: ...


class Batch(NamedTuple):
    """What the training loop gets: the collated samples and their positions."""

    data: Any
    step: Step

    @property
    def weight(self) -> float:
        return self.step.weight


class ThinnedBatch(Batch):
    """A batch of which some samples were dropped or split: as many positions, other samples."""

    kept: int
    """Samples in it. Where it is 0, all were dropped, and `data` holds another sample that counts for nothing."""

    @classmethod
    def of(cls, data: Any, step: Step, kept: int) -> ThinnedBatch:
        batch = cls(data, step)
        batch.kept = kept
        return batch

    @property
    def weight(self) -> float:
        return self.step.weight if self.kept else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The micro-batches of one rank from `start` to the end of an epoch."""

    epoch: int
    total: int
    start: int
    global_batch_size: int
    rank: int
    world_size: int
    micro_batch_size: int | None = None
    drop_last: bool = False

    @property
    def steps(self) -> int:
        """Global steps left."""
        left = self.total - self.start
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    @property
    def end(self) -> int:
        """The position after the last step."""
        return min(self.start + self.steps * self.global_batch_size, self.total)

    @property
    def dropped(self) -> Spans:
        """What drop-last leaves out."""
        return Spans([(self.end, self.total)])

    def __len__(self) -> int:
        """Micro-batches left: the same on every rank."""
        steps = self.steps
        return 0 if not steps else (steps - 1) * self._parts(0) + self._parts(steps - 1)

    def micro_batch(self, number: int) -> Step:
        """Micro-batch `number` of this rank, counted from `start`."""
        step = min(number // self._parts(0), self.steps - 1)  # Only the last step may have fewer parts.
        part = number - step * self._parts(0)
        parts = self._parts(step)
        if not 0 <= part < parts:
            raise IndexError(f"micro-batch {number} of {len(self)}")
        batch_start, batch_stop = self._batch(step)
        mine = slice_for(self.rank, self.world_size, batch_start, batch_stop - batch_start)
        piece = slice_for(part, parts, mine.start, len(mine))
        return Step(
            epoch=self.epoch,
            start=piece.start,
            stop=piece.stop,
            slice_start=mine.start,
            slice_stop=mine.stop,
            batch_start=batch_start,
            batch_stop=batch_stop,
            weight=loss_weight(len(piece), self.world_size, batch_stop - batch_start),
            ends_step=part == parts - 1,
        )

    def trained_to(self, position: int) -> tuple[Run, ...]:
        """What this rank has trained when all steps up to a position are made, as its record would say it."""
        count, rest = divmod(position - self.start, self.global_batch_size)
        mine = slice_for(self.rank, self.world_size, self.start, self.global_batch_size)
        stride = self.global_batch_size if count > 1 else 0
        full = (
            [Run(start=mine.start, length=len(mine), stride=stride, count=count)]
            if count and len(mine)
            else []
        )
        last = slice_for(self.rank, self.world_size, position - rest, rest)
        return recorded(full, last.start, last.stop)

    def _batch(self, step: int) -> tuple[int, int]:
        start = self.start + step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.total)

    def _parts(self, step: int) -> int:
        if self.micro_batch_size is None:
            return 1
        start, stop = self._batch(step)
        largest_slice = -(-(stop - start) // self.world_size)
        return -(-largest_slice // self.micro_batch_size)
