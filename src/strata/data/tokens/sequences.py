"""Sequences of tokens for training, and who reads which of them. No torch here.

Sequence `i` predicts tokens `i * L + 1 … (i + 1) * L` from the `L` tokens before each: `labels[t]` is the token
after `input_ids[t]`. Every token of the index but the first is a label exactly once in an epoch. The last
sequence may be short: it is filled up with labels of -100, which PyTorch's cross entropy ignores.

The order of sequences is `EpochOrder`; training takes it in global batches of `batch_size * world_size`, and
each rank its contiguous slice of each. So a position, counted in sequences, says all there is to say about
progress, whatever the world was before or will be after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core.order import BatchSlice, EpochOrder, slice_for
from strata.data.tokens.index import FAULT_BYTES, TokenIndex

IGNORED_LABEL = -100
WINDOW_SEQUENCES = 1024
BLANK = -1
"""The id of a sequence that is none: all its labels are ignored."""

Sequences = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetState:
    """How far training has come. The position is global: it holds for any number of workers."""

    total_tokens_processed: int = 0
    """Tokens of this epoch that training has taken, on all ranks together."""
    current_file_index: int = 0
    current_byte_offset: int = 0
    """Where the next sequence comes from: its source file, and its record's place there."""
    world_size_at_checkpoint: int = 1
    epoch: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> DatasetState:
        """Also takes `world_size`, as `state_dict()` calls it. Unknown keys are left alone."""
        known = {field.name for field in fields(cls)}
        values = {key: int(value) for key, value in state.items() if key in known}
        if "world_size" in state:
            values["world_size_at_checkpoint"] = int(state["world_size"])
        made = cls(**values)
        if min(made.total_tokens_processed, made.epoch) < 0:
            raise ValueError(f"A data position cannot be negative: {dict(state)}")
        return made


class SequenceReader:
    """The sequences of an index, by number."""

    def __init__(self, index: TokenIndex, seq_length: int) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be positive, got {seq_length}")
        self.index = index
        self.seq_length = seq_length

    @property
    def full(self) -> int:
        """How many sequences have all their labels."""
        return max(self.index.total_tokens - 1, 0) // self.seq_length

    @property
    def count(self) -> int:
        """How many there are with the short last one."""
        return -(-max(self.index.total_tokens - 1, 0) // self.seq_length)

    def read(self, numbers: NDArray[np.int64]) -> tuple[Sequences, Sequences]:
        """Inputs and labels, one row for each number."""
        length, tokens = self.seq_length, self.index.tokens
        inputs = np.zeros((len(numbers), length), np.int64)
        labels = np.full((len(numbers), length), IGNORED_LABEL, np.int64)
        for row, number in enumerate(numbers.tolist()):
            if number == BLANK:
                continue
            at = number * length
            span = tokens[at : at + length + 1]
            inputs[row, : len(span) - 1] = span[:-1]
            labels[row, : len(span) - 1] = span[1:]
        self.index.let_go(len(numbers) * max(FAULT_BYTES, length * self.index.header.token_bytes))
        return inputs, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One reading of an epoch from a position to its end, by one rank in batches. Pure."""

    order: EpochOrder
    start: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    """Leave out a last global batch that is not full."""
    fill_last: bool = False
    """In a last global batch that is not full, fill every rank's part up with blanks: all ranks then make
    the same number of steps with the same shapes."""

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def end(self) -> int:
        """The position after the last sequence that will be read."""
        left = self.order.total - self.start
        return self.order.total - left % self.global_batch if self.drop_last else self.order.total

    def __len__(self) -> int:
        """How many batches this rank gets."""
        steps = -(-max(self.end - self.start, 0) // self.global_batch)
        if steps and not self.fill_last and len(self.slice(steps - 1)) == 0:
            return steps - 1
        return steps

    def slice(self, step: int) -> BatchSlice:
        """The positions this rank reads in one step."""
        at = self.start + step * self.global_batch
        return slice_for(self.rank, self.world_size, at, min(self.global_batch, self.end - at))

    def position_after(self, step: int) -> int:
        """Where everybody stands once all ranks have taken this step."""
        return min(self.start + (step + 1) * self.global_batch, self.end)

    def numbers(self) -> Iterator[NDArray[np.int64]]:
        """For each of this rank's steps, the numbers of the sequences to read."""
        window = max(
            1, WINDOW_SEQUENCES // self.batch_size
        )  # one call of the order costs as much as thousands
        for first in range(0, len(self), window):
            parts = [self.slice(step) for step in range(first, min(first + window, len(self)))]
            positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
            ends = np.cumsum([len(part) for part in parts])
            for numbers in np.split(self.order.take(positions), ends[:-1]):
                if self.fill_last and len(numbers) < self.batch_size:
                    numbers = np.append(numbers, np.full(self.batch_size - len(numbers), BLANK))
                yield numbers
