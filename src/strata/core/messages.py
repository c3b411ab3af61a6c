"""The vocabulary of the core: commands, observations, events, replies and refusals, all from one place.

Commands are verbs and may be refused; events are past tense, already decided, and are what the journal keeps.
Observations are past tense too: what a shell has noticed, soft, kept in memory and in no journal.
Everything is frozen and plain, so that any of it can be written down, compared and replayed. Wall-clock times
(`at_s`) are for people; only the monotonic half of `Instant` decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from strata.core.events import (
    SOFT_EVENTS,
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRemoved,
    CheckpointStarted,
    CountersRestored,
    DatasetRegistered,
    DatasetRemoved,
    Event,
    HandoverRecorded,
    HostCleared,
    HostDrained,
    HostDrainStarted,
    HostExamined,
    HostQuarantined,
    HostUndrained,
    IncidentClosed,
    IncidentReported,
    RecordsForgotten,
    RecoveryRecorded,
    ShardsMoved,
    TaskChanged,
    TaskCreated,
    TaskProgressed,
    ValueDropped,
    ValueRefreshed,
    ValueSwapped,
    VersionsReserved,
    WorkerFailed,
    WorkerForgotten,
    WorkerJoined,
    WorkerLeft,
)
from strata.core.faults.failures import Failure
from strata.core.refusals import (
    Cause,
    Conflict,
    InvalidArgument,
    NameInUse,
    Overloaded,
    Refused,
    Stale,
    Unknown,
    UnknownWorker,
    shorten,
)
from strata.core.types import (
    DEFAULT_JOB,
    CheckpointId,
    CheckpointStatus,
    DatasetId,
    DatasetSpec,
    ExitCause,
    FileSpan,
    Gpu,
    Instant,
    JobId,
    Report,
    Resources,
    TaskId,
    TaskSpec,
    TaskStatus,
    WorkerId,
    WorkerSpec,
)

__all__ = [
    "DEFAULT_JOB",
    "SOFT_EVENTS",
    "Accepted",
    "AgentConnected",
    "AgentDisconnected",
    "ArriveAtBarrier",
    "ArriveTogether",
    "BarrierArrived",
    "BarrierBroken",
    "BarrierReleased",
    "BarrierTicket",
    "BarrierTickets",
    "BeginAttempt",
    "CancelDrain",
    "Cause",
    "CheckpointCompleted",
    "CheckpointFailed",
    "CheckpointId",
    "CheckpointRemoved",
    "CheckpointStarted",
    "CheckpointStatus",
    "ClearHost",
    "ClockResumed",
    "Command",
    "Conflict",
    "CountersRestored",
    "CreateTask",
    "DatasetAccepted",
    "DatasetId",
    "DatasetRegistered",
    "DatasetRemoved",
    "DatasetSpec",
    "Decision",
    "DeregisterWorker",
    "DrainHost",
    "EndAttempt",
    "EndHang",
    "Event",
    "ExitCause",
    "FileSpan",
    "FoldedBeat",
    "Gpu",
    "HandoverRecorded",
    "Heartbeat",
    "HeartbeatsFolded",
    "HostCleared",
    "HostDrainStarted",
    "HostDrained",
    "HostExamined",
    "HostQuarantined",
    "HostUndrained",
    "IncidentClosed",
    "IncidentReported",
    "Instant",
    "InvalidArgument",
    "JobId",
    "LoopStalled",
    "NameInUse",
    "NoteProgress",
    "NoteWhereabouts",
    "NotifyCheckpoint",
    "Observation",
    "Overloaded",
    "PlanEpoch",
    "ProgressReported",
    "QuarantineHost",
    "QueueTask",
    "Rebalance",
    "ReconcileCheckpoints",
    "Reconciled",
    "RecordsForgotten",
    "RecoveryRecorded",
    "Refused",
    "RegisterDataset",
    "RegisterWorker",
    "Registered",
    "RemoveDataset",
    "Reply",
    "Report",
    "ReportFailure",
    "ReportHandover",
    "ReportHealth",
    "ReportRecovery",
    "ReportSlow",
    "Resources",
    "RestartTask",
    "ShardProgress",
    "ShardsMoved",
    "ShardsRequested",
    "Stale",
    "StopTask",
    "StragglersMarked",
    "SwapValue",
    "Swapped",
    "TaskChanged",
    "TaskCreated",
    "TaskId",
    "TaskProgressed",
    "TaskSpec",
    "TaskStatus",
    "Tick",
    "Unknown",
    "UnknownWorker",
    "ValueDropped",
    "ValueRefreshed",
    "ValueSwapped",
    "VersionsReserved",
    "WorkerConnected",
    "WorkerDisconnected",
    "WorkerFailed",
    "WorkerForgotten",
    "WorkerId",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerSpec",
    "shorten",
]

# --- commands: requests, in the imperative --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterWorker:
    spec: WorkerSpec
    registration_id: str  # a retried call repeats it and is the same incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeregisterWorker:
    worker_id: WorkerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterDataset:
    spec: DatasetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDataset:
    dataset_id: DatasetId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArriveAtBarrier:
    worker_id: WorkerId
    incarnation: int
    generation: int
    barrier_id: str
    step: int
    expected: int
    call_id: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArriveTogether:
    """Arrivals of several workers of one machine. Each is accepted or refused for itself: see `BarrierTickets`."""

    arrivals: tuple[ArriveAtBarrier, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyCheckpoint:
    worker_id: WorkerId
    incarnation: int
    generation: int
    job_id: JobId
    checkpoint_id: CheckpointId
    step: int
    epoch: int
    path: str
    size_bytes: int
    status: Literal["in_progress", "completed", "failed", "removed"]
    tiers: tuple[str, ...]
    digest: str
    duration_s: float
    parent_id: str
    data_json: str
    reason: str
    metadata: Mapping[str, str]
    run_id: str = ""
    run_generation: int = 0
    """Of the run, and of the caller that says so; `generation` is that of the coordinator's members."""
    saved_generation: int | None = None
    """The run's generation that saved it, where that was an earlier one than the one that says so."""
    succeeded_by: str = ""
    """A newer checkpoint, where this one is reported late, from its manifest; else it is the newest."""

    @property
    def is_by_agent(self) -> bool:
        """Said by the agent of a machine, whose workers have died: it is no worker, and has no incarnation."""
        return not self.incarnation and self.metadata.get(SAVED_BY) == AGENT


