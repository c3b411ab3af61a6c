"""Token sequences as a PyTorch dataset and loader that resume exactly.

`TokenDataset` holds the position; `TokenLoader` reads batches ahead in other processes and moves the position
on when the training loop takes one, never when a process has merely prefetched it. Save `state_dict()` with
the weights, load it with any number of workers: nothing is lost, nothing repeated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from strata.core.ledger import RankRecord
from strata.core.order import BatchSlice, EpochOrder
from strata.core.spans import Spans
from strata.data.tokens.errors import StateMismatch
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import DatasetState, Pass, SequenceReader

log = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]


def current_world() -> tuple[int, int]:
    """Rank and world size of this process: from torch.distributed, else as torchrun set them, else alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class TokenDataset(IterableDataset[Batch]):
    """All sequences of an index, in the order of (seed, epoch), this rank's share of them.

    Iterating gives single sequences and moves the position on by one per rank; `TokenLoader` gives batches.
    An iteration starts at the position. Once it has reached the end of the epoch the next one starts the next
    epoch; `set_epoch` starts a given one.
    """

    def __init__(
        self,
        index: TokenIndex,
        *,
        seq_length: int,
        name: str | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise ValueError("rank and world_size go together: give both or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a world of {world_size}")
        self.index = index
        self.reader = SequenceReader(index, seq_length)
        self.name = name or index.path.stem
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._world = None if rank is None or world_size is None else (rank, world_size)
        self._state = DatasetState()
        self._finished_here = False
        self._records: dict[int, RankRecord] = {}

    @property
    def total_tokens(self) -> int:
        return self.index.total_tokens

    @property
    def seq_length(self) -> int:
        return self.reader.seq_length

    @property
    def num_sequences(self) -> int:
        """In an epoch, on all ranks together."""
        return self.reader.full if self.drop_last else self.reader.count

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def position(self) -> int:
        """Sequences of this epoch that training has taken, on all ranks together."""
        tokens = self._state.total_tokens_processed
        return self.num_sequences if tokens >= self.total_tokens else tokens // self.seq_length

    @property
    def world(self) -> tuple[int, int]:
        """Rank and world size."""
        return self._world or current_world()

    # Position ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`. A position loaded within that same epoch is kept."""
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if epoch != self.epoch or self._finished_here:
            self._state = DatasetState(epoch=epoch, world_size_at_checkpoint=self.world[1])
            self._finished_here = False

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. Plain values: fit for any checkpoint format."""
        state = self._state
        place = self._next_place()
        return {
            "total_tokens_processed": state.total_tokens_processed,
            "world_size": self.world[1],
            "epoch": state.epoch,
            "current_file_index": place[0],
            "current_byte_offset": place[1],
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Refuses one in another order of the data (`StateMismatch`)."""
        ours = self._settings()
        differences = [
            f"{key} was {state[key]!r}, is {value!r}"
            for key, value in ours.items()
            if state.get(key, value) != value
        ]
        if differences:
            raise StateMismatch(differences)
        loaded = DatasetState.from_dict(state)
        if (
            loaded.total_tokens_processed < self.total_tokens
            and loaded.total_tokens_processed % self.seq_length
        ):
            log.warning(
                "The saved position, %d tokens, is inside a sequence of %d: its beginning is read again.",
                loaded.total_tokens_processed,
                self.seq_length,
            )
        self._state = loaded
        self._finished_here = False
        self._records.clear()

    def _settings(self) -> dict[str, Any]:
        """What the order of the data depends on."""
        return {
            "seq_length": self.seq_length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "index": self.index.identity,
        }

    def _next_place(self) -> tuple[int, int]:
        if self.position >= self.num_sequences:
            return self.index.num_files - 1, 0
        (number,) = self._order(self.epoch).take(self.position).tolist()
        return self.index.find_position(number * self.seq_length)[:2]

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(total=self.num_sequences, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def take_records(self) -> list[RankRecord]:
        """What this rank has taken since the last call, for the ledger."""
        records = [self._records[epoch] for epoch in sorted(self._records)]
        self._records.clear()
        return records

    # Reading ----------------------------------------------------------------------------------------------

    def upcoming(self, batch_size: int, *, fill_last: bool = False) -> Pass:
        """What the next iteration reads: from the position on, or the next epoch if this one was finished."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        rank, world_size = self.world
        return Pass(
            order=self._order(self.epoch + 1 if self._finished_here else self.epoch),
            start=0 if self._finished_here else self.position,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
            fill_last=fill_last,
        )

    def begin(self, reading: Pass) -> None:
        """An iteration starts."""
        self.set_epoch(reading.order.epoch)

    def taken(self, part: BatchSlice, position: int) -> None:
        """Training has this batch now, and stands at `position`."""
        self._move(position)
        if len(part):
            self._records[self.epoch] = self._record().with_span(part.start, part.stop)

    def finished(self, reading: Pass) -> None:
        """The epoch was read to its end; what `drop_last` left out is put on record."""
        self._move(reading.order.total)
        record = replace(self._record(), closed=True)
        if reading.end < reading.order.total:
            record = replace(record, dropped=record.dropped | Spans([(reading.end, reading.order.total)]))
        self._records[self.epoch] = record
        self._finished_here = True

    def _record(self) -> RankRecord:
        return self._records.get(self.epoch) or RankRecord(
            dataset=self.name, epoch=self.epoch, total=self.num_sequences, rank=self.world[0]
        )

    def _move(self, position: int) -> None:
        tokens = self.total_tokens if position >= self.num_sequences else position * self.seq_length
        self._state = replace(
            self._state, total_tokens_processed=tokens, world_size_at_checkpoint=self.world[1]
        )

    def __iter__(self) -> Iterator[Batch]:
        # In a process of a plain DataLoader this is a copy: it takes every n-th of the rank's sequences.
        info = get_worker_info()
        processes, process = (info.num_workers, info.id) if info is not None else (1, 0)
        reading = self.upcoming(1)
        self.begin(reading)
        for turn, numbers in enumerate(islice(reading.numbers(), process, None, processes)):
            inputs, labels = self.reader.read(numbers)
            step = turn * processes + processes - 1
            self.taken(reading.slice(turn * processes + process), reading.position_after(step))
            yield {"input_ids": torch.from_numpy(inputs[0]), "labels": torch.from_numpy(labels[0])}
        self.finished(reading)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_world": self.world}  # a loader process has no torch.distributed of its own


class TokenLoader(DataLoader[Batch]):
    """Batches of a `TokenDataset`: `input_ids` and `labels`, int64, one row per sequence.

    The last batch of an epoch may be smaller, and a rank may get none of it; `fill_last` gives every rank
    blanks instead (labels all -100), for training loops in which all ranks must step together.
    """

    def __init__(
        self,
        tokens: TokenDataset,
        batch_size: int,
        *,
        num_workers: int = 0,
        fill_last: bool = False,
        **options: Any,
    ) -> None:
        self.tokens = tokens
        self.sequences_per_batch = batch_size
        self.fill_last = fill_last
        self._plan = _Plan(tokens.upcoming(batch_size, fill_last=fill_last))
        super().__init__(
            _Batches(tokens.reader), sampler=self._plan, batch_size=None, num_workers=num_workers, **options
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # DataLoader promises its own iterator class
        reading = self._plan.reading = self._upcoming()
        self.tokens.begin(reading)
        for step, batch in enumerate(super().__iter__()):
            self.tokens.taken(reading.slice(step), reading.position_after(step))
            yield batch
        self.tokens.finished(reading)

    def __len__(self) -> int:
        """Batches still to come in this epoch, on this rank."""
        return len(self._upcoming())

    def _upcoming(self) -> Pass:
        return self.tokens.upcoming(self.sequences_per_batch, fill_last=self.fill_last)

    def state_dict(self) -> dict[str, Any]:
        return self.tokens.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        self.tokens.set_epoch(epoch)


class _Plan(Sampler[NDArray[Any]]):
    """Which sequences stand in which batch; decided here, so that loader processes need no state."""

    def __init__(self, reading: Pass) -> None:
        self.reading = reading

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return self.reading.numbers()

    def __len__(self) -> int:
        return len(self.reading)


class _Batches(Dataset[Batch]):
    def __init__(self, reader: SequenceReader) -> None:
        self.reader = reader

    def __getitem__(self, numbers: NDArray[Any]) -> Batch:
        inputs, labels = self.reader.read(numbers)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
