"""Tasks: pending → running → completed | failed | stopped, with a reason at every arrow.

A task runs in attempts, numbered once and never again. An attempt that fails sends the task back to the queue until its
retries are used up; whatever speaks for an earlier attempt is ignored. A running task that is asked to stop is `stopping`
until its processes have exited, and only then stopped.

Pure. What a task runs, and where, is a launcher's business; this module only says what may follow what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from strata.core import checks
from strata.core.messages import (
    BeginAttempt,
    Conflict,
    CreateTask,
    DatasetId,
    EndAttempt,
    Event,
    ExitCause,
    Instant,
    NoteProgress,
    NoteWhereabouts,
    Overloaded,
    QueueTask,
    RestartTask,
    StopTask,
    TaskChanged,
    TaskCreated,
    TaskId,
    TaskProgressed,
    TaskSpec,
    TaskStatus,
    Unknown,
    WorkerId,
)

ENDED: frozenset[TaskStatus] = frozenset({"completed", "failed", "stopped"})
MAX_WORKERS = 100_000
MAX_GPUS_PER_WORKER = 64
MAX_RETRIES = 1_000
CONFIG_LIMIT_BYTES = 256 * 1024
TRACEBACK_LIMIT = 32_768
RATE_MEMORY_S = 30.0
"""How far back the speed looks from which the end is estimated."""
LIST_HINT = "GET /api/tasks (or: strata tasks) lists the known ones."

TaskEvent = TaskCreated | TaskChanged | TaskProgressed
TaskChange = StopTask | RestartTask | QueueTask | BeginAttempt | EndAttempt | NoteProgress | NoteWhereabouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    spec: TaskSpec
    status: TaskStatus
    worker_ids: tuple[WorkerId, ...]
    created_at_s: float
    started_at_s: float | None
    ended_at_s: float | None
    reason: str
    attempt: int = 0
    failures: int = 0
    stopping: bool = False
    cause: ExitCause | None = None
    step: int = 0
    total_steps: int = 0
    steps_per_s: float = 0.0
    progressed_attempt: int = 0
    progressed_at_s: float | None = None
    where: str = ""
    """The one coordinator whose launcher can see the latest attempt; empty: any can."""

    @property
    def progress_percent(self) -> float:
        if self.status == "completed":
            return 100.0
        return percent(self.step, self.total_steps)

    @property
    def eta_s(self) -> float | None:
        """Seconds of work left at the present speed, while it is known."""
        if self.status != "running" or self.stopping:
            return None
        return remaining_s(self.step, self.total_steps, self.steps_per_s)


def percent(step: int, total_steps: int) -> float:
    return min(100.0, 100.0 * step / total_steps) if total_steps else 0.0


def remaining_s(step: int, total_steps: int, steps_per_s: float) -> float | None:
    if not total_steps or steps_per_s <= 0.0:
        return None
    return max(0.0, (total_steps - step) / steps_per_s)


class Tasks:
    def __init__(self, *, max_tasks: int = 10_000) -> None:
        self.max_tasks = max_tasks
        self.tasks: dict[TaskId, Task] = {}

    def get(self, task_id: TaskId) -> Task:
        task = self.tasks.get(task_id)
        if task is None:
            raise Unknown("task", task_id, hint=LIST_HINT)
        return task

    def check_dataset_unused(self, dataset_id: DatasetId) -> None:
        """Refuse where a task that has not ended reads it."""
        for task_id, task in self.tasks.items():
            if task.spec.dataset_id == dataset_id and task.status not in ENDED:
                raise Conflict(
                    f"Task '{task_id}' reads dataset '{dataset_id}'.",
                    hint=f"Stop it first: strata stop {task_id}.",
                )

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_create(self, command: CreateTask, now: Instant) -> TaskCreated:
        spec = command.spec
        checks.name("task_id", spec.task_id)
        checks.name("name", spec.name)
        checks.name("type", spec.type, limit=64)
        checks.between("worker_count", spec.worker_count, 1, MAX_WORKERS)
        checks.between("gpus_per_worker", spec.gpus_per_worker, 0, MAX_GPUS_PER_WORKER)
        checks.between("max_retries", spec.max_retries, 0, MAX_RETRIES)
        checks.json_object("config", spec.config_json, limit=CONFIG_LIMIT_BYTES)
        if spec.task_id in self.tasks:
            raise Conflict(f"Task '{spec.task_id}' exists already.", hint=LIST_HINT)
        if len(self.tasks) >= self.max_tasks and self._oldest_ended() is None:
            raise Overloaded(
                f"{len(self.tasks):,} tasks are pending or running, which is the limit.",
                hint="Wait until one has ended, or stop one.",
            )
        return TaskCreated(spec=spec, reason="waiting for a launcher", at_s=now.wall_s)

    def _oldest_ended(self) -> TaskId | None:
        return next((task_id for task_id, task in self.tasks.items() if task.status in ENDED), None)

    def decide_change(self, command: TaskChange, now: Instant) -> TaskChanged | TaskProgressed | None:
        """What follows; None where nothing does. Raises `Refused` for what may not follow."""
        task = self.get(command.task_id)
        match command:
            case StopTask():
                return self._decide_stop(task, command, now)
            case RestartTask():
                return self._decide_restart(task, command, now)
            case QueueTask():
                if task.status != "pending" or task.reason == (command.reason or "waiting"):
                    return None
                checks.text("reason", command.reason)
                return _changed(task, now.wall_s, reason=command.reason or "waiting")
            case BeginAttempt():
                if task.status != "pending":
                    raise _cannot(task, "begin another attempt")
                checks.text("reason", command.reason)
                checks.text("where", command.where, limit=256)
                return _changed(
                    task,
                    now.wall_s,
                    status="running",
                    attempt=task.attempt + 1,
                    reason=command.reason or f"attempt {task.attempt + 1}",
                    where=command.where,
                )
            case EndAttempt():
                return self._decide_end(task, command, now)
            case NoteProgress():
                return self._decide_progress(task, command, now)
            case NoteWhereabouts():
                checks.text("reason", command.reason)
                is_of_it = task.status == "running" and command.attempt == task.attempt
                if not is_of_it or task.stopping or task.reason == command.reason:
                    return None
                return _changed(task, now.wall_s, reason=command.reason)
        assert_never(command)

    def _decide_stop(self, task: Task, command: StopTask, now: Instant) -> TaskChanged | None:
        if task.status in ENDED or task.stopping:
            return None  # Stopping twice is no error.
        checks.text("reason", command.reason)
        reason = command.reason or "stop requested"
        if task.status == "pending":
            return _changed(task, now.wall_s, status="stopped", reason=reason)
        return _changed(task, now.wall_s, stopping=True, reason=f"stopping: {reason}")

    def _decide_restart(self, task: Task, command: RestartTask, now: Instant) -> TaskChanged:
        if task.status == "completed":
            raise Conflict(
                f"Task '{task.spec.task_id}' is completed: nothing is left to do.",
                hint="Submit a new task with other settings.",
            )
        if task.status not in ENDED:
            raise _cannot(task, "be restarted", hint="Stop it first, or wait for its end.")
        checks.text("reason", command.reason)
        reason = command.reason or "restart requested"
        return _changed(task, now.wall_s, status="pending", failures=0, reason=reason)

    def _decide_end(self, task: Task, command: EndAttempt, now: Instant) -> TaskChanged | None:
        if task.status != "running" or command.attempt != task.attempt:
            return None
        cause, at_s = command.cause, now.wall_s
        if cause is not None:
            checks.text("cause", cause.message)
            checks.text("cause signal", cause.signal, limit=64)
            checks.text("cause traceback", cause.traceback, limit=TRACEBACK_LIMIT)
        if task.stopping:
            asked = task.reason.removeprefix("stopping: ")
            reason = f"{asked}; {cause.message}"[: checks.TEXT_LIMIT] if cause is not None else asked
            return _changed(task, at_s, status="stopped", stopping=False, cause=cause, reason=reason)
        if cause is None:
            reason = "exited successfully"
            return _changed(task, at_s, status="completed", cause=None, reason=reason)
        left = task.spec.max_retries - task.failures
        if cause.may_retry and left > 0:
            retries = "1 retry" if left == 1 else f"{left:,} retries"
            reason = f"attempt {task.attempt} failed ({cause.message[:1000]}); {retries} left"
            failures = task.failures + 1
            return _changed(task, at_s, status="pending", failures=failures, cause=cause, reason=reason)
        failures = task.failures + 1
        if cause.may_retry and task.spec.max_retries:
            reason = f"attempt {task.attempt} failed, no retries left: {cause.message}"
        else:
            reason = cause.message
        reason = reason[: checks.TEXT_LIMIT]
        return _changed(task, at_s, status="failed", failures=failures, cause=cause, reason=reason)

    def _decide_progress(self, task: Task, command: NoteProgress, now: Instant) -> TaskProgressed | None:
        if task.status != "running" or command.attempt != task.attempt:
            return None
        checks.between("step", command.step, 0, checks.SAMPLES_LIMIT)
        checks.between("total_steps", command.total_steps, 0, checks.SAMPLES_LIMIT)
        checks.between("number of workers", len(command.worker_ids), 0, MAX_WORKERS)
        for worker_id in command.worker_ids:
            checks.name("worker_ids", worker_id)
        seen = (task.step, task.total_steps, task.worker_ids, task.progressed_attempt)
        if seen == (command.step, command.total_steps, command.worker_ids, command.attempt):
            return None
        return TaskProgressed(
            task_id=command.task_id,
            attempt=command.attempt,
            worker_ids=command.worker_ids,
            step=command.step,
            total_steps=command.total_steps,
            steps_per_s=_rate(task, command, now.wall_s),
            reason="reported by its workers",
            at_s=now.wall_s,
        )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: TaskEvent) -> None:
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
                    attempt=event.attempt,
                    failures=event.failures,
                    stopping=event.stopping,
                    cause=event.cause,
                    where=event.where,
                )
            case TaskProgressed():
                self.tasks[event.task_id] = replace(
                    self.tasks[event.task_id],
                    worker_ids=event.worker_ids or self.tasks[event.task_id].worker_ids,
                    step=event.step,
                    total_steps=event.total_steps,
                    steps_per_s=event.steps_per_s,
                    progressed_attempt=event.attempt,
                    progressed_at_s=event.at_s,
                )

    def forget(self, tasks: Iterable[TaskId]) -> None:
        for task_id in tasks:
            self.tasks.pop(task_id, None)

    def compact(self) -> Iterator[Event]:
        return _history(list(self.tasks.values()))


def _history(tasks: Sequence[Task]) -> Iterator[Event]:
    for task in tasks:
        yield TaskCreated(spec=task.spec, reason=task.reason, at_s=task.created_at_s)
        if task.started_at_s is not None:
            yield _changed(task, task.started_at_s, status="running")
        if task.progressed_at_s is not None:
            yield TaskProgressed(
                task_id=task.spec.task_id,
                attempt=task.progressed_attempt,
                worker_ids=task.worker_ids,
                step=task.step,
                total_steps=task.total_steps,
                steps_per_s=task.steps_per_s,
                reason=task.reason,
                at_s=task.progressed_at_s,
            )
        ended_at_s = task.ended_at_s if task.ended_at_s is not None else task.created_at_s
        yield _changed(task, ended_at_s)


def _changed(task: Task, at_s: float, **changes: Any) -> TaskChanged:
    """The task as it stands, with `changes`, as a fact."""
    facts: dict[str, Any] = {
        "status": task.status,
        "worker_ids": task.worker_ids,
        "reason": task.reason,
        "attempt": task.attempt,
        "failures": task.failures,
        "stopping": task.stopping,
        "cause": task.cause,
        "where": task.where,
    }
    return TaskChanged(task_id=task.spec.task_id, at_s=at_s, **(facts | changes))


def _cannot(task: Task, what: str, *, hint: str = LIST_HINT) -> Conflict:
    return Conflict(f"Task '{task.spec.task_id}' is {task.status} and cannot {what}.", hint=hint)


def _rate(task: Task, command: NoteProgress, at_s: float) -> float:
    """Steps per second, smoothed; an earlier attempt's until this one has its own."""
    if task.progressed_at_s is None or task.progressed_attempt != command.attempt:
        return task.steps_per_s
    passed_s = at_s - task.progressed_at_s
    made = command.step - task.step
    if passed_s <= 0.0 or made < 0:  # The clock, or the workers, went back.
        return task.steps_per_s
    seen = made / passed_s
    if task.steps_per_s == 0.0:
        return seen
    return task.steps_per_s + (seen - task.steps_per_s) * (1.0 - math.exp(-passed_s / RATE_MEMORY_S))
