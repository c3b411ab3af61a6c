"""Registered datasets, and for each job and epoch the plan of who reads which shard.

A plan is made when a dataset or a member appears, and every later version starts from the one before. What is
committed (how far each shard got, according to the checkpoint a recovery would use) decides which shards are
finished and where an unfinished one begins for whoever reads it next. Only the last few epochs of a dataset
keep a plan; an older one is made anew when somebody asks.
Pure. Reads no files: paths and counts arrive with the registration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from strata.core import checks
from strata.core.ledger import DataCommit
from strata.core.membership import Membership
from strata.core.messages import (
    Conflict,
    DatasetId,
    DatasetRegistered,
    DatasetSpec,
    Event,
    Instant,
    JobId,
    Overloaded,
    RegisterDataset,
    ShardsMoved,
    Unknown,
    WorkerId,
)
from strata.core.sharding import Moves, ShardPlan, apply_moves, first_plan, moves_between, replan

EPOCHS_KEPT = 3
MAX_DATASETS = 1_000
DATASET_HINT = "Register it first: POST /api/datasets, or DatasetRegistry(...).register(...)."

PlanKey = tuple[JobId, DatasetId, int]
Done = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A range of samples for one reader, and how many of them are committed."""

    shard_id: int
    start: int
    stop: int
    done: int


class PlanEntry:
    """A plan with the lookups it is asked for: each worker's shards cost one sort per version."""

    def __init__(self, plan: ShardPlan) -> None:
        self.plan = plan
        self.last_moved: Mapping[str, list[int]] = {}
        self._by_owner: NDArray[np.int64] | None = None
        self._bounds: NDArray[np.int64] | None = None

    def shards_of(self, worker_id: str) -> NDArray[np.int64]:
        if worker_id not in self.plan.workers:
            return np.empty(0, np.int64)
        if self._by_owner is None or self._bounds is None:
            self._by_owner = np.argsort(self.plan.owners, kind="stable")
            ranks = np.arange(len(self.plan.workers) + 1)
            self._bounds = np.searchsorted(self.plan.owners[self._by_owner], ranks)
        index = self.plan.workers.index(worker_id)
        return self._by_owner[self._bounds[index] : self._bounds[index + 1]]


