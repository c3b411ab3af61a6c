"""The vocabulary of the core: identifiers, wishes (commands), facts (events) and refusals.

Commands are verbs and may be refused; events are past tense, already decided, and are what the journal keeps.
Everything is frozen and plain, so that any of it can be written down, compared and replayed. Wall-clock times
(`at_s`) are for people; only the monotonic half of `Instant` decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NewType

from strata.errors import StrataError

WorkerId = NewType("WorkerId", str)
JobId = NewType("JobId", str)
DatasetId = NewType("DatasetId", str)
CheckpointId = NewType("CheckpointId", str)
TaskId = NewType("TaskId", str)

DEFAULT_JOB = JobId("default")

CheckpointStatus = Literal["in_progress", "completed", "failed"]
TaskStatus = Literal["pending", "running", "completed", "failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A moment on both clocks: `mono_s` decides, `wall_s` is shown."""

    mono_s: float
    wall_s: float


# --- refusals: whose fault, and what to do next ---------------------------------------------------------------


class Refused(StrataError):
    """A command that changed nothing, and why."""

    code: ClassVar[str] = "refused"


class InvalidArgument(Refused):
    """The caller's values cannot be right, whatever the state."""

    code = "invalid_argument"

    def __init__(self, field_name: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field_name}: {message}", hint=hint)
        self.field_name = field_name


class Unknown(Refused):
    """The thing named does not exist here."""

    code = "not_found"

    def __init__(self, kind: str, name: str, *, hint: str = "") -> None:
        super().__init__(f"{kind} '{shorten(name)}' is not known here.", hint=hint)
        self.kind = kind
        self.name = name


class Conflict(Refused):
    """The thing exists already, and differs."""

    code = "conflict"


class Stale(Refused):
    """The caller speaks for an incarnation or generation that is over."""

    code = "stale"


class BarrierFailed(Refused):
    """The barrier ended without releasing anyone; `missing` names who did not come."""

    code = "barrier_broken"

    def __init__(self, message: str, *, missing: tuple[WorkerId, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class Overloaded(Refused):
    """A limit that protects everyone was reached; trying again later is right."""

    code = "overloaded"


def shorten(text: str, limit: int = 80) -> str:
    """Names come from callers: a message quotes at most `limit` characters of one."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


# --- values shared by commands and events ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """One file of a dataset and how many samples it holds."""

    path: str
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """What a dataset is; two registrations are the same when their specs are equal."""

    dataset_id: DatasetId
    path: str
    format: str
    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileSpan, ...] = field(default=(), compare=False)
    """In order, where the coordinator could see them; empty when only workers can."""

    @property
    def shard_count(self) -> int:
        return -(-self.total_samples // self.shard_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker says about itself when it registers."""

    worker_id: WorkerId
    job_id: JobId
    hostname: str
    port: int
    gpu_count: int
    memory_bytes: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    task_id: TaskId
    name: str
    type: str
    dataset_id: DatasetId | None
    worker_count: int
    config_json: str


# --- commands: wishes, in the imperative ----------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTask:
    spec: TaskSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTask:
    task_id: TaskId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvanceTask:
    """A launcher reports what became of a task."""

    task_id: TaskId
    status: TaskStatus
    worker_ids: tuple[WorkerId, ...]
    reason: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapValue:
    """Compare-and-swap; `expected_version` 0 expects no value."""

    key: str
    body: bytes
    expected_version: int


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
    | ArriveAtBarrier
    | NotifyCheckpoint
    | CreateTask
    | StopTask
    | AdvanceTask
    | ReportRecovery
    | SwapValue
    | PlanEpoch
    | Rebalance
    | Tick
)


# --- events: facts, in the past tense -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    spec: WorkerSpec
    registration_id: str
    incarnation: int
    generation: int
    superseded: int  # the incarnation this one fences, or 0
    reason: str
    at_s: float


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
class ShardsMoved:
    """A new version of one plan, as the difference to the version before."""

    job_id: JobId
    dataset_id: DatasetId
    epoch: int
    base_epoch: int  # the epoch whose plan this one starts from; -1: from nobody owning anything
    version: int
    workers: tuple[str, ...]
    moved: Mapping[str, list[int]]  # shard ids by the name of their new owner; '' is nobody
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierArrived:
    """Soft: an arrival is not journaled. After a restart of the coordinator workers arrive again."""

    job_id: JobId
    barrier_id: str
    step: int
    round: int
    generation: int
    worker_id: WorkerId
    call_id: str
    expected: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSwapped:
    key: str
    body: bytes
    version: int
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
    value_version: int
    reason: str
    at_s: float


Event = (
    CountersRestored
    | WorkerJoined
    | WorkerFailed
    | WorkerLeft
    | WorkerForgotten
    | DatasetRegistered
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
    | RecoveryRecorded
    | ValueSwapped
    | ValueDropped
)

SOFT_EVENTS = (BarrierArrived,)
"""Facts that a restart may forget: applied and shown, never journaled."""

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
class Swapped:
    """Whether the swap was made, and what stands there now (version 0: nothing)."""

    made: bool
    body: bytes
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Nothing more to say than yes, and why."""

    reason: str


Reply = Registered | DatasetAccepted | BarrierTicket | Swapped | Accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from a command: facts to make durable, and an answer for whoever asked."""

    events: tuple[Event, ...] = ()
    reply: Reply = Accepted(reason="nothing to do")
