"""A coordinator that runs tasks on this machine, and what tests ask about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from strata.launch.cleanup import end_processes
from strata.shared_memory import folders_of
from tests.support import Coordinator, eventually

ENDED = ("completed", "failed", "stopped")
STOP_S = 60.0
"""A task that stops in good order has this long for it, however busy the machine is."""


class Tasks:
    """Tasks at one coordinator. Whatever a failing test leaves of them is ended."""

    def __init__(self, data_dir: Path, env: dict[str, str]) -> None:
        self.server = Coordinator(data_dir, env={"STRATA_LAUNCHER": "local", **env})
        self.ids: list[str] = []

    def submit(self, type: str = "training", *, workers: int = 1, **config: Any) -> str:
        body = {"name": f"a {type}", "type": type, "worker_count": workers, "config": config}
        status, answer = self.server.post("/api/tasks", body)
        assert status == 201, answer
        self.ids.append(answer["task_id"])
        return self.ids[-1]

    def get(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get(f"/api/tasks/{task_id}")
        return found

    def until(
        self, task_id: str, condition: Callable[[dict[str, Any]], bool], *, within_s: float = 90.0
    ) -> dict[str, Any]:
        """The task when it is so."""
        seen: dict[str, Any] = {}

        def check() -> bool:
            nonlocal seen
            seen = self.get(task_id)
            return condition(seen)

        try:
            eventually(check, within_s=within_s, every_s=0.1)
        except AssertionError:
            raise AssertionError(f"{seen}\n{self.log(task_id)}\n{''.join(self.server.output)}") from None
        return seen

    def ended(self, task_id: str, *, within_s: float = 120.0) -> dict[str, Any]:
        return self.until(task_id, lambda task: task["status"] in ENDED, within_s=within_s)

    def log(self, task_id: str) -> str:
        entries = self.server.get(f"/api/tasks/{task_id}/logs?limit=5000")
        return "\n".join(f"{e['worker_id']} {e['level']} {e['message']}" for e in reversed(entries))

    def processes(self, task_id: str) -> dict[int, str]:
        """Everything alive that the task has started, on whatever way."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get("STRATA_TASK_ID") == task_id:
                    found[process.pid] = " ".join(process.cmdline())
            except psutil.Error:
                continue
        return found

    def shared_memory(self, task_id: str) -> list[Path]:
        attempts = self.get(task_id)["attempts"]
        names = [task_id, *(f"{task_id}-{n}" for n in range(1, attempts + 1))]
        return [path for name in names for path in folders_of(name) if path.exists()]

    def close(self) -> None:
        self.server.stop()
        for task_id in self.ids:
            for attempt in range(1, 10):
                end_processes(f"{task_id}-{attempt}")


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    settings = {"STRATA_TASK_WORKERS": "2", "STRATA_TASK_STOP_TIMEOUT": str(STOP_S), "OMP_NUM_THREADS": "1"}
    made = Tasks(tmp_path / "data", settings)
    made.server.start()
    yield made
    made.close()