SAVED_BY, AGENT = "saved_by", "agent"
"""In the metadata of a checkpoint that the agent of a machine has uploaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileCheckpoints:
    """Which checkpoints of its run exist, and no others do. It counts only if the registry is still at
    `revision`: a copy of the call that arrives late must not undo what was said after it."""

    worker_id: WorkerId
    incarnation: int
    job_id: JobId
    run_id: str
    run_generation: int
    present: tuple[CheckpointId, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTask:
    spec: TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTask:
    task_id: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTask:
    """Run a failed or stopped task again, from its latest intact checkpoint."""

    task_id: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTask:
    """Why a pending task still waits."""

    task_id: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAttempt:
    """A launcher is about to start a pending task. The attempt is durable before its processes exist."""

    task_id: TaskId
    reason: str
    where: str = ""  # the one coordinator whose launcher can see it; empty: any can


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """An attempt is over and nothing of it is left; without a cause it ended well."""

    task_id: TaskId
    attempt: int
    cause: ExitCause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteWhereabouts:
    """Who looks after a running attempt now, or that no coordinator can for the moment."""

    task_id: TaskId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteProgress:
    """How far the workers of a running attempt say they have come."""

    task_id: TaskId
    attempt: int
    worker_ids: tuple[WorkerId, ...]
    step: int
    total_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRecovery:
    worker_id: WorkerId
    incarnation: int
    phases_s: Mapping[str, float]
    resumed_step: int
    lost_steps: int
    tier: str
    world_before: int
    world_after: int
    reason: str
    survived: int = 0
    lost: tuple[WorkerId, ...] = ()
    joined: tuple[WorkerId, ...] = ()
    cause: str = ""
    hosts: tuple[str, ...] = ()
    """The machines that the run continued on; empty where the worker does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFailure:
    """How workers of one machine ended, and what its agent does about it; or that a worker hangs, said by itself."""

    failures: tuple[Failure, ...]
    launch: str
    """The rendezvous id under which they were launched."""
    job_id: JobId | None
    """Whose they are; None: of the job that has registered them, else the launch's."""
    decision: Literal["restart", "stop", "continue"]
    """To continue is what becomes of workers that hang and are not ended."""
    reason: str
    quarantine: bool = False
    """The policy of the run takes the machine out of use, if it was a device of it that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineHost:
    """Take a machine out of use."""

    host: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearHost:
    """Let it be used again."""

    host: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainHost:
    """A machine is to go, or will: let its agents save and leave before that."""

    host: str
    within_s: float
    reason: str
    by: str
    agents: int
    """How many of its agents take part in runs now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelDrain:
    """Let it be used again."""

    host: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHandover:
    """The agent of a machine that goes leaves its run."""

    host: str
    node: str
    """The agent's name."""
    launch: str
    job_id: JobId | None
    saved_step: int | None
    lost_steps: int | None
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportHealth:
    """What a machine has measured of itself."""

    host: str
    kind: str
    """Of its devices: machines are compared with those of the same kind."""
    measured: Mapping[str, float]
    failed: Mapping[str, str]
    clock_s: float
    """What its clock showed when it reported this."""
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSlow:
    """The others of a job wait for this worker, or no longer do."""

    job_id: JobId
    worker_id: WorkerId
    slow: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndHang:
    """A job whose workers hung makes steps again."""

    job_id: JobId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapValue:
    """Compare-and-swap; `expected_version` 0 expects no value. What is `soft` is not journaled: a restart forgets it."""

    key: str
    body: bytes
    expected_version: int
    soft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEpoch:
    """A worker is about to read an epoch that has no plan yet."""

    worker_id: WorkerId
    incarnation: int
    generation: int
    dataset_id: DatasetId
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Bring every shard plan in line with its members. Given once per batch, so that a burst of joins is one plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: look for silent workers and overdue barriers."""


Command = (
    RegisterWorker
    | DeregisterWorker
    | RegisterDataset
    | RemoveDataset
    | ArriveAtBarrier
    | ArriveTogether
    | NotifyCheckpoint
    | ReconcileCheckpoints
    | CreateTask
    | StopTask
    | RestartTask
    | QueueTask
    | BeginAttempt
    | EndAttempt
    | NoteProgress
    | NoteWhereabouts
    | ReportRecovery
    | ReportFailure
    | ReportSlow
    | EndHang
    | QuarantineHost
    | ClearHost
    | DrainHost
    | CancelDrain
    | ReportHandover
    | ReportHealth
    | SwapValue
    | PlanEpoch
    | Rebalance
    | Tick
)


# --- observations: soft, in the past tense ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker is alive, and this is what it says about itself."""

    worker_id: WorkerId
    incarnation: int
    report: Report


