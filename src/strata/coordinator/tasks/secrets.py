"""Values of tasks that are secret: kept in a file beside the task, handed to its processes, never shown.

Everywhere else (journal, API, events, logs, `task.json`) such a value is `(secret)`. The file is in the task's folder, which
only this user may enter, from before the task is known until it has completed; a task that failed or was stopped may run again.
What a program prints is searched for its own secrets before it becomes a log line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from strata.files import write_file
from strata.launch.concealer import Concealer
from strata.launch.context import SECRETS_FILE
from strata.launch.protocol import LaunchFailed


class TaskSecrets:
    def __init__(self, tasks_dir: Path) -> None:
        self._tasks_dir = tasks_dir

    async def keep(self, task_id: str, values: Mapping[str, str]) -> None:
        """Raises `OSError`."""
        if values:
            await asyncio.to_thread(self._write, task_id, dict(values))

    def read(self, task_id: str) -> dict[str, str]:
        """By key of config; nothing where there are none. Raises `LaunchFailed` where they cannot be read."""
        path = self._path(task_id)
        try:
            found = json.loads(path.read_bytes())
            return {str(key): str(value) for key, value in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise LaunchFailed(
                f"The secrets of task '{task_id}' cannot be read: {type(error).__name__}.",
                hint=f"Check {path}, or submit the task again.",
            ) from None

    def concealer(self, task_id: str) -> Concealer:
        """Of a task's secrets; of none where it has none, or they cannot be read."""
        if task_id != Path(task_id).name:  # As no task is called.
            return Concealer(())
        with suppress(LaunchFailed):
            return Concealer(self.read(task_id).values())
        return Concealer(())

    def forget(self, task_id: str) -> None:
        with suppress(OSError):
            self._path(task_id).unlink()

    def _write(self, task_id: str, values: dict[str, str]) -> None:
        path = self._path(task_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, json.dumps(values), durable=True)

    def _path(self, task_id: str) -> Path:
        return self._tasks_dir / task_id / SECRETS_FILE
