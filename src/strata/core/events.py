"""Facts, in the past tense: already decided, and what the journal keeps.

Wall-clock times (`at_s`) are for people; nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from strata.core.faults.failures import Failure, FailureClass
from strata.core.types import (
    CheckpointId,
    DatasetId,
    DatasetSpec,
    ExitCause,
    Instant,
    JobId,
    TaskId,
    TaskSpec,
    TaskStatus,
    WorkerId,
    WorkerSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    spec: WorkerSpec
    registration_id: str
    incarnation: int
    generation: int
    superseded: int  # the incarnation this one fences, or 0
    reason: str
    at_s: float
    former: tuple[str, ...] = ()  # earlier registrations of this worker: none of them can come back
    origin: int = 0  # the first incarnation by this very registration; 0: this one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    worker_id: WorkerId
    job_id: JobId
    incarnation: int
    generation: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    worker_id: WorkerId
    job_id: JobId
    incarnation: int
    generation: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForgotten:
    """A failed worker that never came back has left the list."""

    worker_id: WorkerId
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRegistered:
    spec: DatasetSpec
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRemoved:
    dataset_id: DatasetId
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsMoved:
    """A new version of one plan, as the difference to the version before."""

    job_id: JobId
    dataset_id: DatasetId
    epoch: int
    base_epoch: int  # the epoch whose plan this one starts from; -1: from no worker owning anything
    version: int
    workers: tuple[str, ...]
    moved: Mapping[str, list[int]]  # shard ids by the name of their new owner; '' is no worker
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierArrived:
    """Soft: an arrival is not journaled. After a restart of the coordinator workers arrive again."""

    job_id: JobId
    barrier_id: str
    step: int
    round: int
    generation: int  # the one the barrier is bound to; 0: none
    worker_id: WorkerId
    call_id: str
    expected: int
    last_seat: int | None  # for a barrier of everyone: the newest seat when it opened
    deadline_mono_s: float
    opened: Instant
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReleased:
    job_id: JobId
    barrier_id: str
    step: int
    round: int
    generation: int
    arrived: tuple[WorkerId, ...]  # in order of arrival
    call_ids: tuple[str, ...]  # beside `arrived`: how a retry is known again
    opened_at_s: float
    waited_s: float
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierBroken:
    job_id: JobId
    barrier_id: str
    step: int
    round: int
    generation: int
    arrived: tuple[WorkerId, ...]
    call_ids: tuple[str, ...]
    missing: tuple[WorkerId, ...]
    expected: int
    opened_at_s: float
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStarted:
    checkpoint_id: CheckpointId
    job_id: JobId
    worker_id: WorkerId
    step: int
    epoch: int
    path: str
    size_bytes: int
    reason: str
    at_s: float
    run_id: str = ""
    generation: int = 0  # of the run, not of the coordinator's members


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCompleted:
    checkpoint_id: CheckpointId
    job_id: JobId
    worker_id: WorkerId
    step: int
    epoch: int
    path: str
    size_bytes: int
    tiers: tuple[str, ...]
    digest: str
    duration_s: float
    parent_id: str
    data_json: str
    metadata: Mapping[str, str]
    reason: str
    at_s: float
    run_id: str = ""
    generation: int = 0
    told_in: int = 0  # the generation that said so, where a later one did than the one that saved it
    succeeded_by: str = ""  # a newer checkpoint, where this one was reported late; else it is the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed:
    checkpoint_id: CheckpointId
    job_id: JobId
    worker_id: WorkerId
    step: int
    epoch: int
    path: str
    reason: str
    at_s: float
    run_id: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRemoved:
    checkpoint_id: CheckpointId
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCreated:
    spec: TaskSpec
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanged:
    task_id: TaskId
    status: TaskStatus
    worker_ids: tuple[WorkerId, ...]
    reason: str
    at_s: float
    attempt: int = 0  # the latest one; 0 while there was none
    failures: int = 0  # attempts that failed since a user last asked for the task to run
    stopping: bool = False  # asked to stop; its processes are on their way out
    cause: ExitCause | None = None  # of the latest attempt that failed
    where: str = ""  # the one coordinator whose launcher can see the latest attempt; empty: any can


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProgressed:
    task_id: TaskId
    attempt: int
    worker_ids: tuple[WorkerId, ...]
    step: int
    total_steps: int  # 0: not known
    steps_per_s: float  # smoothed; 0.0: not known yet
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecorded:
    job_id: JobId
    worker_id: WorkerId
    phases_s: Mapping[str, float]
    resumed_step: int
    lost_steps: int
    tier: str
    world_before: int
    world_after: int
    reason: str
    at_s: float
    survived: int = 0  # processes that were there before and after; 0: all are new, or it is not known
    lost: tuple[WorkerId, ...] = ()
    joined: tuple[
        WorkerId, ...
    ] = ()  # new processes beside those that survived; those among the lost are replaced
    cause: str = ""  # why the set of ranks changed


IncidentSubject = Literal["run", "save", "slow_rank", "quarantine"]
Outcome = Literal["recovered", "stopped", "failed_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentReported:
    """A failure, as it is known now. Another with the same id says more about the same one, in place of what was known."""

    incident_id: int
    job_id: JobId
    launch: str
    subject: IncidentSubject
    failure_class: FailureClass
    fingerprint: str
    first: Failure | None  # who failed first
    failures: tuple[Failure, ...]
    what: str
    decision: str  # restart, stop, continue
    reason: str  # why that was decided
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClosed:
    incident_id: int
    job_id: JobId
    outcome: Outcome
    reason: str
    at_s: float
    phases_s: Mapping[str, float] = field(default_factory=dict)
    resumed_step: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    lost_gpu_s: float | None = None
    saved_steps: int | None = (
        None  # which a restart from the newest durable checkpoint would have trained again
    )
    saved_gpu_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuarantined:
    """A machine is out of use: its agents are refused, and those that take part leave."""

    host: str
    by: str  # a person, or the policy of a run
    job_id: JobId | None  # the run whose failure led to it
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCleared:
    """It may be used again."""

    host: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDrainStarted:
    """A machine is about to go: its agents are refused, and those that take part save and leave before the deadline. Another one
    about the same machine is in place of this."""

    host: str
    by: str  # a person, or the cloud that has announced it
    deadline_s: float  # Unix seconds
    agents: int  # that took part in runs then
    jobs: tuple[JobId, ...]  # that had workers there
    reason: str
    at_s: float
    left: tuple[str, ...] = ()  # agents that have left since; part of a compacted history


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverRecorded:
    """What became of a run whose machine goes, as it is known now."""

    host: str
    job_id: JobId
    node: str  # the agent that has left; empty where those who continued say it
    saved_step: int | None
    lost_steps: int | None  # None: not known, or not yet
    where: str  # durable, memory, nothing
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDrained:
    """Its agents have left, or the deadline has passed."""

    host: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUndrained:
    """It may be used again."""

    host: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExamined:
    """What a machine has measured of itself before it joined, or after a failure. The newest of each is kept."""

    host: str
    kind: str  # of its devices
    measured: Mapping[str, float]
    failed: Mapping[str, str]  # checks that failed, and why
    seconds: float
    reason: str  # when it was done
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsForgotten:
    """What can no longer be used, and is old enough."""

    tasks: tuple[TaskId, ...]
    checkpoints: tuple[CheckpointId, ...]
    barriers: int  # the oldest so many that have ended
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSwapped:
    key: str
    body: bytes
    version: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRefreshed:
    """Soft: a value that its writer can write again. Its version is within those that are reserved."""

    key: str
    body: bytes
    version: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsReserved:
    """Versions up to `last` may be given out without being written down; after a restart none of them is given again."""

    last: int
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDropped:
    key: str
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersRestored:
    """Part of a compacted history: numbers that must never be given out twice."""

    generation: int
    incarnation: int
    jobs: Mapping[JobId, int]  # the present generation of each
    value_version: int
    soft_value_version: int = 0
    reason: str
    at_s: float
    runs: tuple[tuple[JobId, str, int], ...] = ()  # job, run id, and the newest generation known
    checkpoint_revision: int = 0
    changes: Mapping[JobId, int] = field(default_factory=dict)  # of the members of each job, counted
    departed: Mapping[WorkerId, tuple[str, ...]] = field(default_factory=dict)  # how those had registered


Event = (
    CountersRestored
    | WorkerJoined
    | WorkerFailed
    | WorkerLeft
    | WorkerForgotten
    | DatasetRegistered
    | DatasetRemoved
    | ShardsMoved
    | BarrierArrived
    | BarrierReleased
    | BarrierBroken
    | CheckpointStarted
    | CheckpointCompleted
    | CheckpointFailed
    | CheckpointRemoved
    | TaskCreated
    | TaskChanged
    | TaskProgressed
    | RecoveryRecorded
    | IncidentReported
    | IncidentClosed
    | HostQuarantined
    | HostCleared
    | HostDrainStarted
    | HandoverRecorded
    | HostDrained
    | HostUndrained
    | HostExamined
    | RecordsForgotten
    | ValueSwapped
    | ValueRefreshed
    | VersionsReserved
    | ValueDropped
)

SOFT_EVENTS = (BarrierArrived, ValueRefreshed)
"""Facts that a restart may forget: applied and shown, never journaled."""
