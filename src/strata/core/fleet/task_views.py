"""A task as the API shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core.fleet.tasks import Task
from strata.core.messages import ExitCause, TaskStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    id: str
    name: str
    type: str
    status: TaskStatus
    stopping: bool
    """Asked to stop; its processes are on their way out."""
    worker_ids: list[str]
    worker_count: int
    gpus_per_worker: int
    dataset_id: str | None
    config: dict[str, Any]
    created_at: float
    started_at: float | None
    completed_at: float | None
    progress: float
    """In percent."""
    step: int
    total_steps: int | None
    steps_per_s: float | None
    eta_s: float | None
    attempts: int
    max_retries: int
    exit_cause: ExitCause | None
    """Of the latest attempt that failed."""
    reason: str


def task(record: Task, config: dict[str, Any]) -> TaskView:
    spec = record.spec
    return TaskView(
        id=spec.task_id,
        name=spec.name,
        type=spec.type,
        status=record.status,
        stopping=record.stopping,
        worker_ids=list(record.worker_ids),
        worker_count=spec.worker_count,
        gpus_per_worker=spec.gpus_per_worker,
        dataset_id=spec.dataset_id,
        config=config,
        created_at=record.created_at_s,
        started_at=record.started_at_s,
        completed_at=record.ended_at_s,
        progress=record.progress_percent,
        step=record.step,
        total_steps=record.total_steps or None,
        steps_per_s=record.steps_per_s or None,
        eta_s=record.eta_s,
        attempts=record.attempt,
        max_retries=spec.max_retries,
        exit_cause=record.cause,
        reason=record.reason,
    )
