"""The nouns that commands and events share: identifiers, timestamps, and what a worker, dataset or task is.

Frozen and plain, so that any of it can be written down, compared and replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType, get_args

WorkerId = NewType("WorkerId", str)
JobId = NewType("JobId", str)
DatasetId = NewType("DatasetId", str)
CheckpointId = NewType("CheckpointId", str)
TaskId = NewType("TaskId", str)

DEFAULT_JOB = JobId("default")

CheckpointStatus = Literal["in_progress", "completed", "failed"]
TaskStatus = Literal["pending", "running", "completed", "failed", "stopped"]
WorkerState = Literal[
    "active", "idle", "training", "checkpointing", "recovering", "failed", "initializing", "loading"
]
WORKER_STATES = get_args(WorkerState)
CauseKind = Literal["exit", "signal", "exception", "oom", "lost", "launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """A point in time on both clocks: `mono_s` decides, `wall_s` is shown."""

    mono_s: float
    wall_s: float


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
    jobs: tuple[JobId, ...] = field(default=(), compare=False)
    """Whose it is: only these jobs see it and read it. Empty: everybody's."""

    def is_for(self, job: JobId) -> bool:
        return not self.jobs or job in self.jobs

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
    run_id: str = ""
    """Of the run it trains, for one that has an identity; two runs cannot be live under one job name."""
    run_generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    task_id: TaskId
    name: str
    type: str
    dataset_id: DatasetId | None
    worker_count: int
    config_json: str
    gpus_per_worker: int = 0
    max_retries: int = 3
    """How many attempts may fail before the task has; each continues from the latest good checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCause:
    """Why an attempt at a task failed: the first failure, not the ones that followed from it."""

    kind: CauseKind
    message: str
    """One line for people: 'rank 1 was killed by SIGSEGV', 'ValueError: ...'."""
    rank: int | None = None
    exit_code: int | None = None
    signal: str = ""
    """SIGKILL, SIGSEGV, ...; empty when no signal was the cause."""
    traceback: str = ""
    may_retry: bool = True
    """False where another attempt must end the same way, such as a configuration that is refused."""


# What a heartbeat says is not frozen, though no code changes it: freezing was a quarter of the cost of taking one in.
@dataclass(slots=True, kw_only=True)
class Gpu:
    index: int
    utilization_percent: float
    memory_used_bytes: int
    memory_total_bytes: int


@dataclass(slots=True, kw_only=True)
class Resources:
    """One sample of what a worker's process and machine use. Bytes of disk and network are totals since start."""

    cpu_percent: float
    memory_used_bytes: int
    gpus: tuple[Gpu, ...]
    disk_read_bytes: int
    disk_write_bytes: int
    network_rx_bytes: int
    network_tx_bytes: int


@dataclass(slots=True, kw_only=True)
class Report:
    """What a worker last said about itself."""

    state: str
    step: int
    epoch: int
    task: str
    resources: Resources | None
    metrics: Mapping[str, float]
    """What training measures about itself: loss, tokens per second, step time."""


class SampleRange:
    """Samples `start` up to `stop`, also under the names that the coordinator's messages have for them."""

    __slots__ = ()
    start: int
    stop: int

    @property
    def start_index(self) -> int:
        return self.start

    @property
    def end_index(self) -> int:
        return self.stop

    @property
    def num_samples(self) -> int:
        return self.stop - self.start
