"""Batches for trainers that have a loop of their own, and which of them the optimizer has stepped on.

    loader = TrainerLoader(dataset, batch_size=8, num_workers=2, seed=7)

A trainer gets the collated samples and nothing else. It may read ahead, and so may the loader's processes: a batch counts as
trained when `trained` says that a step was made with it, and otherwise is read again after a restart. Every rank has as many samples
in every batch, and as many batches in every step: what does not fill a global batch at the end of an epoch is left out on purpose,
which the ledger records and `strata audit` shows. So no trainer has to know of weights, and any number of ranks reads the same
epoch.

Until a job drives it (`drive`), every batch that was handed out counts, and its state carries the record of what was trained: this is
what checkpoints of Lightning's own hold.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, Unpack

from torch.utils.data import IterableDataset

from strata.core.text import counted
from strata.data.loading.commits import DataLedger
from strata.data.loading.loader import ElasticLoader, LoaderOptions
from strata.data.loading.sampler import ElasticSampler
from strata.data.loading.steps import Batch, MapDataset, StepPlan
from strata.errors import StrataError
from strata.training.exchange import rank_and_world
from strata.training.job import ElasticJob
from strata.training.job import announce as say

RECORD, RESTORED_FROM = "record", "checkpoint_id"
"""In a loader's state: what was trained, and the checkpoint that the state is from."""
SNAPSHOT = "state of a trainer"
"""What records are called that belong to no checkpoint yet."""


class CannotPromise(StrataError):
    """A trainer is set up so that its data position could not be restored exactly."""

    code: ClassVar[str] = "cannot_promise"


