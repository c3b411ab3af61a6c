"""Shards of datasets for workers that read at their own pace.

`ShardManager` cuts datasets into shards and deals them to workers: balanced, moving only what must move when
a worker joins or leaves (`strata.core.data.sharding`). What a checkpoint committed (`commit`) decides which shards
are finished and where an unfinished one continues for its next reader. In one process and in memory; the
coordinator does the same for a fleet.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.core import checks
from strata.core.data.ledger import DataCommit, EpochCommit
from strata.core.data.order import EpochOrder
from strata.core.data.sharding import ShardPlan, first_plan, replan
from strata.core.messages import Conflict, DatasetId, DatasetSpec, Unknown
from strata.core.types import SampleRange

_EPOCHS_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(SampleRange):
    """Samples `start` up to `stop` of a dataset, for one reader."""

    id: int
    start: int
    stop: int
    done: int = 0
    """The first so many are committed: begin at `start + done`."""
    file_paths: tuple[str, ...] = ()
    dataset_id: str = ""
    epoch: int = 0
    total_shards: int = 0
    """Of the dataset."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def indices(self) -> range:
        """The samples that are left to read."""
        return range(self.start + self.done, self.stop)

    @property
    def shard_id(self) -> int:
        """As the coordinator's messages call it."""
        return self.id


ShardInfo = Shard


@dataclass(slots=True)
class _Entry:
    spec: DatasetSpec
    plans: dict[int, ShardPlan] = field(default_factory=dict)
    committed: tuple[EpochCommit, ...] = ()
    """What the newest checkpoint has trained of it."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        edges = np.arange(self.spec.shard_count + 1, dtype=np.int64) * self.spec.shard_size
        return np.diff(np.minimum(edges, self.spec.total_samples))


class ShardManager:
    """Datasets, workers, and which worker reads which shard in which epoch."""

    def __init__(self) -> None:
        self._datasets: dict[str, _Entry] = {}
        self._workers: set[str] = set()
        self._lock = threading.RLock()

    # Datasets -----------------------------------------------------------------------------------------------

    def register_dataset_params(
        self,
        dataset_id: str,
        total_samples: int,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        *,
        path: str = "",
        format: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Cut a dataset into shards; returns how many. Repeating it with the same values changes nothing; other values
        are refused."""
        spec = DatasetSpec(
            dataset_id=DatasetId(dataset_id),
            path=path or dataset_id,
            format=format or "samples",
            total_samples=total_samples,
            shard_size=shard_size,
            shuffle=shuffle,
            seed=seed,
            metadata=dict(metadata or {}),
        )
        checks.dataset(spec)
        with self._lock:
            known = self._datasets.get(dataset_id)
            if known is not None and known.spec != spec:
                raise Conflict(
                    f"Dataset '{dataset_id}' is registered with other parameters.",
                    hint="Register it under another id, or pass the parameters it has.",
                )
            if known is None:
                self._datasets[dataset_id] = _Entry(spec)
        return spec.shard_count

    def datasets(self) -> list[str]:
        with self._lock:
            return list(self._datasets)

    def spec(self, dataset_id: str) -> DatasetSpec:
        return self._entry(dataset_id).spec

    # Workers ------------------------------------------------------------------------------------------------

    def add_worker(self, worker_id: str) -> None:
        checks.name("worker_id", worker_id)
        self._change_workers(self._workers | {worker_id}, f"{worker_id} joined")

    def remove_worker(self, worker_id: str, *, cause: str = "") -> None:
        """Give its unfinished shards to the others. An unknown worker changes nothing."""
        self._change_workers(self._workers - {worker_id}, cause or f"{worker_id} left")

    def workers(self) -> list[str]:
        with self._lock:
            return sorted(self._workers)

    # Shards -------------------------------------------------------------------------------------------------

    def get_shard_for_worker(self, dataset_id: str, worker_id: str, epoch: int = 0) -> list[Shard]:
        """Every shard of a worker in an epoch, in the order to read them. Asking makes the worker a member."""
        with self._lock:
            entry = self._entry(dataset_id)
            checks.between("epoch", epoch, 0, 2**31 - 1)
            if worker_id not in self._workers:
                self.add_worker(worker_id)
            mine = self.plan(dataset_id, epoch).shards_of(worker_id)
            if entry.spec.shuffle:
                order = EpochOrder(total=entry.spec.shard_count, seed=entry.spec.seed, epoch=epoch)
                mine = mine[np.argsort(order.positions_of(mine))]
            done = self._done(entry, epoch)
            return [self._shard(entry.spec, int(shard), epoch, int(done[shard])) for shard in mine]

    def plan(self, dataset_id: str, epoch: int = 0) -> ShardPlan:
        """Who has which shard of an epoch, and why. A new epoch begins with the plan of the one before."""
        with self._lock:
            entry = self._entry(dataset_id)
            known = entry.plans.get(epoch)
            if known is None:
                if entry.plans:
                    known = self._replanned(
                        entry, epoch, entry.plans[max(entry.plans)], cause=f"epoch {epoch} begins"
                    )
                else:
                    known = first_plan(sorted(self._workers), entry.spec.shard_count, salt=dataset_id)
                entry.plans[epoch] = known
                for old in sorted(entry.plans)[:-_EPOCHS_KEPT]:
                    del entry.plans[old]  # Recomputed when it is asked for.
            return known

    def commit(self, data: DataCommit | Mapping[str, Any]) -> None:
        """Take over what a checkpoint committed: finished shards stay where they are, the others continue from
        there."""
        commit = data if isinstance(data, DataCommit) else DataCommit.from_json(data)
        with self._lock:
            for dataset_id, entry in self._datasets.items():
                if trained := tuple(e for e in commit.epochs if e.dataset == dataset_id):
                    entry.committed = trained

    # ---------------------------------------------------------------------------------------------------------

    def _entry(self, dataset_id: str) -> _Entry:
        with self._lock:
            entry = self._datasets.get(dataset_id)
            if entry is None:
                raise Unknown("dataset", dataset_id, hint="Register it first: register_dataset_params(...).")
            return entry

    def _change_workers(self, workers: set[str], cause: str) -> None:
        with self._lock:
            if workers == self._workers:
                return
            self._workers = workers
            for entry in self._datasets.values():
                for epoch, plan in entry.plans.items():
                    entry.plans[epoch] = self._replanned(entry, epoch, plan, cause=cause)

    def _replanned(self, entry: _Entry, epoch: int, before: ShardPlan, *, cause: str) -> ShardPlan:
        done, sizes = self._done(entry, epoch), entry.sizes
        finished, started = done >= sizes, (done > 0) & (done < sizes)
        return replan(before, sorted(self._workers), finished=finished, started=started, cause=cause)

    def _done(self, entry: _Entry, epoch: int) -> NDArray[np.int64]:
        spec = entry.spec
        for known in entry.committed:
            if known.epoch <= epoch <= known.last and known.total == spec.total_samples:
                return known.after.per_shard(total=spec.total_samples, shard_size=spec.shard_size)
        return np.zeros(spec.shard_count, np.int64)

    @staticmethod
    def _shard(spec: DatasetSpec, shard: int, epoch: int, done: int) -> Shard:
        start = shard * spec.shard_size
        return Shard(
            id=shard,
            start=start,
            stop=min(start + spec.shard_size, spec.total_samples),
            done=done,
            dataset_id=spec.dataset_id,
            epoch=epoch,
            total_shards=spec.shard_count,
        )
