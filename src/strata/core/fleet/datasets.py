"""Registered datasets, and for each job and epoch the plan of who reads which shard.

A plan is made when a dataset or a member appears, and every later version starts from the one before; while
the members stay the same, so does the plan. A new epoch begins with the plan of the last: when a reader asks
for its shards, or else with the first checkpoint trained on it. What is committed (how far each shard got,
according to the checkpoint a recovery would use) decides which shards are finished and where an unfinished one
begins for its next reader. Only the last few epochs of a dataset keep a plan; an older one is made anew
when it is asked for.
Pure. Reads no files: paths and counts arrive with the registration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from strata.core import checks
from strata.core.data.ledger import DataCommit
from strata.core.data.sharding import Moves, ShardPlan, apply_moves, first_plan, moves_between, replan
from strata.core.fleet.membership import Membership
from strata.core.messages import (
    Conflict,
    DatasetId,
    DatasetRegistered,
    DatasetRemoved,
    DatasetSpec,
    Event,
    Instant,
    JobId,
    Overloaded,
    ProgressReported,
    RegisterDataset,
    RemoveDataset,
    ShardsMoved,
    ShardsRequested,
    Unknown,
    WorkerId,
    shorten,
)
from strata.core.text import counted

EPOCHS_KEPT = 3
MAX_DATASETS = 1_000
MAX_DATASETS_OF_A_JOB = 100
SHARDS_PER_PROGRESS = 10_000
DATASET_HINT = "Register it first: POST /api/datasets, or DatasetRegistry(...).register(...)."

PlanKey = tuple[JobId, DatasetId, int]
Done = NDArray[np.int64]
_NO_SHARDS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A range of samples for one reader, and how many of them are committed."""

    shard_id: int
    start: int
    stop: int
    done: int


class PlanEntry:
    """A plan with the lookups it is asked for: each worker's shards cost one sort per version."""

    def __init__(self, plan: ShardPlan, *, moved: Mapping[str, list[int]]) -> None:
        self.plan = plan
        self.moved = moved
        """What changed hands with this version."""
        self._shards: dict[str, NDArray[np.int64]] | None = None

    def shards_of(self, worker_id: str) -> NDArray[np.int64]:
        if self._shards is None:
            by_owner = np.argsort(self.plan.owners, kind="stable")
            bounds = np.searchsorted(self.plan.owners[by_owner], np.arange(len(self.plan.workers) + 1))
            groups = np.split(by_owner, bounds)[1:-1]
            self._shards = dict(zip(self.plan.workers, groups, strict=True))
        return self._shards.get(worker_id, _NO_SHARDS)