class Datasets:
    def __init__(self) -> None:
        self.specs: dict[DatasetId, DatasetSpec] = {}
        self.registered_at_s: dict[DatasetId, float] = {}
        self.plans: dict[PlanKey, PlanEntry] = {}
        self.committed: dict[PlanKey, Done] = {}
        self.reported: dict[PlanKey, dict[int, int]] = {}
        """Soft: how far readers say they are, beyond what a checkpoint has committed."""
        self.dirty_jobs: set[JobId] = set()
        self._offsets: dict[DatasetId, list[int]] = {}

    # --- questions ------------------------------------------------------------------------------------------

    def get(self, dataset_id: DatasetId) -> DatasetSpec:
        spec = self.specs.get(dataset_id)
        if spec is None:
            raise Unknown("dataset", dataset_id, hint=DATASET_HINT)
        return spec

    def epochs(self, job: JobId, dataset_id: DatasetId) -> list[int]:
        """Epochs that have a plan, the most recently opened last."""
        return [epoch for (j, d, epoch) in self.plans if (j, d) == (job, dataset_id)]

    def shards_of(self, worker_id: WorkerId, key: PlanKey) -> Iterator[Shard]:
        spec, done = self.specs[key[1]], self.committed.get(key)
        for shard in self.plans[key].shards_of(worker_id).tolist():
            yield shard_at(spec, shard, int(done[shard]) if done is not None else 0)

    def files_of(self, spec: DatasetSpec, shard: Shard) -> list[str]:
        """The files that hold a shard's samples; the dataset's path where only the workers can see files."""
        if not spec.files:
            return [spec.path]
        ends = self._offsets.get(spec.dataset_id)
        if ends is None:
            ends = list(accumulate(f.samples for f in spec.files))
            self._offsets[spec.dataset_id] = ends
        first = bisect_right(ends, shard.start)
        last = bisect_right(ends, shard.stop - 1)
        return [f.path for f in spec.files[first : last + 1]]

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_register(self, command: RegisterDataset, now: Instant) -> DatasetRegistered | None:
        spec = command.spec
        checks.dataset(spec)
        known = self.specs.get(spec.dataset_id)
        if known == spec:
            return None
        if known is not None:
            raise Conflict(
                f"Dataset '{spec.dataset_id}' is registered with other parameters: {_difference(known, spec)}.",
                hint="Register it under another id, or pass the parameters it has.",
            )
        if len(self.specs) >= MAX_DATASETS:
            raise Overloaded(f"{MAX_DATASETS:,} datasets are registered already.", hint="Use fewer.")
        return DatasetRegistered(
            spec=spec,
            reason=f"{spec.total_samples:,} samples in {spec.shard_count:,} shards",
            at_s=now.wall_s,
        )

    def decide_rebalance(self, membership: Membership, now: Instant) -> Iterator[ShardsMoved]:
        """New versions of every plan whose members or datasets changed."""
        for job in sorted(self.dirty_jobs):
            workers = list(membership.roster(job))
            for spec in self.specs.values():
                epochs = self.epochs(job, spec.dataset_id) or [0]
                for epoch in epochs:
                    moved = self._decide_plan((job, spec.dataset_id, epoch), workers, now)
                    if moved is not None:
                        yield moved

    def decide_epoch(self, key: PlanKey, membership: Membership, now: Instant) -> ShardsMoved | None:
        return self._decide_plan(key, list(membership.roster(key[0])), now)

    def _decide_plan(self, key: PlanKey, workers: list[WorkerId], now: Instant) -> ShardsMoved | None:
        job, dataset_id, epoch = key
        spec = self.specs[dataset_id]
        before, base_epoch = self._base(key)
        if before is None:
            if not workers:
                return None
            before = first_plan([], spec.shard_count, salt=dataset_id)
        done = self.committed.get(key)
        finished = started = None
        if done is not None:
            sizes = shard_sizes(spec)
            finished, started = done >= sizes, (done > 0) & (done < sizes)
        after = replan(before, workers, finished=finished, started=started)
        if after is before and base_epoch == epoch:
            return None
        return ShardsMoved(
            job_id=job,
            dataset_id=dataset_id,
            epoch=epoch,
            base_epoch=base_epoch,
            version=after.version,
            workers=after.workers,
            moved=moves_between(before, after).by_owner(),
            reason=after.reason or f"epoch {epoch} begins with the plan of epoch {base_epoch}",
            at_s=now.wall_s,
        )

    def _base(self, key: PlanKey) -> tuple[ShardPlan | None, int]:
        """The plan a new version starts from: its own, else that of the epoch opened last."""
        if key in self.plans:
            return self.plans[key].plan, key[2]
        epochs = self.epochs(key[0], key[1])
        if not epochs:
            return None, -1
        return self.plans[(key[0], key[1], epochs[-1])].plan, epochs[-1]

    def report(self, key: PlanKey, shard_id: int, done: int) -> None:
        """A reader's progress: shown at once, counted only when a checkpoint commits it."""
        if key in self.plans and 0 <= shard_id < self.plans[key].plan.shard_count:
            size = shard_at(self.specs[key[1]], shard_id, 0)
            self.reported.setdefault(key, {})[shard_id] = min(max(done, 0), size.stop - size.start)

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: DatasetRegistered | ShardsMoved) -> None:
        match event:
            case DatasetRegistered():
                self.specs[event.spec.dataset_id] = event.spec
                self.registered_at_s[event.spec.dataset_id] = event.at_s
            case ShardsMoved():
                self._moved(event)

    def commit(self, job: JobId, data: DataCommit) -> None:
        """A checkpoint was completed: its data position is where a recovery would begin."""
        for epoch in data.epochs:
            spec = self.specs.get(DatasetId(epoch.dataset))
            if spec is not None and spec.total_samples == epoch.total:
                key = (job, spec.dataset_id, epoch.epoch)
                self.committed[key] = epoch.after.per_shard(
                    total=spec.total_samples, shard_size=spec.shard_size
                )
                self.reported.pop(key, None)

    def forget(self, job: JobId) -> None:
        """Nobody is in the job any more, and has not been for long."""
        self.dirty_jobs.discard(job)
        for key in [key for key in self.plans if key[0] == job]:
            self._drop_plan(key)

    def _drop_plan(self, key: PlanKey) -> None:
        del self.plans[key]
        self.reported.pop(key, None)

    def _moved(self, event: ShardsMoved) -> None:
        key = (event.job_id, event.dataset_id, event.epoch)
        base_key = (event.job_id, event.dataset_id, event.base_epoch)
        if event.base_epoch < 0:
            base = first_plan([], self.specs[event.dataset_id].shard_count, salt=event.dataset_id)
        else:
            base = self.plans[base_key].plan
        moves = Moves.from_owners(event.moved)
        plan = apply_moves(base, moves, event.workers, event.version, reason=event.reason)
        fresh = key not in self.plans
        entry = self.plans[key] = PlanEntry(plan)
        entry.last_moved = event.moved
        if fresh:
            for epoch in self.epochs(event.job_id, event.dataset_id)[:-EPOCHS_KEPT]:
                self._drop_plan((event.job_id, event.dataset_id, epoch))

    def compact(self) -> list[Event]:
        events: list[Event] = [
            DatasetRegistered(spec=spec, reason="registered", at_s=self.registered_at_s[dataset_id])
            for dataset_id, spec in self.specs.items()
        ]
        for (job, dataset_id, epoch), entry in self.plans.items():
            nobody = first_plan([], entry.plan.shard_count, salt=dataset_id)
            events.append(
                ShardsMoved(
                    job_id=job,
                    dataset_id=dataset_id,
                    epoch=epoch,
                    base_epoch=-1,
                    version=entry.plan.version,
                    workers=(*entry.plan.workers, *entry.plan.former),
                    moved=moves_between(nobody, entry.plan).by_owner(),
                    reason=entry.plan.reason,
                    at_s=0.0,
                )
            )
            if entry.plan.former:
                events.append(
                    ShardsMoved(
                        job_id=job,
                        dataset_id=dataset_id,
                        epoch=epoch,
                        base_epoch=epoch,
                        version=entry.plan.version,
                        workers=entry.plan.workers,
                        moved={},
                        reason=entry.plan.reason,
                        at_s=0.0,
                    )
                )
        return events


def shard_at(spec: DatasetSpec, shard_id: int, done: int) -> Shard:
    start = shard_id * spec.shard_size
    return Shard(
        shard_id=shard_id, start=start, stop=min(start + spec.shard_size, spec.total_samples), done=done
    )


def shard_sizes(spec: DatasetSpec) -> Done:
    sizes = np.full(spec.shard_count, spec.shard_size, np.int64)
    sizes[-1] = spec.total_samples - (spec.shard_count - 1) * spec.shard_size
    return sizes


def _difference(known: DatasetSpec, other: DatasetSpec) -> str:
    names = ("path", "format", "total_samples", "shard_size", "shuffle", "seed", "metadata")
    return ", ".join(
        f"{name} is {getattr(known, name)!r}, not {getattr(other, name)!r}"
        for name in names
        if getattr(known, name) != getattr(other, name)
    )