class FoldedBeat(NamedTuple):
    """One worker of a folded heartbeat. Without a report it has nothing new to say; one is read when it is looked at."""

    worker_id: WorkerId
    incarnation: int
    report: Callable[[], Report] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatsFolded:
    """These workers of one machine are alive. Who is no longer a member is left out: it is notified of that otherwise."""

    beats: tuple[FoldedBeat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConnected:
    """A worker's stream is open."""

    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDisconnected:
    """A worker's stream ended without a goodbye."""

    worker_id: WorkerId
    incarnation: int


class ShardProgress(NamedTuple):
    """How many samples of a shard its reader has read."""

    dataset_id: DatasetId
    epoch: int
    shard_id: int
    samples_done: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReported:
    """How far a worker has read its shards, beyond what a checkpoint has committed."""

    worker_id: WorkerId
    incarnation: int
    generation: int
    shards: tuple[ShardProgress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsRequested:
    """A worker of this job has asked which shards it reads: the job reads this dataset shard by shard."""

    job_id: JobId
    dataset_id: DatasetId


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglersMarked:
    """Why, for every worker that the others of its job wait for now; those not named are not slow."""

    reasons: Mapping[WorkerId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """An agent of the rendezvous under `key` has opened a stream."""

    key: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """A stream of an agent has ended."""

    key: str
    node: str
    said_goodbye: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStalled:
    """For so long the coordinator may have read no messages."""

    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockResumed:
    """The journal has been replayed, which knows no time: every time-out starts anew."""


Observation = (
    Heartbeat
    | HeartbeatsFolded
    | WorkerConnected
    | WorkerDisconnected
    | ProgressReported
    | ShardsRequested
    | StragglersMarked
    | AgentConnected
    | AgentDisconnected
    | LoopStalled
    | ClockResumed
)


# --- replies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    worker_id: WorkerId
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetAccepted:
    spec: DatasetSpec
    created: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierTicket:
    """Where an arrival stands: which round of the barrier it is in, and its end if it has one already."""

    job_id: JobId
    barrier_id: str
    step: int
    round: int
    order: int
    outcome: BarrierReleased | BarrierBroken | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierTickets:
    """For each of the arrivals, in their order."""

    tickets: tuple[BarrierTicket | Refused, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """Whether the swap was made, and what is stored now (version 0: nothing)."""

    made: bool
    body: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """Whether it counted, how many were found to be removed, and which of those that exist the registry cannot describe."""

    made: bool
    revision: int
    removed: int
    unknown: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Nothing more to say than yes, and why."""

    reason: str


Reply = Registered | DatasetAccepted | BarrierTicket | BarrierTickets | Swapped | Reconciled | Accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from a command: facts to make durable, and an answer for the caller."""

    events: tuple[Event, ...] = ()
    reply: Reply = Accepted(reason="nothing to do")