class Datasets:
    def __init__(self) -> None:
        self.specs: dict[DatasetId, DatasetSpec] = {}
        self.registered_at_s: dict[DatasetId, float] = {}
        self.plans: dict[PlanKey, PlanEntry] = {}
        self._commits: dict[JobId, DataCommit] = {}
        self._done: dict[PlanKey, Done | None] = {}
        """What the commits say, per shard, as far as it was asked for."""
        self.reported: dict[PlanKey, dict[int, int]] = {}
        """Soft: how far readers say they are, beyond what a checkpoint has committed."""
        self.read_by_shard: set[tuple[JobId, DatasetId]] = set()
        """Soft: where workers have asked for their shards, or said how far they are in them. Others read by position, or not
        at all, and the plan says nothing about them."""
        self.dirty_jobs: set[JobId] = set()
        self._offsets: dict[DatasetId, list[int]] = {}

    # --- questions ------------------------------------------------------------------------------------------

    def get(self, dataset_id: DatasetId) -> DatasetSpec:
        spec = self.specs.get(dataset_id)
        if spec is None:
            raise Unknown("dataset", dataset_id, hint=DATASET_HINT)
        return spec

    def get_for(self, job: JobId, dataset_id: DatasetId) -> DatasetSpec:
        """The same for a job, which knows nothing of what is others' alone."""
        spec = self.specs.get(dataset_id)
        if spec is None or not spec.is_for(job):
            raise Unknown("dataset", dataset_id, hint=DATASET_HINT)
        return spec

    def epochs(self, job: JobId, dataset_id: DatasetId) -> list[int]:
        """Epochs that have a plan, the most recently opened last."""
        return [epoch for (j, d, epoch) in self.plans if (j, d) == (job, dataset_id)]

    def has_started(self, job: JobId, dataset_id: DatasetId) -> bool:
        """Whether a checkpoint of the job says that some of it was trained."""
        return dataset_id in self._started(job)

    def is_read_by(self, job: JobId, dataset_id: DatasetId) -> bool:
        """Whether a job is known to read a dataset, rather than only being allowed to."""
        spec = self.specs[dataset_id]
        is_read = (job, dataset_id) in self.read_by_shard or self.has_started(job, dataset_id)
        return is_read or job in spec.jobs

    def shards_of(self, worker_id: WorkerId, key: PlanKey) -> Iterator[Shard]:
        spec, done = self.specs[key[1]], self.done(key)
        for shard in self.plans[key].shards_of(worker_id).tolist():
            yield shard_at(spec, shard, int(done[shard]) if done is not None else 0)

    def done(self, key: PlanKey) -> Done | None:
        """Samples of each shard that the checkpoint a recovery would use has committed; None: none at all."""
        if key not in self._done:
            job, dataset_id, epoch = key
            spec, commit = self.specs[dataset_id], self._commits.get(job)
            found = commit.find(dataset_id, epoch) if commit is not None else None
            self._done[key] = (
                found.after.per_shard(total=spec.total_samples, shard_size=spec.shard_size)
                if found is not None and found.total == spec.total_samples
                else None
            )
        return self._done[key]

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
            return self._decide_share(known, spec.jobs, now)
        if known is not None and spec.jobs and not any(known.is_for(job) for job in spec.jobs):
            raise Conflict(
                f"Dataset '{spec.dataset_id}' belongs to another job.", hint="Register it under another id."
            )
        if known is not None:
            raise Conflict(
                f"Dataset '{spec.dataset_id}' is registered with other parameters: {_difference(known, spec)}.",
                hint="Register it under another id, or pass the parameters it has.",
            )
        if len(self.specs) >= MAX_DATASETS:
            raise Overloaded(
                f"{MAX_DATASETS:,} datasets are registered already, which is the limit.",
                hint="Remove unused ones: `strata datasets rm ID`.",
            )
        self._check_share(spec.jobs)
        return DatasetRegistered(
            spec=spec,
            reason=f"{spec.total_samples:,} samples in {spec.shard_count:,} shards",
            at_s=now.wall_s,
        )

    def decide_grant(self, dataset_id: DatasetId, job: JobId, now: Instant) -> DatasetRegistered | None:
        """A task was given the dataset: its job may read it, whichever others may."""
        spec = self.get(dataset_id)
        return None if spec.is_for(job) else self._decide_share(spec, (job,), now)

    def _decide_share(
        self, known: DatasetSpec, jobs: tuple[JobId, ...], now: Instant
    ) -> DatasetRegistered | None:
        """Who describes a dataset exactly as it is has it too: one more job, or everybody."""
        if not known.jobs or (jobs and all(job in known.jobs for job in jobs)):
            return None
        if jobs:
            self._check_share(jobs)
            jobs = (*known.jobs, *(job for job in jobs if job not in known.jobs))
        return DatasetRegistered(
            spec=replace(known, jobs=jobs),
            reason=f"shared by {counted(len(jobs), 'job')}" if jobs else "shared by all jobs",
            at_s=self.registered_at_s[known.dataset_id],
        )

    def _check_share(self, jobs: tuple[JobId, ...]) -> None:
        for job in jobs:
            if sum(job in spec.jobs for spec in self.specs.values()) >= MAX_DATASETS_OF_A_JOB:
                raise Overloaded(
                    f"Job '{job}' has {MAX_DATASETS_OF_A_JOB} datasets of its own already, which is the limit.",
                    hint="Use fewer, or have an operator remove some: `strata datasets rm ID`.",
                )

    def decide_remove(self, command: RemoveDataset, now: Instant) -> DatasetRemoved:
        checks.text("reason", command.reason)
        self.get(command.dataset_id)
        return DatasetRemoved(
            dataset_id=command.dataset_id, reason=command.reason or "removed", at_s=now.wall_s
        )

    def decide_rebalance(self, membership: Membership, now: Instant) -> Iterator[ShardsMoved]:
        """New versions of every plan whose members or datasets changed."""
        for job in sorted(self.dirty_jobs):
            planned = {dataset_id for j, dataset_id, _ in self.plans if j == job}
            keys = [key for key in self.plans if key[0] == job]
            started = self._started(job)
            keys += [
                (job, name, started.get(name, 0))
                for name, spec in self.specs.items()
                if name not in planned and spec.is_for(job)
            ]
            for key in keys:
                moved = self.decide_plan(key, membership, now)
                if moved is not None:
                    yield moved

    def decide_epochs(self, job: JobId, membership: Membership, now: Instant) -> Iterator[ShardsMoved]:
        """Plans for epochs that training has started without asking for shards: who reads by position never does."""
        for dataset_id, epoch in self._started(job).items():
            key = (job, dataset_id, epoch)
            if key not in self.plans and epoch > max(self.epochs(job, dataset_id), default=epoch):
                moved = self.decide_plan(key, membership, now)
                if moved is not None:
                    yield moved

    def _started(self, job: JobId) -> dict[DatasetId, int]:
        """The newest epoch of each dataset that the checkpoint a recovery would use was trained on."""
        commit = self._commits.get(job)
        newest: dict[DatasetId, int] = {}
        for each in commit.epochs if commit is not None else ():
            name = DatasetId(each.dataset)
            newest[name] = max(each.last, newest.get(name, 0))
        return newest

    def decide_plan(self, key: PlanKey, membership: Membership, now: Instant) -> ShardsMoved | None:
        """The next version of one plan, or None where the one there is will do."""
        job, dataset_id, epoch = key
        workers = list(membership.roster(job))
        before, base_epoch = self._base(key)
        if base_epoch == epoch and sorted(workers) == list(before.workers):
            return None
        if base_epoch < 0 and not workers:
            return None
        begins = base_epoch not in (epoch, -1)
        done, finished, started = self.done(key), None, None
        if done is not None and not begins:  # A new epoch is dealt out whole, however far it is.
            sizes = shard_sizes(self.specs[dataset_id])
            finished, started = done >= sizes, (done > 0) & (done < sizes)
        cause = f"epoch {epoch} begins" if begins else ""
        after = replan(before, workers, finished=finished, started=started, cause=cause)
        unchanged = f"epoch {epoch} begins with the plan of epoch {base_epoch}"
        return ShardsMoved(
            job_id=job,
            dataset_id=dataset_id,
            epoch=epoch,
            base_epoch=base_epoch,
            version=after.version,
            workers=after.workers,
            moved=moves_between(before, after).by_owner(),
            reason=unchanged if after is before else after.reason,
            at_s=now.wall_s,
        )

    def _base(self, key: PlanKey) -> tuple[ShardPlan, int]:
        """The plan a new version starts from, and its epoch: its own, else the one opened last, else one without owners."""
        if key in self.plans:
            return self.plans[key].plan, key[2]
        epochs = self.epochs(key[0], key[1])
        if not epochs:
            return _unassigned(self.specs[key[1]]), -1
        return self.plans[(key[0], key[1], epochs[-1])].plan, epochs[-1]

    # --- observations ---------------------------------------------------------------------------------------

    def take_progress(self, progress: ProgressReported, membership: Membership) -> None:
        """Shown at once, counted only when a checkpoint commits it."""
        member = membership.admit(progress.worker_id, incarnation=progress.incarnation)
        job = member.spec.job_id
        if progress.generation and progress.generation != membership.job_generations[job]:
            return  # Of a generation that is over; its reader is being notified.
        checks.between("shards in one progress message", len(progress.shards), 0, SHARDS_PER_PROGRESS)
        for shard in progress.shards:
            self._report((job, shard.dataset_id, shard.epoch), shard.shard_id, shard.samples_done)

    def take_request(self, request: ShardsRequested) -> None:
        if request.dataset_id in self.specs:
            self.read_by_shard.add((request.job_id, request.dataset_id))

    def _report(self, key: PlanKey, shard_id: int, done: int) -> None:
        if key in self.plans and 0 <= shard_id < self.plans[key].plan.shard_count:
            self.read_by_shard.add(key[:2])
            size = shard_at(self.specs[key[1]], shard_id, 0)
            self.reported.setdefault(key, {})[shard_id] = min(max(done, 0), size.stop - size.start)

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: DatasetRegistered | DatasetRemoved | ShardsMoved) -> None:
        match event:
            case DatasetRegistered():
                self.specs[event.spec.dataset_id] = event.spec
                self.registered_at_s[event.spec.dataset_id] = event.at_s
            case DatasetRemoved():
                self._removed(event.dataset_id)
            case ShardsMoved():
                self._moved(event)

    def commit(self, job: JobId, data: DataCommit | None) -> None:
        """The data position where a recovery of the job would begin now; None: at the very beginning."""
        if data is None:
            self._commits.pop(job, None)
        else:
            self._commits[job] = data
        self._done = {key: done for key, done in self._done.items() if key[0] != job}
        self.reported = {key: shards for key, shards in self.reported.items() if key[0] != job}

    def forget(self, job: JobId) -> None:
        """No worker is in the job any more, and has not been for long."""
        self.dirty_jobs.discard(job)
        self.read_by_shard = {key for key in self.read_by_shard if key[0] != job}
        for key in [key for key in self.plans if key[0] == job]:
            self._drop_plan(key)

    def _removed(self, dataset_id: DatasetId) -> None:
        for key in [key for key in self.plans if key[1] == dataset_id]:
            self._drop_plan(key)
        del self.specs[dataset_id], self.registered_at_s[dataset_id]
        self._offsets.pop(dataset_id, None)
        self.read_by_shard = {key for key in self.read_by_shard if key[1] != dataset_id}
        self._done = {key: done for key, done in self._done.items() if key[1] != dataset_id}

    def _drop_plan(self, key: PlanKey) -> None:
        del self.plans[key]
        self.reported.pop(key, None)
        self._done.pop(key, None)

    def _moved(self, event: ShardsMoved) -> None:
        key = (event.job_id, event.dataset_id, event.epoch)
        if event.base_epoch < 0:
            base = _unassigned(self.specs[event.dataset_id])
        else:
            base = self.plans[(event.job_id, event.dataset_id, event.base_epoch)].plan
        moves = Moves.from_owners(event.moved)
        plan = apply_moves(base, moves, event.workers, event.version, reason=event.reason)
        fresh = key not in self.plans
        self.plans[key] = PlanEntry(plan, moved=event.moved)
        if key in self.reported:  # What a shard's last reader said is not true of its next.
            taken = {shard for shards in event.moved.values() for shard in shards}
            self.reported[key] = {s: done for s, done in self.reported[key].items() if s not in taken}
        if fresh:
            for epoch in self.epochs(event.job_id, event.dataset_id)[:-EPOCHS_KEPT]:
                self._drop_plan((event.job_id, event.dataset_id, epoch))

    def compact(self) -> Iterator[Event]:
        return _history(dict(self.specs), dict(self.registered_at_s), list(self.plans.items()))


