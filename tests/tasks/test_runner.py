"""What the coordinator says while it cannot look after tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.coordinator.logs.store import LogStore
from strata.coordinator.tasks import runner as tasks_module
from strata.coordinator.tasks.plans import Planner
from strata.coordinator.tasks.runner import TaskRunner
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core.cluster import Cluster
from strata.core.messages import TaskId
from strata.launch.protocol import Capacity, LaunchFailed, LaunchPlan
from strata.launch.recipes import Recipes


class Flaky:
    """A launcher whose cluster comes back at the seventh call."""

    name = "flaky"

    def __init__(self) -> None:
        self.calls = 0
        self.looks = 0
        self.well = asyncio.Event()

    def capacity(self) -> Capacity:
        self.looks += 1
        if self.looks == 2:  # What was to say after the first is said.
            self.well.set()
        return Capacity(workers=1, gpus=0)

    async def adopt(self, plans: Sequence[LaunchPlan]) -> None:
        self.calls += 1
        if self.calls <= 3:
            raise LaunchFailed("The cluster cannot be reached.")
        if self.calls <= 6:
            raise ValueError("The cluster speaks nonsense.")

    async def start(self, plan: LaunchPlan) -> None: ...
    async def stop(self, run_id: str, *, patience_s: float) -> None: ...
    async def forget(self, task_id: TaskId) -> None: ...
    async def close(self) -> None: ...


async def test_an_outage_is_logged_when_it_starts_when_it_changes_and_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    caplog.set_level(logging.INFO, logger="strata.coordinator.tasks")
    engine = Engine(Cluster(), SqliteJournal(tmp_path), SystemClock())
    planner = Planner(
        recipes=Recipes(()),
        tasks_dir=tmp_path,
        coordinator="127.0.0.1:1",
        token=str,
        stop_timeout_s=1.0,
        secrets=TaskSecrets(tmp_path),
    )
    launcher = Flaky()
    runner = TaskRunner(engine, LogStore(), planner, lambda listener: launcher, stop_timeout_s=1.0)
    running = [asyncio.create_task(engine.run()), asyncio.create_task(runner.run())]
    try:
        async with asyncio.timeout(30):
            await launcher.well.wait()
    finally:
        running[1].cancel()
        engine.stop()
        await asyncio.gather(*running, return_exceptions=True)
        engine.close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "tasks cannot be supervised now: The cluster cannot be reached."),
        (
            "ERROR",
            "tasks could not be supervised; retrying: ValueError('The cluster speaks nonsense.')",
        ),
        ("WARNING", "tasks are supervised again"),
    ]
