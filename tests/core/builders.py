"""A small fleet to tell stories with: short verbs over one `Cluster`, its clock and its journal.

Nothing is replaced by a stand-in: every verb is a real command or observation, and `journal` holds what a coordinator
would have made durable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from strata.core import views
from strata.core.cluster import Cluster, Limits
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.fleet import task_views
from strata.core.fleet.barriers import BarrierLimits
from strata.core.fleet.membership import MembershipLimits
from strata.core.messages import (
    DEFAULT_JOB,
    SOFT_EVENTS,
    ArriveAtBarrier,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    BeginAttempt,
    CheckpointId,
    ClockResumed,
    Command,
    CreateTask,
    DatasetId,
    DatasetSpec,
    Decision,
    DeregisterWorker,
    EndAttempt,
    Event,
    ExitCause,
    Heartbeat,
    Instant,
    JobId,
    LoopStalled,
    NoteProgress,
    NotifyCheckpoint,
    Observation,
    PlanEpoch,
    ProgressReported,
    QueueTask,
    Rebalance,
    ReconcileCheckpoints,
    Reconciled,
    RegisterDataset,
    Registered,
    RegisterWorker,
    Report,
    RestartTask,
    ShardProgress,
    StopTask,
    TaskId,
    TaskSpec,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
    WorkerId,
    WorkerSpec,
)

WALL_OFFSET_S = 1_700_000_000.0
"""What the wall clock shows when the monotonic one stands at zero."""

NOTHING_TO_REPORT = Report(state="", step=0, epoch=0, task="", resources=None, metrics={})


def instant(mono_s: float) -> Instant:
    return Instant(mono_s=mono_s, wall_s=WALL_OFFSET_S + mono_s)


def limits(
    *,
    heartbeat_timeout_s: float = 30.0,
    disconnect_grace_s: float = 0.5,
    forget_failed_after_s: float = 3600.0,
    max_workers: int = 20_000,
    barrier_timeout_s: float = 1800.0,
    max_open: int = 10_000,
    ended_kept: int = 2_000,
    arrivals_kept: int = 200_000,
) -> Limits:
    return Limits(
        membership=MembershipLimits(
            heartbeat_timeout_s=heartbeat_timeout_s,
            disconnect_grace_s=disconnect_grace_s,
            forget_failed_after_s=forget_failed_after_s,
            max_workers=max_workers,
        ),
        barriers=BarrierLimits(
            timeout_s=barrier_timeout_s,
            max_open=max_open,
            ended_kept=ended_kept,
            arrivals_kept=arrivals_kept,
        ),
    )


def worker_spec(worker_id: str, job: str = DEFAULT_JOB, **fields: Any) -> WorkerSpec:
    spec = WorkerSpec(
        worker_id=WorkerId(worker_id),
        job_id=JobId(job),
        hostname="10.0.0.1",
        port=5000,
        gpu_count=1,
        memory_bytes=1 << 30,
    )
    return replace(spec, **fields)


def dataset_spec(dataset_id: str = "d", *, samples: int = 100, shard: int = 10, **fields: Any) -> DatasetSpec:
    spec = DatasetSpec(
        dataset_id=DatasetId(dataset_id),
        path=f"/data/{dataset_id}",
        format="jsonl",
        total_samples=samples,
        shard_size=shard,
        shuffle=False,
        seed=0,
    )
    return replace(spec, **fields)


def task_spec(task_id: str = "t", **fields: Any) -> TaskSpec:
    spec = TaskSpec(
        task_id=TaskId(task_id),
        name="train",
        type="training",
        dataset_id=None,
        worker_count=1,
        config_json="{}",
    )
    return replace(spec, **fields)


def notice(worker_id: str, checkpoint_id: str, step: int = 1, **fields: Any) -> NotifyCheckpoint:
    command = NotifyCheckpoint(
        worker_id=WorkerId(worker_id),
        incarnation=0,
        generation=0,
        job_id=JobId(""),
        checkpoint_id=CheckpointId(checkpoint_id),
        step=step,
        epoch=0,
        path=f"/checkpoints/{checkpoint_id}",
        size_bytes=1000,
        status="completed",
        tiers=("local",),
        digest="d1",
        duration_s=0.5,
        parent_id="",
        data_json="",
        reason="",
        metadata={},
    )
    return replace(command, **fields)


def arrival(worker_id: str, barrier_id: str = "b", **fields: Any) -> ArriveAtBarrier:
    command = ArriveAtBarrier(
        worker_id=WorkerId(worker_id),
        incarnation=0,
        generation=0,
        barrier_id=barrier_id,
        step=0,
        expected=0,
        call_id=f"{worker_id}-1",
        timeout_s=0.0,
    )
    return replace(command, **fields)


def trained(
    spans: Iterable[tuple[int, int]], *, dataset: str = "d", epoch: int = 0, total: int = 100
) -> DataCommit:
    """The data position of a checkpoint that has trained these samples."""
    record = RankRecord(dataset=dataset, epoch=epoch, total=total, rank=0)
    for start, stop in spans:
        record = record.with_span(start, stop)
    return DataCommit().next([record], world_size=1)


def data_json(commit: DataCommit) -> str:
    return json.dumps(commit.to_json())


class Fleet:
    """One cluster, the time, and everything that became durable."""

    def __init__(self, limits: Limits | None = None, *, snapshot: Iterable[Event] = ()) -> None:
        self.limits = limits
        self.cluster = Cluster(limits)
        self.now_s = 1000.0
        self.journal: list[Event] = list(snapshot)
        for event in self.journal:
            self.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))

    def do(self, command: Command) -> Decision:
        decision = self.cluster.handle(command, self.now)
        self.journal += [event for event in decision.events if not isinstance(event, SOFT_EVENTS)]
        return decision

    def observe(self, observation: Observation) -> None:
        self.cluster.observe(observation, self.now)

    @property
    def now(self) -> Instant:
        return instant(self.now_s)

    # --- workers --------------------------------------------------------------------------------------------

    def join(self, worker_id: str, job: str = DEFAULT_JOB, *, registration: str = "", **fields: Any) -> int:
        """Register; the incarnation."""
        command = RegisterWorker(spec=worker_spec(worker_id, job, **fields), registration_id=registration)
        return cast(Registered, self.do(command).reply).incarnation

    def joins(self, *worker_ids: str, job: str = DEFAULT_JOB) -> list[int]:
        return [self.join(worker_id, job) for worker_id in worker_ids]

    def leave(self, worker_id: str, *, incarnation: int = 0, reason: str = "") -> Decision:
        return self.do(
            DeregisterWorker(worker_id=WorkerId(worker_id), incarnation=incarnation, reason=reason)
        )

    def connect(self, worker_id: str) -> None:
        self.observe(WorkerConnected(worker_id=WorkerId(worker_id), incarnation=0))

    def drop(self, worker_id: str, *, incarnation: int | None = None) -> None:
        """Its stream ends without a goodbye: that of its present incarnation, or of the one named."""
        if incarnation is None:
            incarnation = self.cluster.membership.members[WorkerId(worker_id)].incarnation
        self.observe(WorkerDisconnected(worker_id=WorkerId(worker_id), incarnation=incarnation))

    def beat(self, *worker_ids: str, report: Report | None = None) -> None:
        """They are alive, and report this, or what they reported last."""
        for worker in map(WorkerId, worker_ids):
            said = report or self.cluster.membership.reports.get(worker, NOTHING_TO_REPORT)
            self.observe(Heartbeat(worker_id=worker, incarnation=0, report=said))

    def stall(self, stall_s: float) -> None:
        self.observe(LoopStalled(stall_s=stall_s))

    def lose(self, worker_id: str) -> Decision:
        """Its stream ends and the grace passes; all others stay connected."""
        self.drop(worker_id)
        self.now_s += self.cluster.membership.limits.disconnect_grace_s
        self.beat(*(w for w in self.cluster.membership.pulses if w != worker_id))
        return self.tick()

    def tick(self, seconds: float = 0.0) -> Decision:
        self.now_s += seconds
        return self.do(Tick())

    def generation(self, job: str = DEFAULT_JOB) -> int:
        return self.cluster.membership.job_generations[JobId(job)]

    def ranks(self, job: str = DEFAULT_JOB) -> dict[str, int]:
        return {str(worker): rank for worker, rank in self.cluster.membership.roster(JobId(job)).items()}

    # --- barriers -------------------------------------------------------------------------------------------

    def arrive(self, worker_id: str, barrier_id: str = "b", **fields: Any) -> tuple[BarrierTicket, Decision]:
        decision = self.do(arrival(worker_id, barrier_id, **fields))
        return cast(BarrierTicket, decision.reply), decision

    # --- data -----------------------------------------------------------------------------------------------

    def register(self, dataset_id: str = "d", **fields: Any) -> Decision:
        return self.do(RegisterDataset(spec=dataset_spec(dataset_id, **fields)))

    def plan(self) -> Decision:
        return self.do(Rebalance())

    def open_epoch(self, worker_id: str, epoch: int, dataset_id: str = "d") -> Decision:
        return self.do(
            PlanEpoch(
                worker_id=WorkerId(worker_id),
                incarnation=0,
                generation=0,
                dataset_id=DatasetId(dataset_id),
                epoch=epoch,
            )
        )

    def report(self, worker_id: str, *shards: tuple[int, int], epoch: int = 0, dataset_id: str = "d") -> None:
        """How many samples of each shard it has read."""
        items = tuple(ShardProgress(DatasetId(dataset_id), epoch, shard, done) for shard, done in shards)
        self.observe(
            ProgressReported(worker_id=WorkerId(worker_id), incarnation=0, generation=0, shards=items)
        )

    def owners(self, dataset_id: str = "d", epoch: int = 0, job: str = DEFAULT_JOB) -> dict[int, str | None]:
        view = views.shard_plan(self.cluster, (JobId(job), DatasetId(dataset_id), epoch))
        return {shard.id: shard.worker_id for shard in view.shards}

    # --- checkpoints and tasks ------------------------------------------------------------------------------

    def save(self, worker_id: str, checkpoint_id: str, step: int = 1, **fields: Any) -> Decision:
        return self.do(notice(worker_id, checkpoint_id, step, **fields))

    def reconcile(
        self,
        worker_id: str,
        *present: str,
        run_id: str = "",
        run_generation: int = 0,
        revision: int | None = None,
    ) -> tuple[Reconciled, Decision]:
        """For the present revision of the registry, or the one named."""
        decision = self.do(
            ReconcileCheckpoints(
                worker_id=WorkerId(worker_id),
                incarnation=0,
                job_id=JobId(""),
                run_id=run_id,
                run_generation=run_generation,
                present=tuple(CheckpointId(checkpoint_id) for checkpoint_id in present),
                revision=self.cluster.checkpoints.revision if revision is None else revision,
            )
        )
        return cast(Reconciled, decision.reply), decision

    def latest(self, job: str = DEFAULT_JOB) -> str | None:
        record = self.cluster.checkpoints.latest(JobId(job))
        return record.checkpoint_id if record is not None else None

    def create_task(self, task_id: str = "t", **fields: Any) -> Decision:
        return self.do(CreateTask(spec=task_spec(task_id, **fields)))

    def stop_task(self, task_id: str = "t", reason: str = "") -> Decision:
        return self.do(StopTask(task_id=TaskId(task_id), reason=reason))

    def restart_task(self, task_id: str = "t", reason: str = "") -> Decision:
        return self.do(RestartTask(task_id=TaskId(task_id), reason=reason))

    def queue_task(self, reason: str, task_id: str = "t") -> Decision:
        return self.do(QueueTask(task_id=TaskId(task_id), reason=reason))

    def begin(self, task_id: str = "t") -> Decision:
        return self.do(BeginAttempt(task_id=TaskId(task_id), reason="the launcher takes it"))

    def end(
        self, task_id: str = "t", *, cause: ExitCause | None = None, attempt: int | None = None
    ) -> Decision:
        """The running attempt is over, or the one named."""
        if attempt is None:
            attempt = self.cluster.tasks.get(TaskId(task_id)).attempt
        return self.do(EndAttempt(task_id=TaskId(task_id), attempt=attempt, cause=cause))

    def progress(
        self, step: int, total: int = 100, task_id: str = "t", workers: Iterable[str] = ("a",)
    ) -> Decision:
        return self.do(
            NoteProgress(
                task_id=TaskId(task_id),
                attempt=self.cluster.tasks.get(TaskId(task_id)).attempt,
                worker_ids=tuple(WorkerId(worker) for worker in workers),
                step=step,
                total_steps=total,
            )
        )

    # --- restarts -------------------------------------------------------------------------------------------

    def replayed(self) -> Fleet:
        """What a coordinator killed now would be after its restart, from every event."""
        return self._restarted(self.journal)

    def compacted(self) -> Fleet:
        """The same, from a snapshot alone."""
        return self._restarted(self.cluster.compact())

    def _restarted(self, history: Iterable[Event]) -> Fleet:
        fleet = Fleet(self.limits, snapshot=history)
        fleet.now_s = self.now_s
        fleet.observe(ClockResumed())
        return fleet


def shown(cluster: Cluster) -> Mapping[str, Any]:
    """Everything people can see of the durable state."""
    return {
        "generation": cluster.membership.generation,
        "incarnation": cluster.membership.incarnation,
        "jobs": dict(cluster.membership.job_generations),
        "ranks": {job: dict(cluster.membership.roster(job)) for job in cluster.membership.jobs()},
        "workers": [
            # A worker's last heartbeat is soft, and so is what it reported.
            replace(
                view, last_heartbeat=0.0, current_step=0, current_epoch=0, current_task=None, resources=None
            )
            for view in views.workers(cluster)
        ],
        "datasets": [views.dataset(cluster, spec) for spec in cluster.datasets.specs.values()],
        "plans": [
            replace(plan, shards=[replace(shard, reported=0) for shard in plan.shards])
            for plan in (views.shard_plan(cluster, key) for key in cluster.datasets.plans)
        ],
        "checkpoints": [views.checkpoint(record) for record in cluster.checkpoints.shown()],
        "latest": {job: cluster.checkpoints.latest(job) for job in cluster.membership.jobs()},
        "barriers": [b for b in views.barriers(cluster, limit=1000) if b.status != "waiting"],
        "tasks": [task_views.task(task, {}) for task in cluster.tasks.tasks.values()],
    }


def released(decision: Decision) -> BarrierReleased | None:
    ends = [event for event in decision.events if isinstance(event, BarrierReleased)]
    assert len(ends) <= 1
    return ends[0] if ends else None


def broken(decision: Decision) -> BarrierBroken:
    (end,) = [event for event in decision.events if isinstance(event, BarrierBroken)]
    return end


def waiting(fleet: Fleet) -> list[tuple[str, int, int]]:
    return [(b.name, b.arrived, b.total) for b in views.barriers(fleet.cluster, limit=0)]
