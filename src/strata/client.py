"""Tasks from Python: submit, follow, stop and restart them at a coordinator.

    client = strata.Client("http://127.0.0.1:3000")
    task = client.submit("training", config={"learning_rate": 1e-3, "steps": 500}, worker_count=2)
    client.wait(task)
    client.logs(task)

Every call asks the coordinator's HTTP API and raises `Unreachable` or `ApiError` (`strata.api`). Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

from strata import api
from strata.api import Answered, ApiError, Unreachable
from strata.api_types import ExitCause, LogView, RecipeBody, TaskAnswer, TaskView

__all__ = [
    "Answered",
    "ApiError",
    "Client",
    "ExitCause",
    "LogView",
    "RecipeBody",
    "TaskAnswer",
    "TaskView",
    "Unreachable",
]

ENDED = ("completed", "failed", "stopped")
POLL_S = 0.5


class Client:
    """`url` defaults to STRATA_API_URL, `token` to STRATA_TOKEN."""

    def __init__(self, url: str | None = None, *, token: str = "") -> None:
        self.url = url or os.environ.get("STRATA_API_URL") or api.DEFAULT_API
        self._token = token

    def recipes(self) -> list[RecipeBody]:
        """The recipes that tasks can run, each with the JSON Schema of its config."""
        return cast(list[RecipeBody], api.get_rows(self.url, "/api/recipes", token=self._token))

    def submit(
        self,
        type: str = "training",
        *,
        name: str | None = None,
        dataset_id: str | None = None,
        worker_count: int = 1,
        config: Mapping[str, Any] | None = None,
        gpus_per_worker: int | None = None,
        max_retries: int | None = None,
    ) -> str:
        """Submit a task of the recipe `type`; returns its id."""
        request = {
            "name": name or type,
            "type": type,
            "dataset_id": dataset_id,
            "worker_count": worker_count,
            "config": dict(config or {}),
            "gpus_per_worker": gpus_per_worker,
            "max_retries": max_retries,
        }
        body = {key: value for key, value in request.items() if value is not None}
        return str(self._post("/api/tasks", body)["task_id"])

    def tasks(self) -> list[TaskView]:
        """All tasks, newest first."""
        return cast(list[TaskView], api.get_rows(self.url, "/api/tasks", token=self._token))

    def task(self, task_id: str) -> TaskView:
        path = f"/api/tasks/{_quoted(task_id)}"
        return cast(TaskView, api.get_facts(self.url, path, having="status", token=self._token))

    def stop(self, task_id: str, *, wait_s: float = 0.0) -> TaskAnswer:
        """Stop a task after a final checkpoint; with `wait_s`, wait at most that long for its processes to exit."""
        query = urlencode({"wait": wait_s}) if wait_s else ""
        path = f"/api/tasks/{_quoted(task_id)}/stop" + (f"?{query}" if query else "")
        return cast(TaskAnswer, self._post(path, {}, timeout_s=wait_s + api.TIMEOUT_S))

    def restart(self, task_id: str) -> TaskAnswer:
        """Run a failed or stopped task again, from its latest intact checkpoint."""
        return cast(TaskAnswer, self._post(f"/api/tasks/{_quoted(task_id)}/restart", {}))

    def logs(self, task_id: str, *, limit: int = 1_000, after: str | None = None) -> list[LogView]:
        """The task's log entries, oldest first; with `after`, only those newer than the entry of that id."""
        query = urlencode({"limit": limit, **({"after": after} if after else {})})
        rows = api.get_rows(self.url, f"/api/tasks/{_quoted(task_id)}/logs?{query}", token=self._token)
        return cast(list[LogView], rows[::-1])

    def wait(self, task_id: str, *, timeout_s: float | None = None) -> TaskView:
        """Wait for the task to end and return it. Raises `TimeoutError`."""
        deadline_s = time.monotonic() + timeout_s if timeout_s is not None else None
        while True:
            task = self.task(task_id)
            if task["status"] in ENDED:
                return task
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"task {task_id} is still {task['status']} after {timeout_s:g} s: {task['reason']}"
                )
            time.sleep(POLL_S)

    def _post(self, path: str, body: object, *, timeout_s: float | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = api.post(self.url, path, body, token=self._token, timeout_s=timeout_s)
        return answer


def _quoted(task_id: str) -> str:
    return quote(task_id, safe="")
