"""What the HTTP API answers `strata.Client`, as JSON. Generated: `npm run types`. Times are Unix seconds."""

from typing import Any, Literal, TypedDict


class ExitCause(TypedDict):
    """Why an attempt at a task failed: the first failure, not the ones that followed from it."""

    kind: Literal["exit", "signal", "exception", "oom", "lost", "launch"]
    message: str
    rank: int | None
    exit_code: int | None
    signal: str
    traceback: str
    may_retry: bool


class LogView(TypedDict):
    id: str
    timestamp: float
    level: str
    message: str
    source: str
    task_id: str | None
    worker_id: str | None


class RecipeBody(TypedDict):
    """A recipe that tasks can run."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON Schema of a task's config"""
    needs_dataset: bool
    max_workers: int | None
    gpus_per_worker: int | None
    """Default for tasks that do not set it; null: one per worker if there are enough"""
    built_in: bool


class TaskAnswer(TypedDict):
    task_id: str
    status: Literal["pending", "running", "completed", "failed", "stopped"]
    reason: str


class TaskView(TypedDict):
    id: str
    name: str
    type: str
    status: Literal["pending", "running", "completed", "failed", "stopped"]
    stopping: bool
    worker_ids: list[str]
    worker_count: int
    gpus_per_worker: int
    dataset_id: str | None
    config: dict[str, Any]
    created_at: float
    started_at: float | None
    completed_at: float | None
    progress: float
    step: int
    total_steps: int | None
    steps_per_s: float | None
    eta_s: float | None
    attempts: int
    max_retries: int
    exit_cause: ExitCause | None
    reason: str
