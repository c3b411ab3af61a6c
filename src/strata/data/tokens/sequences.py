"""Sequences of tokens for training, and who reads which of them. No torch here.

Sequence `i` predicts tokens `i * L + 1 … (i + 1) * L` from the `L` tokens before each: `labels[t]` is the token
after `input_ids[t]`. Every token of the index but the first is a label exactly once in an epoch. The last
sequence may be short: it is filled up with labels of -100, which PyTorch's cross entropy ignores.

The order of sequences is `EpochOrder`; training takes it in the steps of `StepPlan`. So a position, counted in
sequences, says all there is to say about progress, whatever the world was before or will be after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core.data.order import EpochOrder
from strata.data.loading.steps import Step, StepPlan
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


def sequence_numbers(
    plan: StepPlan, order: EpochOrder, *, fill_last: bool = False
) -> Iterator[tuple[Step, NDArray[np.int64]]]:
    """For each step of this rank, the numbers of the sequences to read.

    In the last step of an epoch a rank may have fewer, or none, in which case it has no such step here; with
    `fill_last` its part is filled up with blanks, so that all ranks make as many steps of the same shape.
    """
    full = plan.global_batch_size // plan.world_size
    window = max(1, WINDOW_SEQUENCES // full)  # one call of the order costs as much as hundreds of numbers
    for first in range(0, len(plan), window):
        steps = [plan.micro_batch(number) for number in range(first, min(first + window, len(plan)))]
        positions = np.concatenate([np.arange(step.start, step.stop, dtype=np.int64) for step in steps])
        ends = np.cumsum([len(step) for step in steps])
        for step, numbers in zip(steps, np.split(order.take(positions), ends[:-1]), strict=True):
            if fill_last:
                numbers = np.append(numbers, np.full(full - len(numbers), BLANK))
            if len(numbers):
                yield step, numbers