class TrainerLoader:
    """Batches of one rank, from the trained position to the end of the epoch; then of the next epoch."""

    def __init__(
        self,
        dataset: MapDataset,
        *,
        batch_size: int,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "data",
        **dataloader_options: Unpack[LoaderOptions],
    ) -> None:
        """`dataset` is any map-style dataset with a length. `batch_size` is that of one rank and one forward pass, as in the
        trainer. With `global_batch_size` a step always learns from so many samples: the trainer is made to accumulate gradients
        over as many batches as that takes with the ranks there are. `name` is what the ledger calls the data.
        `dataloader_options` go to PyTorch's `DataLoader` as they are."""
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise CannotPromise(
                f"{type(dataset).__name__} has no length or no order of its own: its position cannot be restored exactly.",
                hint="Pass a map-style dataset (with __getitem__ and __len__), e.g. a strata.ElasticDataset over files.",
            )
        if batch_size < 1:
            raise ValueError(f"batch_size ({batch_size}) must be positive")
        self.dataset = dataset
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self._total = len(dataset)
        self._shuffle, self._seed, self._name = shuffle, seed, name
        self._options = dataloader_options
        self._loader: ElasticLoader | None = None
        self._ledger: DataLedger | None = None
        self._job: ElasticJob | None = None
        self._given: deque[Batch] = deque()
        """Handed to the trainer, and not known to be trained."""

    # --- set up ---------------------------------------------------------------------------------------------

    def accumulation(self, given: int) -> int:
        """Over how many batches gradients are accumulated, where the trainer was given `given`."""
        world = rank_and_world()[1]
        if self.global_batch_size is None:
            return given
        number, rest = divmod(self.global_batch_size, self.batch_size * world)
        if rest or not number:
            fitting = [n for n in range(1, 65) if self.global_batch_size % (self.batch_size * n) == 0]
            raise CannotPromise(
                f"A global batch of {self.global_batch_size:,} cannot be made of batches of {self.batch_size:,} on "
                f"{counted(world, 'rank')}.",
                hint=f"With this batch size, {', '.join(map(str, fitting)) or 'no number of'} ranks divide it. Use one of these, or "
                "another batch size.",
            )
        return number

    def open(self, *, accumulate: int = 1) -> ElasticLoader:
        """Read as this process's rank, in steps of `accumulate` batches."""
        rank, world = rank_and_world()
        sampler = ElasticSampler(
            self._total,
            batch_size=self.batch_size * accumulate,
            micro_batch_size=self.batch_size,
            rank=rank,
            world_size=world,
            shuffle=self._shuffle,
            seed=self._seed,
            drop_last=True,
            dataset=self._name,
        )
        sampler.check_trainable()
        self._job = None
        self._loader = ElasticLoader(self.dataset, sampler, commit="explicit", **self._options)
        self._given.clear()
        return self._loader

    def drive(self, job: ElasticJob) -> None:
        """From now on this job counts what is trained, saves it and restores it."""
        self._job = job

    @property
    def _sampler(self) -> ElasticSampler:
        """Not to be seen by trainers, which would set its epoch to what they count."""
        return self.elastic.sampler

    @property
    def elastic(self) -> ElasticLoader:
        """The loader behind it, with which a job counts."""
        if self._loader is None:
            self._ledger = DataLedger(self.open())
        assert self._loader is not None
        return self._loader

    # --- reading --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of one rank in a whole epoch."""
        return len(self._sampler.plan((0, 0)))

    @property
    def left(self) -> int:
        """Batches of one rank that are left of this epoch."""
        return len(self._sampler.plan())

    def __iter__(self) -> Iterator[Any]:
        loader = self.elastic
        if self._job is None:
            self._settle()
        self._given.clear()
        if self._job is not None and self._job.is_done():
            return
        for batch in loader:
            if self._job is not None:
                self._job.give()
            self._given.append(batch)
            yield batch.data
            if self._job is None:
                self._settle()

    def epochs_at(self, batch: Batch) -> float:
        """How many epochs of the run are trained with this batch."""
        whole = self._total - self._total % self._sampler.global_batch_size
        return batch.step.epoch + min(1.0, batch.step.batch_stop / whole)

    def trained(self, count: int) -> Sequence[Batch]:
        """The next `count` batches that were handed out: the optimizer has stepped on them."""
        return [self._given.popleft() for _ in range(count)]

    def _settle(self) -> None:
        """No job says what was trained: all that was handed out counts."""
        assert self._loader is not None
        while self._given:
            self._loader.commit(self._given.popleft())

    # --- checkpoints that are not a job's ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where training is. Without a job, with the record of what was trained."""
        loader = self.elastic
        state: dict[str, Any] = {
            **loader.state_dict(),
            "batch_size": self.batch_size,
            "world_size": self._sampler.world_size,
        }
        if self._job is None:
            self._settle()
            assert self._ledger is not None
            state = {**state, **loader.state_dict(), RECORD: self._ledger.commit_alone(SNAPSHOT)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, with the number of ranks there are now."""
        if self._job is not None:
            return  # It stands where the job's weights do.
        loader = self.elastic
        if (saved := state.get("batch_size", self.batch_size)) != self.batch_size:
            raise CannotPromise(
                f"The checkpoint was saved with batches of {saved:,}, and this loader has batches of {self.batch_size:,}: the trainer "
                "would miscount the epoch that is under way.",
                hint=f"Finish the epoch with batch_size={saved}.",
            )
        if (record := state.get(RECORD)) is None:
            loader.load_state_dict(state)
        else:
            assert self._ledger is not None
            self._ledger.restore(record, checkpoint_id=state.get(RESTORED_FROM))
        self._given.clear()


def batches_of(state: Mapping[str, Any], *, world_size: int) -> tuple[int, int]:
    """How many batches each of `world_size` ranks has in a whole epoch, and in what is left of that of a saved state."""
    size = int(state["batch_size"])
    whole, left = (
        StepPlan(
            epoch=int(state["epoch"]),
            total=int(state["total"]),
            start=start,
            global_batch_size=size * world_size,
            rank=0,
            world_size=world_size,
            micro_batch_size=size,
            drop_last=True,
        )
        for start in (0, int(state["position"]))
    )
    return len(whole), len(left)


def said_at_start(loader: TrainerLoader) -> str:
    """What every start logs about the data, so that nothing is left out silently."""
    sampler = loader.elastic.sampler
    batch = sampler.global_batch_size
    dropped = sampler.total % batch
    text = (
        f"{sampler.total:,} samples in global batches of {batch:,} on {counted(sampler.world_size, 'rank')}"
    )
    if dropped:
        text += f"; the last {dropped:,} of an epoch do not fill one and are left out, which the audit shows"
    return text


def announce(job: ElasticJob, text: str) -> None:
    """Say so once, where the user sees it."""
    if job.rank == 0:
        say(logging.INFO, text)
