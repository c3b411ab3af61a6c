"""An iterable PyTorch dataset that any number of loader processes read together, in the epoch's order.

Each loader process takes every so-many-th micro-batch; `DataLoader` asks them in turn, so batches arrive in
the order of the epoch whatever `num_workers` is. Use it with `batch_size=None`: it yields whole batches, each
with its positions. `ElasticLoader` does all of this; a plain `DataLoader` or `StatefulDataLoader` works too,
with `dataset.commit(batch)` in the training process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strata.data.loading.draws import read_samples
from strata.data.loading.sampler import ElasticSampler, WithSampler
from strata.data.loading.steps import Batch, MapDataset, Step
from strata.errors import MissingDependency

try:
    from torch.utils.data import IterableDataset, default_collate, get_worker_info
except ImportError as error:
    raise MissingDependency("torch", extra="torch", feature="ElasticIterableDataset") from error


class ElasticIterableDataset(WithSampler, IterableDataset[Batch]):
    """Batches of a map-style dataset, chosen and ordered by an `ElasticSampler`."""

    def __init__(
        self,
        samples: MapDataset,
        sampler: ElasticSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if sampler.mixture is not None:
            # Weights may change while training; its loader processes would not know.
            raise ValueError(
                "a mixture is read with ElasticLoader(mixture, sampler), not as an iterable dataset"
            )
        self.sampler = sampler
        self._samples = samples
        self._collate = collate_fn
        # Loader processes that live on between epochs have a copy of the sampler from when they were made. Here
        # they find where the next iteration begins: version, epoch, position, rank, world size.
        self._beginning = multiprocessing.RawArray("q", 5)
        self._version = 0
        self._start: tuple[int, int] | None = None
        self.publish()

    @property
    def is_remote(self) -> bool:
        return bool(getattr(self._samples, "is_remote", False))

    def publish(self, start: tuple[int, int] | None = None) -> None:
        """Let the next iteration begin at the committed position, or at another, in every loader process."""
        self._version, self._start = self._beginning[0] + 1, start
        s = self.sampler
        epoch, position = start or (s.epoch, s.position)
        self._beginning[:] = [self._version, epoch, position, s.rank, s.world_size]

    def set_world(self, rank: int, world_size: int) -> None:
        super().set_world(rank, world_size)
        self.publish()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.publish()

    def commit(self, batch: Batch) -> None:
        """This batch is trained. Call it in the training process."""
        epoch = self.sampler.epoch
        self.sampler.commit(batch.step)
        if self.sampler.epoch != epoch:
            self.publish()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if get_worker_info() is None:  # A loader process that is restored speaks for itself alone.
            self.publish()

    def __iter__(self) -> Iterator[Batch]:
        version, epoch, position, rank, world_size = self._beginning
        if version != self._version:
            self._version, self._start = version, None
            self.sampler.set_world(rank, world_size)
            self.sampler.move(epoch, position)
        return _Batches(self)

    def batches(self, first: int, every: int) -> Iterator[tuple[Step, list[int]]]:
        return self.sampler.batches(first=first, every=every, at=self._start)

    def read(self, step: Step, ids: list[int]) -> Batch:
        return Batch(self._collate(read_samples(self._samples, ids, self.sampler, step.epoch)), step)


class _Batches:
    """The batches of one loader process, and the number of its next one."""

    def __init__(self, dataset: ElasticIterableDataset) -> None:
        worker = get_worker_info()
        self._dataset = dataset
        self._next, self._every = (worker.id, worker.num_workers) if worker else (0, 1)
        self._batches = self._from(self._next)

    def _from(self, first: int) -> Iterator[tuple[Step, list[int]]]:
        return self._dataset.batches(first, self._every)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        step, ids = next(self._batches)
        self._next += self._every
        return self._dataset.read(step, ids)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])
        self._batches = self._from(self._next)
