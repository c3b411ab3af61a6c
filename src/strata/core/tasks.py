"""Tasks: pending → running → completed | failed | stopped, with a reason at every arrow.

Pure. What a task runs, and where, is a launcher's business; this module only says what may follow what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.core import checks
from strata.core.messages import (
    AdvanceTask,
    Conflict,
    CreateTask,
    Event,
    Instant,
    Overloaded,
    StopTask,
    TaskChanged,
    TaskCreated,
    TaskId,
    TaskSpec,
    TaskStatus,
    Unknown,
    WorkerId,
)

ENDED: frozenset[TaskStatus] = frozenset({"completed", "failed", "stopped"})
MAY_FOLLOW: dict[TaskStatus, frozenset[TaskStatus]] = {
    "pending": frozenset({"running", "failed", "stopped"}),
    "running": frozenset({"running", "pending", "completed", "failed", "stopped"}),
    "completed": frozenset(),
    "failed": frozenset({"pending"}),
    "stopped": frozenset({"pending"}),
}
MAX_WORKERS = 100_000
CONFIG_LIMIT_BYTES = 256 * 1024
LIST_HINT = "GET /api/tasks (or: strata tasks) lists the known ones."


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    spec: TaskSpec
    status: TaskStatus
    worker_ids: tuple[WorkerId, ...]
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    reason: str


class Tasks:
    def __init__(self, *, max_tasks: int = 10_000) -> None:
        self.max_tasks = max_tasks
        self.tasks: dict[TaskId, Task] = {}

    def get(self, task_id: TaskId) -> Task:
        task = self.tasks.get(task_id)
        if task is None:
            raise Unknown("task", task_id, hint=LIST_HINT)
        return task

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_create(self, command: CreateTask, now: Instant) -> TaskCreated:
        spec = command.spec
        checks.name("task_id", spec.task_id)
        checks.name("name", spec.name)
        checks.name("type", spec.type, limit=64)
        checks.between("worker_count", spec.worker_count, 1, MAX_WORKERS)
        checks.json_object("config", spec.config_json, limit=CONFIG_LIMIT_BYTES)
        if spec.task_id in self.tasks:
            raise Conflict(f"Task '{spec.task_id}' exists already.", hint=LIST_HINT)
        if len(self.tasks) >= self.max_tasks and self._oldest_ended() is None:
            raise Overloaded(
                f"{len(self.tasks):,} tasks are pending or running, which is the limit.",
                hint="Wait until one has ended, or stop one.",
            )
        return TaskCreated(spec=spec, reason="waiting for a launcher to take it", at_s=now.wall_s)

    def _oldest_ended(self) -> TaskId | None:
        return next((task_id for task_id, task in self.tasks.items() if task.status in ENDED), None)

    def decide_stop(self, command: StopTask, now: Instant) -> TaskChanged | None:
        task = self.get(command.task_id)
        if task.status in ENDED:
            return None  # Stopping twice is no error.
        checks.text("reason", command.reason)
        return TaskChanged(
            task_id=command.task_id,
            status="stopped",
            worker_ids=(),
            reason=command.reason or "asked to stop",
            at_s=now.wall_s,
        )

    def decide_advance(self, command: AdvanceTask, now: Instant) -> TaskChanged:
        task = self.get(command.task_id)
        if command.status not in MAY_FOLLOW[task.status]:
            raise Conflict(
                f"Task '{command.task_id}' is {task.status} and cannot become {command.status}.",
                hint=LIST_HINT,
            )
        checks.text("reason", command.reason)
        checks.between("number of workers", len(command.worker_ids), 0, MAX_WORKERS)
        for worker_id in command.worker_ids:
            checks.name("worker_ids", worker_id)
        return TaskChanged(
            task_id=command.task_id,
            status=command.status,
            worker_ids=command.worker_ids,
            reason=command.reason or f"its launcher says that it is {command.status}",
            at_s=now.wall_s,
        )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: TaskCreated | TaskChanged) -> None:
        match event:
            case TaskCreated():
                ended = self._oldest_ended() if len(self.tasks) >= self.max_tasks else None
                if ended is not None:
                    del self.tasks[ended]
                self.tasks[event.spec.task_id] = Task(
                    spec=event.spec,
                    status="pending",
                    worker_ids=(),
                    created_at_s=event.at_s,
                    started_at_s=None,
                    ended_at_s=None,
                    reason=event.reason,
                )
            case TaskChanged():
                task = self.tasks[event.task_id]
                started = event.at_s if event.status == "running" else None
                self.tasks[event.task_id] = replace(
                    task,
                    status=event.status,
                    worker_ids=event.worker_ids or task.worker_ids,
                    started_at_s=task.started_at_s if task.started_at_s is not None else started,
                    ended_at_s=event.at_s if event.status in ENDED else None,
                    reason=event.reason,
                )

    def compact(self) -> list[Event]:
        events: list[Event] = []
        for task in self.tasks.values():
            events.append(TaskCreated(spec=task.spec, reason=task.reason, at_s=task.created_at_s))
            if task.started_at_s is not None:
                events.append(_changed(task, "running", task.started_at_s))
            ended_at_s = task.ended_at_s if task.ended_at_s is not None else task.created_at_s
            events.append(_changed(task, task.status, ended_at_s))
        return events


def _changed(task: Task, status: TaskStatus, at_s: float) -> TaskChanged:
    return TaskChanged(
        task_id=task.spec.task_id,
        status=status,
        worker_ids=task.worker_ids,
        reason=task.reason,
        at_s=at_s,
    )
