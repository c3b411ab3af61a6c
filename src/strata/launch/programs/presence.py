"""A program that does not train, present at the coordinator: seen as a worker, with its progress."""

from __future__ import annotations

import logging
import os
import time
from types import TracebackType

from strata.errors import StrataError
from strata.launch.context import TaskContext
from strata.worker.orchestrator import TrainingOrchestrator

log = logging.getLogger("strata.launch")

REPORT_INTERVAL_S = 0.2


class Presence:
    """Work continues without a coordinator; then progress is not reported."""

    def __init__(self, task: TaskContext) -> None:
        self._worker_id = f"{task.task_id}-rank{os.environ.get('RANK', '0')}"
        self._task_id = task.task_id
        self._orchestrator: TrainingOrchestrator | None = None
        self._reported_s = 0.0

    def __enter__(self) -> Presence:
        orchestrator = TrainingOrchestrator(job_id=self._task_id, timeout_s=3.0)
        try:
            orchestrator.register_worker(
                self._worker_id, metadata={"task_id": self._task_id, "pid": str(os.getpid())}
            )
            self._orchestrator = orchestrator
        except StrataError as error:
            orchestrator.close()
            log.warning("working without the coordinator: %s", error)
        return self

    def report(self, step: int, total: int) -> None:
        """So many steps of so many are done."""
        now_s = time.monotonic()
        if self._orchestrator is None or (now_s - self._reported_s < REPORT_INTERVAL_S and step < total):
            return
        self._reported_s = now_s
        try:
            self._orchestrator.heartbeat(step, 0, state="training", metrics={"total_steps": float(total)})
        except StrataError as error:
            log.debug("could not report progress: %s", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._orchestrator is None:
            return
        try:
            self._orchestrator.deregister("its work ended" if kind is None else "it failed")
        except StrataError as refusal:
            log.debug("could not deregister: %s", refusal)
        self._orchestrator.close()
