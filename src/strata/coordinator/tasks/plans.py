"""From a task to what a launcher needs: the recipe's program, its arguments, environment and folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core.cluster import Cluster
from strata.core.fleet.tasks import Task
from strata.core.messages import DatasetSpec
from strata.launch.concealer import SECRET_SHOWN
from strata.launch.context import CHECKPOINTS_FOLDER, TASK_VARIABLE, TaskContext, TaskDataset
from strata.launch.protocol import LaunchFailed, LaunchPlan
from strata.launch.recipes import Recipes

SAVE_SHARE = 0.7
"""Of the time a task has to stop, what its workers may use to save; the rest is for processes to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    recipes: Recipes
    tasks_dir: Path
    coordinator: str
    """host:port, as workers reach it."""
    token: Callable[[str], str]
    """By task, what its workers present to the coordinator."""
    stop_timeout_s: float
    secrets: TaskSecrets
    tls: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with which workers speak TLS."""
    elsewhere: Callable[[], Sequence[str]] = tuple
    """Other coordinators, as workers reach them: one of them may lead before the task has ended."""
    inherited: tuple[str, ...] = ()
    """Environment variables of the coordinator that tasks get beside the usual."""

    def run_id(self, task: Task) -> str:
        return f"{task.spec.task_id}-{task.attempt}"

    def plan(self, cluster: Cluster, task: Task) -> LaunchPlan:
        """The present attempt. Raises `Unknown` where the recipe or the dataset is no longer known, `LaunchFailed` where its
        secrets are not there."""
        spec = task.spec
        recipe = self.recipes.get(spec.type)
        task_dir = self.tasks_dir / spec.task_id
        config = recipe.full_config(json.loads(spec.config_json))
        dataset = cluster.datasets.get(spec.dataset_id) if spec.dataset_id is not None else None
        checkpoints = str(task_dir / CHECKPOINTS_FOLDER)
        places = {"task_id": spec.task_id, "task_dir": str(task_dir), "checkpoints": checkpoints}
        if dataset is not None:
            places["dataset_path"] = dataset.path
        kept = self.secrets.read(spec.task_id) if recipe.secrets else {}
        if missing := [key for key in recipe.secrets if config.get(key) == SECRET_SHOWN and key not in kept]:
            raise LaunchFailed(
                f"The secrets {', '.join(missing)} of task '{spec.task_id}' no longer exist.",
                hint="Submit the task again.",
            )
        coordinators = ",".join([self.coordinator, *self.elsewhere()])
        return LaunchPlan(
            task_id=spec.task_id,
            attempt=task.attempt,
            arguments=recipe.command(config, places),
            worker_count=1 if recipe.one_process else spec.worker_count,
            gpus_per_worker=spec.gpus_per_worker,
            environment={
                **recipe.environment,
                **{recipe.secrets[key]: value for key, value in kept.items() if key in recipe.secrets},
                "COORDINATOR_ADDR": coordinators,
                "COORDINATOR_URL": "",
                "STRATA_TOKEN": self.token(spec.task_id),
                **self.tls,
                "STRATA_JOB_ID": spec.task_id,
                "STRATA_TASK_ID": spec.task_id,
                "STRATA_SHIP_LOGS": "0",  # What it prints is taken here by its launcher.
                "STRATA_CHECKPOINT_DIR": checkpoints,
                TASK_VARIABLE: str(task_dir / "task.json"),
            },
            inherited=self.inherited,
            secrets=tuple(kept.values()),
            task_dir=task_dir,
            working_dir=recipe.working_dir,
            coordinator=coordinators,
            warm=recipe.warm,
            spares=recipe.spares,
        )

    def plan_to_take_up(self, task: Task) -> LaunchPlan:
        """Of an attempt that some coordinator has started: by what it is found. Its program, its arguments and its secrets may be
        known to that one alone."""
        secrets: tuple[str, ...] = ()
        with suppress(LaunchFailed):
            secrets = tuple(self.secrets.read(task.spec.task_id).values())
        return LaunchPlan(
            task_id=task.spec.task_id,
            attempt=task.attempt,
            arguments=(),
            worker_count=task.spec.worker_count,
            gpus_per_worker=task.spec.gpus_per_worker,
            secrets=secrets,
            task_dir=self.tasks_dir / task.spec.task_id,
            coordinator=self.coordinator,
        )

    def prepare(self, plan: LaunchPlan, cluster: Cluster, task: Task) -> None:
        """The task's folder, and in it what its program reads about it."""
        spec = task.spec
        dataset = cluster.datasets.get(spec.dataset_id) if spec.dataset_id is not None else None
        context = TaskContext(
            task_id=spec.task_id,
            name=spec.name,
            worker_count=spec.worker_count,
            config=self.recipes.get(spec.type).full_config(json.loads(spec.config_json)),
            dataset=_described(dataset) if dataset is not None else None,
            task_dir=plan.task_dir,
            shutdown_s=SAVE_SHARE * self.stop_timeout_s,
        )
        try:
            plan.task_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            context.write(plan.task_dir / "task.json")
        except OSError as error:
            raise LaunchFailed(
                f"The folder of task '{spec.task_id}' cannot be written: {error}.",
                hint=f"Is the disk of {self.tasks_dir} full?",
            ) from error


def _described(spec: DatasetSpec) -> TaskDataset:
    return TaskDataset(
        id=spec.dataset_id,
        path=os.path.abspath(spec.path) if os.path.exists(spec.path) else spec.path,
        format=spec.format,
        total_samples=spec.total_samples,
        shard_size=spec.shard_size,
        shuffle=spec.shuffle,
        seed=spec.seed,
        files=tuple(
            os.path.abspath(file.path) if os.path.exists(file.path) else file.path for file in spec.files
        ),
    )
