"""What a program learns about the task it is part of: `task = current_task()`.

A launcher writes it to a file and names the file in `STRATA_TASK`; scripts that an operator registers read it the same way
as the built-in programs do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from strata.errors import StrataError
from strata.files import write_file

TASK_VARIABLE = "STRATA_TASK"
CHECKPOINTS_FOLDER = "checkpoints"
"""In a task's folder, what its workers save."""
DATA_FOLDER = "data"
"""In a task's folder, what its workers have prepared to be trained on."""
SECRETS_FILE = "secrets.json"
"""In a task's folder on the coordinator's machine; the values reach the task's processes in their environment alone."""


class NotATask(StrataError):
    """The program was not started as part of a task."""

    code = "not_a_task"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDataset:
    """A dataset as the coordinator knows it."""

    id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    task_id: str
    name: str
    worker_count: int
    config: Mapping[str, Any]
    """As it was submitted, with the recipe's defaults."""
    dataset: TaskDataset | None
    task_dir: Path
    """The task's own folder, the same for every attempt."""
    shutdown_s: float
    """How long after SIGTERM the program may take to save and leave."""

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints belong: a restarted task finds them there."""
        return self.task_dir / CHECKPOINTS_FOLDER

    @property
    def data(self) -> Path:
        """Where data belongs that the task prepares for itself: an admin sees samples of it on the dashboard."""
        return self.task_dir / DATA_FOLDER

    def write(self, path: Path) -> None:
        facts = {**asdict(self), "task_dir": str(self.task_dir)}
        write_file(path, json.dumps(facts, indent=2), durable=False)


def current_task() -> TaskContext:
    """The task that this process is a worker of. Raises `NotATask`."""
    path = os.environ.get(TASK_VARIABLE)
    if not path:
        raise NotATask(
            f"{TASK_VARIABLE} is not set: this process is not part of a task.",
            hint="Submit it with `strata submit`, or run it with `strata run`.",
        )
    try:
        facts = json.loads(Path(path).read_text())
        dataset = facts.pop("dataset")
        if dataset is not None:
            dataset = TaskDataset(**{**dataset, "files": tuple(dataset["files"])})
        return TaskContext(**{**facts, "dataset": dataset, "task_dir": Path(facts["task_dir"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotATask(f"{path}, named by {TASK_VARIABLE}, cannot be read: {error!r}.") from error
