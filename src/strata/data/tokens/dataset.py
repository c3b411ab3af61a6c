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
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from strata.core.data.ledger import RankRecord
from strata.core.data.order import EpochOrder
from strata.data.errors import StateMismatch
from strata.data.loading.loader import MoreLoaderOptions
from strata.data.loading.steps import Step, StepPlan
from strata.data.tokens.index import TokenIndex
from strata.data.tokens.sequences import DatasetState, SequenceReader, Sequences, sequence_numbers

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
    An iteration goes from the position to the end of the epoch and leaves it at the beginning of the next one;
    `set_epoch` goes to the beginning of a given one. `DataLedger` accepts it as a loader.
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
        self.dataset = name or index.path.stem
        """What the ledger and the audit call it."""
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._world = None if rank is None or world_size is None else (rank, world_size)
        self._state = DatasetState()
        self._records: dict[tuple[int, int], RankRecord] = {}  # By epoch and rank.

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

    @property
    def world_size(self) -> int:
        return self.world[1]

    # Position ---------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. To the current one is no change, so a loaded position stays."""
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if epoch != self.epoch:
            self._state = DatasetState(epoch=epoch, world_size_at_checkpoint=self.world_size)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. Plain values: fit for any checkpoint format."""
        state = self._state
        place = self._next_place()
        return {
            "total_tokens_processed": state.total_tokens_processed,
            "world_size": self.world_size,
            "epoch": state.epoch,
            "current_file_index": place[0],
            "current_byte_offset": place[1],
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Refuses one in another order of the data (`StateMismatch`)."""
        if "total_tokens_processed" not in state:
            raise StateMismatch(
                f"The saved position has no 'total_tokens_processed'; it has {', '.join(sorted(state)) or 'nothing'}.",
                hint="To begin an epoch from its start, call set_epoch instead.",
            )
        ours = self._settings()
        differences = [
            f"{key} was {state[key]!r}, is {value!r}"
            for key, value in ours.items()
            if state.get(key, value) != value
        ]
        if differences:
            raise StateMismatch(
                f"The saved position belongs to other data or another order: {'; '.join(differences)}.",
                hint="Use the settings it was saved with, or begin a new epoch with set_epoch.",
            )
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
        (number,) = self._order().take(self.position).tolist()
        return self.index.find_position(number * self.seq_length)[:2]

    def _order(self) -> EpochOrder:
        return EpochOrder(total=self.num_sequences, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)

    def _move(self, position: int) -> None:
        tokens = self.total_tokens if position >= self.num_sequences else position * self.seq_length
        self._state = replace(
            self._state, total_tokens_processed=tokens, world_size_at_checkpoint=self.world_size
        )

    # Reading ----------------------------------------------------------------------------------------------

    def plan(self, batch_size: int) -> StepPlan:
        """This rank's steps from the position to the end of the epoch."""
        rank, world_size = self.world
        return StepPlan(
            epoch=self.epoch,
            total=self.num_sequences,
            start=self.position,
            global_batch_size=batch_size * world_size,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last,
        )

    def numbers(self, plan: StepPlan, *, fill_last: bool = False) -> Iterator[tuple[Step, NDArray[np.int64]]]:
        """The sequences to read in each step of a plan for the current epoch."""
        return sequence_numbers(plan, self._order(), fill_last=fill_last)

    def taken(self, step: Step, plan: StepPlan) -> None:
        """Training has the batch of this step now."""
        self._note(self._record().with_span(step.start, step.stop))
        if step.batch_stop < plan.end:
            self._move(step.batch_stop)
        else:
            self.close(plan)

    def close(self, plan: StepPlan) -> None:
        """Nothing of the plan is left: stand at the beginning of the next epoch."""
        if self.epoch == plan.epoch:
            self._note(replace(self._record(), dropped=plan.dropped, closed=True))
            self.set_epoch(self.epoch + 1)

    def _record(self) -> RankRecord:
        rank = self.world[0]
        return self._records.get((self.epoch, rank)) or RankRecord(
            dataset=self.dataset, epoch=self.epoch, total=self.num_sequences, rank=rank
        )

    def _note(self, record: RankRecord) -> None:
        self._records[record.epoch, record.rank] = record

    def records(self) -> list[RankRecord]:
        """What training took on this rank since the last call."""
        records, self._records = list(self._records.values()), {}
        return records

    def __iter__(self) -> Iterator[Batch]:
        plan = self.plan(1)
        info = get_worker_info()
        if info is None:
            for step, numbers in self.numbers(plan):
                self.taken(step, plan)
                yield _first(self.reader.read(numbers))
        else:
            # In a process of a plain DataLoader this is a copy, which takes every n-th of the rank's sequences.
            # Its position is reported so that the same process of a resumed loader takes the next ones.
            mine = islice(self.numbers(plan), info.id, None, info.num_workers)
            for turn, (_, numbers) in enumerate(mine, start=1):
                self._move(plan.start + turn * info.num_workers * plan.world_size)
                yield _first(self.reader.read(numbers))
        self.close(plan)

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
        **options: Unpack[MoreLoaderOptions],
    ) -> None:
        if options.get("in_order") is False:
            raise ValueError("in_order=False would give batches in another order than the epoch's")
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self.tokens = tokens
        self.sequences_per_batch = batch_size
        self.fill_last = fill_last
        # DataLoader draws a seed at every iteration; from the global generator, a resumed run would see other
        # random numbers than an undisturbed one.
        options.setdefault("generator", torch.Generator())
        if num_workers and tokens.index.is_remote:  # A client of object storage does not survive a fork.
            options.setdefault("multiprocessing_context", "spawn")
        # Which sequences stand in which batch is decided in this process: loader processes need no state.
        super().__init__(
            _Batches(tokens.reader),
            sampler=_Numbers(self),
            batch_size=None,
            num_workers=num_workers,
            **options,
        )

    def plan(self) -> StepPlan:
        return self.tokens.plan(self.sequences_per_batch)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # DataLoader promises its own iterator class
        plan = self.plan()
        for number, batch in enumerate(super().__iter__()):
            self.tokens.taken(plan.micro_batch(number), plan)
            yield batch
        self.tokens.close(plan)

    def __len__(self) -> int:
        """Batches still to come in this epoch, on this rank."""
        plan = self.plan()
        nothing_last = len(plan) > 0 and not self.fill_last and not len(plan.micro_batch(len(plan) - 1))
        return len(plan) - nothing_last

    def state_dict(self) -> dict[str, Any]:
        return self.tokens.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tokens.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        self.tokens.set_epoch(epoch)


class _Numbers(Sampler[NDArray[np.int64]]):
    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        tokens, plan = self.loader.tokens, self.loader.plan()
        return (numbers for _, numbers in tokens.numbers(plan, fill_last=self.loader.fill_last))

    def __len__(self) -> int:
        return len(self.loader)


class _Batches(Dataset[Batch]):
    def __init__(self, reader: SequenceReader) -> None:
        self.reader = reader

    def __getitem__(self, numbers: NDArray[np.int64]) -> Batch:
        inputs, labels = self.reader.read(numbers)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def _first(sequences: tuple[Sequences, Sequences]) -> Batch:
    inputs, labels = sequences
    return {"input_ids": torch.from_numpy(inputs[0]), "labels": torch.from_numpy(labels[0])}
