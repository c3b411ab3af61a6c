"""What the API returns, as plain values computed from the state.

These dataclasses are the JSON of `/api/*` field by field, and the OpenAPI document is generated from them.
Times are Unix seconds. Pure: nothing here reads a clock or changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from strata.core.cluster import Cluster
from strata.core.data.audit import AuditReport, Commit, audit_all
from strata.core.data.ledger import LedgerError
from strata.core.fleet.barriers import missing_members
from strata.core.fleet.checkpoints import CheckpointRecord, data_commit
from strata.core.fleet.datasets import PlanKey, shard_at
from strata.core.fleet.membership import Member
from strata.core.fleet.recoveries import who_survived
from strata.core.fleet.task_views import TaskView
from strata.core.jobs.safety import Copy, Safety, kind_of, safety_of
from strata.core.messages import (
    BarrierReleased,
    CheckpointStatus,
    DatasetId,
    DatasetSpec,
    JobId,
    RecoveryRecorded,
    Resources,
    TaskId,
)
from strata.core.types import WORKER_STATES, WorkerState

COUNTED_ACTIVE = frozenset({"active", "training", "checkpointing"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    id: str
    ip: str
    port: int
    status: WorkerState
    gpu_count: int
    last_heartbeat: float
    assigned_shards: int
    current_epoch: int
    current_step: int
    current_task: str | None
    resources: Resources | None
    metrics: dict[str, float | None]
    job_id: str
    rank: int | None
    incarnation: int
    connected: bool
    """Whether its session stream is open; workers that only make unary calls have none."""
    joined_at: float
    memory_bytes: int
    slow: bool
    """Whether the others of its job wait for it; `reason` says how much."""
    reason: str
    metadata: dict[str, str]
    run_id: str
    """Of the run it trains; empty for a run without an identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetView:
    id: str
    name: str
    path: str
    total_samples: int
    shard_size: int
    shard_count: int
    format: str
    shuffle: bool
    seed: int
    registered_at: float
    metadata: dict[str, str]
    readers: list[str]
    """Jobs known to read it; others may too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    id: int
    start: int
    stop: int
    done: int
    """Samples committed by a checkpoint."""
    reported: int
    """Samples its reader has reported as read, committed or not."""
    worker_id: str | None
    moved: bool
    """Whether the latest plan assigned it to its current owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlanView:
    dataset_id: str
    job_id: str
    epoch: int
    version: int
    reason: str
    samples_done: int
    total_samples: int
    shard_count: int
    by_shard: bool
    """Whether workers read the shards the plan assigns to them; otherwise all ranks read by position, and the assignment is
    hypothetical."""
    shards: list[ShardView]
    """The requested shards, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditView:
    """Totals over the committed history of one epoch."""

    job_id: str
    dataset_id: str
    epoch: int
    exact: bool
    total: int
    samples: int
    lost: int
    repeated: int
    remaining: int
    commits: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    id: str
    step: int
    epoch: int
    size: int
    path: str
    created_at: float
    completed_at: float | None
    worker_id: str
    job_id: str
    status: CheckpointStatus
    tiers: list[str]
    digest: str
    throughput_mb_s: float | None
    reason: str
    metadata: dict[str, str]
    run_id: str
    """Of the run it belongs to; empty for a run without an identity."""
    generation: int
    """Generation of that run when it was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierView:
    id: str
    name: str
    job_id: str
    step: int
    arrived: int
    total: int
    status: Literal["waiting", "complete", "broken"]
    created_at: float
    ended_at: float | None
    missing: list[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryView:
    job_id: str
    worker_id: str
    at: float
    total_s: float
    phases_s: dict[str, float]
    resumed_step: int
    lost_steps: int
    tier: str
    world_before: int
    world_after: int
    reason: str
    survived: int = 0
    """Worker processes that were there before and after; 0 where all are new, or nothing was reported."""
    lost: list[str] = field(default_factory=list)
    """Ids of the workers whose processes were lost."""
    joined: list[str] = field(default_factory=list)
    """Where some survived: ids of the workers with new processes. Those that are also in `lost` were replaced; all others survived."""
    cause: str = ""
    """Why the set of ranks changed, where known."""
    who_survived: str = ""
    """In a sentence: how many survived, and who was replaced, lost or joined; empty where nobody survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsView:
    """Each metric is measured; one that has no measurement yet is null."""

    checkpoint_throughput: float | None = field(metadata={"unit": "MB/s"})
    coordinator_rps: float = field(metadata={"unit": "requests/s"})
    active_workers: int = field(metadata={"unit": "workers"})
    total_workers: int = field(metadata={"unit": "workers"})
    barrier_latency_p99: float | None = field(metadata={"unit": "ms"})
    shard_assignment_time: float | None = field(metadata={"unit": "ms"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    id: str
    timestamp: float
    level: str
    message: str
    source: str
    task_id: str | None
    worker_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """The disk of the coordinator's journal."""

    is_full: bool
    """Changes are refused until there is space."""
    free_bytes: int
    needed_bytes: int
    """With less than this free it counts as full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    connected: bool
    address: str
    uptime: float
    version: str
    leader: bool
    generation: int
    """The newest over all jobs, as the coordinator counts."""
    started_at: float
    server_time: float
    jobs: dict[str, int]
    """The generation of every job: how often its members have changed."""
    storage: StorageView | None = None
    role: Literal["leader", "standby"] = "leader"
    """Of several coordinators one leads and the others follow."""
    led_by: str = ""
    """Where workers reach the leader; empty while there is none."""
    position: int = 0
    """Records of the shared journal applied here; 0 for a single coordinator."""
    behind: int = 0
    """Records that a standby knows of and has not applied."""
    others: list[str] = field(default_factory=list)
    """Where workers reach the other running coordinators of the same journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The last report of a job, kept after its workers have left."""

    id: str
    at: float
    """When it reported."""
    step: int
    loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_time_s: float | None = None
    goodput: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardView:
    coordinator: StatusView
    workers: list[WorkerView]
    datasets: list[DatasetView]
    checkpoints: list[CheckpointView]
    barriers: list[BarrierView]
    metrics: MetricsView
    tasks: list[TaskView]
    logs: list[LogView]
    jobs: list[JobView]


def worker_status(cluster: Cluster, member: Member) -> WorkerState:
    if not member.present:
        return "failed"
    report = cluster.membership.reports.get(member.spec.worker_id)
    state = report.state if report is not None else ""
    return state if state in WORKER_STATES else "active"  # type: ignore[return-value]


def workers(cluster: Cluster) -> list[WorkerView]:
    shards = assigned_shards(cluster)
    return [worker(cluster, m, shards.get(m.spec.worker_id, 0)) for m in cluster.membership.members.values()]


def worker(cluster: Cluster, member: Member, shards: int) -> WorkerView:
    spec = member.spec
    pulse = cluster.membership.pulses.get(spec.worker_id)
    report = cluster.membership.reports.get(spec.worker_id)
    return WorkerView(
        id=spec.worker_id,
        ip=spec.hostname,
        port=spec.port,
        status=worker_status(cluster, member),
        gpu_count=spec.gpu_count,
        last_heartbeat=pulse.last_heartbeat_wall_s if pulse is not None else member.changed_at_s,
        assigned_shards=shards,
        current_epoch=report.epoch if report is not None else 0,
        current_step=report.step if report is not None else 0,
        current_task=(report.task or None) if report is not None else None,
        resources=report.resources if report is not None else None,
        metrics=dict(report.metrics) if report is not None else {},
        job_id=spec.job_id,
        rank=cluster.membership.roster(spec.job_id).get(spec.worker_id),
        incarnation=member.incarnation,
        connected=pulse is not None and pulse.connected,
        joined_at=member.joined_at_s,
        memory_bytes=spec.memory_bytes,
        slow=spec.worker_id in cluster.membership.slow,
        reason=cluster.membership.slow.get(spec.worker_id, member.reason),
        metadata=dict(spec.metadata),
        run_id=spec.run_id,
    )


def assigned_shards(cluster: Cluster) -> dict[str, int]:
    """Shards per worker, over the newest epoch of every dataset that its job reads shard by shard."""
    newest = {key[:2]: key for key in cluster.datasets.plans}
    totals: dict[str, int] = {}
    for key in (key for key in newest.values() if _is_by_shard(cluster, key)):
        plan = cluster.datasets.plans[key].plan
        for name, count in zip(plan.workers, plan.counts().tolist(), strict=True):
            totals[name] = totals.get(name, 0) + count
    return totals


def _is_by_shard(cluster: Cluster, key: PlanKey) -> bool:
    """Whether workers read the shards the plan assigns to them. The ranks of a run read by position, all together, unless they have
    requested shards; so does a job that has trained without requesting any."""
    job, dataset_id, _ = key
    if (job, dataset_id) in cluster.datasets.read_by_shard:
        return True
    members = cluster.membership.members
    is_run = any(members[worker].spec.run_id for worker in cluster.membership.roster(job))
    return not is_run and not cluster.datasets.has_started(job, dataset_id)


def active_workers(cluster: Cluster) -> int:
    members = cluster.membership.members.values()
    return sum(1 for m in members if worker_status(cluster, m) in COUNTED_ACTIVE)


def dataset(cluster: Cluster, spec: DatasetSpec) -> DatasetView:
    return DatasetView(
        id=spec.dataset_id,
        name=spec.metadata.get("name", spec.dataset_id),
        path=spec.path,
        total_samples=spec.total_samples,
        shard_size=spec.shard_size,
        shard_count=spec.shard_count,
        format=spec.format,
        shuffle=spec.shuffle,
        seed=spec.seed,
        registered_at=cluster.datasets.registered_at_s[spec.dataset_id],
        metadata=dict(spec.metadata),
        readers=[str(job) for job in _readers(cluster, spec)],
    )


def _readers(cluster: Cluster, spec: DatasetSpec) -> list[JobId]:
    """Jobs that have a plan and read it, the newest plan last."""
    jobs = dict.fromkeys(
        job for job, dataset_id, _ in cluster.datasets.plans if dataset_id == spec.dataset_id
    )
    return [job for job in jobs if reads(cluster, job, spec.dataset_id)]


def reads(cluster: Cluster, job: JobId, dataset_id: DatasetId) -> bool:
    """A job reads what it has read before, its own datasets, and the dataset of its task."""
    task = cluster.tasks.tasks.get(TaskId(job))
    is_given = task is not None and task.spec.dataset_id == dataset_id
    return is_given or cluster.datasets.is_read_by(job, dataset_id)


def shard_plan(cluster: Cluster, key: PlanKey, *, offset: int = 0, limit: int | None = None) -> ShardPlanView:
    """The plan, with its shards from `offset` on, at most `limit` of them."""
    datasets = cluster.datasets
    spec, entry, done = datasets.specs[key[1]], datasets.plans[key], datasets.done(key)
    names = (*entry.plan.workers, *entry.plan.former, None)  # index -1: unassigned
    reported = datasets.reported.get(key, {})
    moved = {shard for ids in entry.moved.values() for shard in ids}
    shown = entry.plan.owners[offset:] if limit is None else entry.plan.owners[offset : offset + limit]
    shards = []
    for shard_id, owner in enumerate(shown.tolist(), offset):
        shard = shard_at(spec, shard_id, int(done[shard_id]) if done is not None else 0)
        shards.append(
            ShardView(
                id=shard_id,
                start=shard.start,
                stop=shard.stop,
                done=shard.done,
                reported=max(shard.done, reported.get(shard_id, 0)),
                worker_id=names[owner],
                moved=shard_id in moved,
            )
        )
    return ShardPlanView(
        dataset_id=key[1],
        job_id=key[0],
        epoch=key[2],
        version=entry.plan.version,
        reason=entry.plan.reason,
        samples_done=int(done.sum()) if done is not None else 0,
        total_samples=spec.total_samples,
        shard_count=spec.shard_count,
        by_shard=_is_by_shard(cluster, key),
        shards=shards,
    )


def checkpoint(record: CheckpointRecord) -> CheckpointView:
    measured = record.status == "completed" and record.duration_s > 0
    return CheckpointView(
        id=record.checkpoint_id,
        step=record.step,
        epoch=record.epoch,
        size=record.size_bytes,
        path=record.path,
        created_at=record.created_at_s,
        completed_at=record.ended_at_s if record.status == "completed" else None,
        worker_id=record.worker_id,
        job_id=record.job_id,
        status=record.status,
        tiers=list(record.tiers),
        digest=record.digest,
        throughput_mb_s=record.size_bytes / 1e6 / record.duration_s if measured else None,
        reason=record.reason,
        metadata=dict(record.metadata),
        run_id=record.run_id,
        generation=record.generation,
    )


def objects(cluster: Cluster) -> dict[str, int]:
    """Objects in the state by kind: what retention bounds."""
    return {
        "workers": len(cluster.membership.members),
        "jobs": len(cluster.membership.job_generations),
        "datasets": len(cluster.datasets.specs),
        "plans": len(cluster.datasets.plans),
        "open_barriers": len(cluster.barriers.open),
        "barriers": len(cluster.barriers.ended),
        "checkpoints": len(cluster.checkpoints.records),
        "tasks": len(cluster.tasks.tasks),
        "recoveries": len(cluster.recoveries.records),
        "incidents": len(cluster.incidents.records),
        "values": len(cluster.values.durable),
        "hosts": len(cluster.quarantine.hosts) + len(cluster.drains.hosts) + len(cluster.health.hosts),
    }


SNAPSHOT_STEP, PEER_STEP = "snapshot_step", "peer_step"
"""Reported by workers: the newest step in their machine's memory, and the newest that a peer holds."""


def safety(
    cluster: Cluster, job: JobId, *, step: int | None, now_s: float, verified: Mapping[str, bool]
) -> Safety:
    """Where the checkpoints of a job's newest run are stored, as reported by its workers. `verified` holds verification results."""
    records = [
        r
        for r in cluster.checkpoints.records.values()
        if r.job_id == job and r.status == "completed" and not r.removed
    ]
    members = [cluster.membership.members[worker] for worker in cluster.membership.roster(job)]
    runs = [m.spec.run_id for m in members if m.spec.run_id] or [r.run_id for r in records[-1:]]
    records = [r for r in records if not runs or r.run_id in ("", runs[-1])]
    copies = [copy for record in records for copy in _stored_copies(cluster, record, verified)]
    newest = max(records, key=lambda r: r.ended_at_s or r.created_at_s, default=None)
    in_memory = _copies_in_memory(cluster, members, SNAPSHOT_STEP, "memory", now_s=now_s)
    in_memory += _copies_in_memory(cluster, members, PEER_STEP, "peer", now_s=now_s)
    # Copies in memory count only when they are newer than the newest stored checkpoint.
    copies += [copy for copy in in_memory if newest is None or copy.step > newest.step]
    reports = [cluster.membership.reports.get(m.spec.worker_id) for m in members]
    reached = [report.step for report in reports if report is not None]
    return safety_of(
        copies,
        reached=max([*reached, *(copy.step for copy in copies)], default=0),
        run=job,
        step=step,
    )


def _stored_copies(
    cluster: Cluster, record: CheckpointRecord, verified: Mapping[str, bool]
) -> Iterator[Copy]:
    """The copies of a checkpoint in each tier, without its image in memory, which later ones have overwritten."""
    member = cluster.membership.members.get(record.worker_id)
    host = record.metadata.get("host") or (member.spec.hostname if member is not None else "")
    durable = [tier for tier in record.tiers if kind_of(tier) not in ("memory", "peer")]
    for tier in durable:
        kind = kind_of(tier, is_on_network=record.metadata.get("disk") == "network")
        is_first = tier == durable[0]
        yield Copy(
            checkpoint_id=record.checkpoint_id,
            step=record.step,
            saved_at=record.ended_at_s or record.created_at_s,
            kind=kind,
            host=(host or f"host of {record.worker_id}") if kind == "disk" else "",
            where=record.path if is_first else tier,
            verified=verified.get(record.checkpoint_id) if is_first else None,
        )


def _copies_in_memory(
    cluster: Cluster, members: list[Member], name: str, kind: Literal["memory", "peer"], *, now_s: float
) -> list[Copy]:
    """The newest snapshot held by every machine that takes snapshots. Where the state is replicated each has all of it; otherwise each
    holds one part."""
    steps: dict[str, int] = {}
    racks: dict[str, str] = {}
    for member in members:
        report = cluster.membership.reports.get(member.spec.worker_id)
        value = report.metrics.get(name) if report is not None else None
        if value is not None and value >= 0:
            host = member.spec.hostname or member.spec.worker_id
            steps[host] = min(int(value), steps.get(host, int(value)))
            racks[host] = member.spec.metadata.get("rack", "")
    step = min(steps.values(), default=0)
    is_replicated = all(member.spec.metadata.get("state") == "replicated" for member in members)
    return [
        Copy(
            checkpoint_id=f"snapshot-{step}",
            step=step,
            saved_at=now_s,
            kind=kind,
            host=host if kind == "memory" else f"a peer of {host}",
            rack=racks[host] if kind == "memory" else "",
            part="" if is_replicated else host,
            parts=() if is_replicated else tuple(sorted(steps)),
        )
        for host in sorted(steps)
    ]


def audits(
    cluster: Cluster, dataset_id: DatasetId, *, job: JobId | None, epoch: int | None
) -> list[AuditView]:
    """One view per job and epoch that has trained the dataset, from the checkpoints completed so far; none before the first."""
    by_job: dict[JobId, list[Commit]] = {}
    for record in cluster.checkpoints.records.values():
        if record.status == "completed" and record.data_json and job in (None, record.job_id):
            commit = Commit(
                checkpoint_id=record.checkpoint_id,
                parent_id=record.parent_id or None,
                step=record.step,
                data=data_commit(record.data_json),
            )
            by_job.setdefault(record.job_id, []).append(commit)
    found = []
    for owner, commits in by_job.items():
        try:
            reports = audit_all(commits, dataset_id)
        except LedgerError:
            continue  # This job has not trained the dataset.
        if epoch is not None:
            reports = [
                replace(report, epoch=epoch, last_epoch=epoch)
                for report in reports
                if report.epoch <= epoch <= report.last_epoch
            ]
        found += [_audit(owner, report) for report in reports]
    if not found:
        cluster.datasets.get(dataset_id)  # Raises for an unknown dataset.
    return found


def _audit(job: JobId, report: AuditReport) -> AuditView:
    return AuditView(
        job_id=job,
        dataset_id=report.dataset,
        epoch=report.epoch,
        exact=report.exact,
        total=report.total,
        samples=report.samples,
        lost=report.lost.size,
        repeated=report.repeated.size,
        remaining=report.remaining.size,
        commits=len(report.commits),
        reason=report.reason,
    )


def barriers(cluster: Cluster, *, limit: int) -> Iterator[BarrierView]:
    """Waiting barriers first, then the latest that ended."""
    for barrier in cluster.barriers.open.values():
        job, name, step = barrier.key
        yield BarrierView(
            id=f"{job}/{name}@{step}#{barrier.round}",
            name=name,
            job_id=job,
            step=step,
            arrived=len(barrier.arrived),
            total=barrier.expected,
            status="waiting",
            created_at=barrier.opened.wall_s,
            ended_at=None,
            missing=[str(worker) for worker in missing_members(barrier, cluster.membership)],
            reason=f"{len(barrier.arrived)} of {barrier.expected} arrived",
        )
    for outcome in islice(reversed(cluster.barriers.ended.values()), limit):
        released = isinstance(outcome, BarrierReleased)
        yield BarrierView(
            id=f"{outcome.job_id}/{outcome.barrier_id}@{outcome.step}#{outcome.round}",
            name=outcome.barrier_id,
            job_id=outcome.job_id,
            step=outcome.step,
            arrived=len(outcome.arrived),
            total=len(outcome.arrived) if isinstance(outcome, BarrierReleased) else outcome.expected,
            status="complete" if released else "broken",
            created_at=outcome.opened_at_s,
            ended_at=outcome.at_s,
            missing=[] if isinstance(outcome, BarrierReleased) else list(outcome.missing),
            reason=outcome.reason,
        )


def recovery(record: RecoveryRecorded) -> RecoveryView:
    return RecoveryView(
        job_id=record.job_id,
        worker_id=record.worker_id,
        at=record.at_s,
        total_s=sum(record.phases_s.values()),
        phases_s=dict(record.phases_s),
        resumed_step=record.resumed_step,
        lost_steps=record.lost_steps,
        tier=record.tier,
        world_before=record.world_before,
        world_after=record.world_after,
        reason=record.reason,
        survived=record.survived,
        lost=list(record.lost),
        joined=list(record.joined),
        cause=record.cause,
        who_survived=who_survived(record),
    )


def find_plan(
    cluster: Cluster, dataset_id: DatasetId, *, job: JobId | None, epoch: int | None
) -> PlanKey | None:
    """The default plan of a dataset: of the job that reads it, and its newest epoch."""
    keys = [k for k in cluster.datasets.plans if k[1] == dataset_id]
    if job is not None:
        keys = [k for k in keys if k[0] == job]
    else:
        keys = [k for k in keys if reads(cluster, k[0], dataset_id)] or keys
    if epoch is not None:
        keys = [k for k in keys if k[2] == epoch]
    read = [k for k in keys if cluster.membership.roster(k[0])]
    return next(reversed(read or keys), None)