def _history(
    specs: Mapping[DatasetId, DatasetSpec],
    registered_at_s: Mapping[DatasetId, float],
    plans: Sequence[tuple[PlanKey, PlanEntry]],
) -> Iterator[Event]:
    for dataset_id, spec in specs.items():
        yield DatasetRegistered(spec=spec, reason="registered", at_s=registered_at_s[dataset_id])
    for (job, dataset_id, epoch), entry in plans:
        # First all that stayed where it was, former owners included, then what moved last.
        plan, last = entry.plan, Moves.from_owners(entry.moved)
        every = moves_between(_unassigned(specs[dataset_id]), plan)
        rest = ~np.isin(every.shards, last.shards)
        stayed = replace(every, shards=every.shards[rest], to=every.to[rest])
        settled = ShardsMoved(
            job_id=job,
            dataset_id=dataset_id,
            epoch=epoch,
            base_epoch=-1,
            version=plan.version,
            workers=(*plan.workers, *plan.former),
            moved=stayed.by_owner(),
            reason=plan.reason,
            at_s=0.0,
        )
        yield settled
        yield replace(settled, base_epoch=epoch, workers=plan.workers, moved=entry.moved)


def _unassigned(spec: DatasetSpec) -> ShardPlan:
    """The plan before the first: all shards are unassigned."""
    return first_plan([], spec.shard_count, salt=spec.dataset_id)


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
        f"{name} is {shorten(repr(getattr(known, name)))}, not {shorten(repr(getattr(other, name)))}"
        for name in names
        if getattr(known, name) != getattr(other, name)
    )
