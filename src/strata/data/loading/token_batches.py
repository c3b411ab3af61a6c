"""Batches by a budget of tokens, for samples of different lengths.

A step is as many samples, in the epoch's order, as fit the global budget: where each step ends follows from seed, epoch and lengths
alone, never from the world. Each rank gets a contiguous part of it, cut so that all have about as many tokens. From any step's
beginning the steps after it are the same, so a position says all there is to say, as with batches of a fixed size.

Needs 12 bytes for each sample, and one pass over the lengths for each epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from strata.core.data.order import EpochOrder, loss_weight
from strata.core.data.spans import Run, recorded
from strata.data.loading.steps import Step, StepPlan


class TokenSteps:
    """Where the steps of one epoch begin, by the lengths of its samples in their order."""

    def __init__(self, lengths: NDArray[np.int32], order: EpochOrder, max_tokens: int) -> None:
        positions = np.arange(len(lengths), dtype=np.int64)
        taken = lengths[order.take(positions)] if len(lengths) else lengths
        self.before: NDArray[np.int64] = np.concatenate([[0], np.cumsum(taken, dtype=np.int64)])
        """Tokens before each position."""
        self._max_tokens = max_tokens
        self._from: dict[int, NDArray[np.int64]] = {}

    def bounds(self, start: int) -> NDArray[np.int64]:
        """Where steps begin from a position on, and the end of the last one."""
        known = self._from.get(start)
        if known is None:
            whole = self._from.get(0)
            at = int(np.searchsorted(whole, start)) if whole is not None else 0
            if whole is not None and whole[min(at, len(whole) - 1)] == start:
                known = whole[at:]
            else:
                known = self._from[start] = self._walk(start)
        return known

    def _walk(self, start: int) -> NDArray[np.int64]:
        found, total = [start], len(self.before) - 1
        while found[-1] < total:
            limit = int(self.before[found[-1]]) + self._max_tokens
            found.append(int(np.searchsorted(self.before, limit, side="right")) - 1)
        return np.array(found, np.int64)

    def slice_for(self, rank: int, world_size: int, start: int, stop: int) -> tuple[int, int]:
        """The part of a step that falls to a rank: contiguous, in rank order, with about as many tokens on each."""
        first, tokens = int(self.before[start]), int(self.before[stop] - self.before[start])
        inside = self.before[start : stop + 1]
        wanted = [first + -(-tokens * each // world_size) for each in (rank, rank + 1)]
        low, high = np.searchsorted(inside, wanted).tolist()
        return (start + low if rank else start), (start + high if rank + 1 < world_size else stop)

    def tokens(self, start: int, stop: int) -> int:
        return int(self.before[stop] - self.before[start])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(StepPlan):
    """The steps of one rank from `start` to the end of an epoch, each within the budget of tokens."""

    token_steps: TokenSteps = field(repr=False, compare=False)

    @property
    def steps(self) -> int:
        return len(self.token_steps.bounds(self.start)) - 1

    @property
    def end(self) -> int:
        return self.total if self.steps else self.start

    def __len__(self) -> int:
        return self.steps

    def micro_batch(self, number: int) -> Step:
        if not 0 <= number < self.steps:
            raise IndexError(f"step {number} of {self.steps}")
        start, stop = self.token_steps.bounds(self.start)[number : number + 2].tolist()
        low, high = self.token_steps.slice_for(self.rank, self.world_size, start, stop)
        mine, everyone = self.token_steps.tokens(low, high), self.token_steps.tokens(start, stop)
        if not everyone:  # Samples without tokens weigh alike.
            mine, everyone = high - low, stop - start
        return Step(
            epoch=self.epoch,
            start=low,
            stop=high,
            slice_start=low,
            slice_stop=high,
            batch_start=start,
            batch_stop=stop,
            weight=loss_weight(mine, self.world_size, everyone),
            ends_step=True,
        )

    def trained_to(self, position: int) -> tuple[Run, ...]:
        runs: tuple[Run, ...] = ()
        for number in range(int(np.searchsorted(self.token_steps.bounds(self.start), position))):
            step = self.micro_batch(number)
            runs = recorded(runs, step.start, step.stop)
        return runs


def checked_lengths(lengths: ArrayLike, *, total: int, max_tokens: int) -> NDArray[np.int32]:
    """The lengths of all samples, as they are kept; `ValueError` for those that no step could hold."""
    found = np.asarray(lengths)
    if found.shape != (total,):
        raise ValueError(
            f"lengths has the shape {found.shape}, and there are {total:,} samples: give one number for each"
        )
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, got {max_tokens}")
    if total and int(found.min()) < 0:
        raise ValueError(f"sample {int(found.argmin()):,} has a length of {int(found.min()):,}")
    if total and int(found.max()) > max_tokens:
        raise ValueError(
            f"sample {int(found.argmax()):,} has {int(found.max()):,} tokens, more than max_tokens ({max_tokens:,}): cut such "
            "samples, leave them out, or allow more"
        )
    return found.astype(np.int32)
