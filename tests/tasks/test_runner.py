"""What the coordinator says while it cannot look after tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
from strata.core.messages import EndAttempt, StopTask, TaskChanged, TaskCreated, TaskId
from strata.launch.protocol import Capacity, Exited, LaunchFailed, LaunchPlan
from strata.launch.recipes import Recipes, read_recipes
from tests.core.builders import task_spec
from tests.support import eventually


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
        ("ERROR", "tasks cannot be supervised: The cluster cannot be reached."),
        (
            "ERROR",
            "tasks could not be supervised; retrying: ValueError('The cluster speaks nonsense.')",
        ),
        ("WARNING", "tasks are supervised again"),
    ]


# --- several coordinators -----------------------------------------------------------------------------------


class Recording:
    """A launcher that only notes what it is asked for."""

    name = "recording"

    def __init__(self) -> None:
        self.adopted: list[str] | None = None
        self.started: list[str] = []
        self.stopped: list[str] = []

    def capacity(self) -> Capacity:
        return Capacity(workers=1, gpus=0)

    async def adopt(self, plans: Sequence[LaunchPlan]) -> None:
        self.adopted = [plan.run_id for plan in plans]

    async def start(self, plan: LaunchPlan) -> None:
        self.started.append(plan.run_id)

    async def stop(self, run_id: str, *, patience_s: float) -> None:
        self.stopped.append(run_id)

    async def forget(self, task_id: TaskId) -> None: ...
    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def running(engine: Engine, runner: TaskRunner) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(engine.run()), asyncio.create_task(runner.run())]
    try:
        async with asyncio.timeout(60):
            yield
    finally:
        tasks[1].cancel()
        engine.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        engine.close()


def among_several(
    folder: Path, here: str, report_end: Callable[[EndAttempt], Awaitable[None]] | None = None
) -> tuple[Engine, TaskRunner, Recording]:
    """A runner of one of two coordinators; `a` has started the task `t-a`, and `t-b` waits."""
    engine = Engine(Cluster(), SqliteJournal(folder, reserve_bytes=1 << 20), SystemClock())
    for name in ("t-a", "t-b"):
        spec = task_spec(name, type="noop", worker_count=1)
        engine.cluster.apply(TaskCreated(spec=spec, reason="created", at_s=0.0), engine.clock.now())
    engine.cluster.apply(
        TaskChanged(
            task_id=TaskId("t-a"),
            status="running",
            worker_ids=(),
            reason="attempt 1",
            at_s=0.0,
            attempt=1,
            where="a",
        ),
        engine.clock.now(),
    )
    (folder / "recipes").mkdir()
    (folder / "noop.py").write_text("")
    (folder / "recipes" / "noop.toml").write_text(f"script = '{folder / 'noop.py'}'\n")
    planner = Planner(
        recipes=Recipes(read_recipes(folder / "recipes")),
        tasks_dir=folder,
        coordinator="127.0.0.1:1",
        token=str,
        stop_timeout_s=0.1,
        secrets=TaskSecrets(folder),
        elsewhere=lambda: ["127.0.0.1:2"],
    )
    launcher = Recording()
    runner = TaskRunner(
        engine,
        LogStore(),
        planner,
        lambda listener: launcher,
        stop_timeout_s=0.1,
        here=here,
        report_end=report_end,
    )
    return engine, runner, launcher


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition, within_s=30)


async def test_an_attempt_of_another_coordinator_is_left_to_it_and_takes_no_place_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    engine, runner, launcher = among_several(tmp_path, "b")
    async with running(engine, runner):
        await until(lambda: launcher.started)  # The one that waits has the only place there is.
        assert (launcher.adopted, launcher.started) == ([], ["t-b-1"])
        tasks = engine.cluster.tasks.tasks
        assert (tasks[TaskId("t-a")].status, tasks[TaskId("t-b")].where) == ("running", "b")
        ended: list[EndAttempt] = []
        runner.take_ends([EndAttempt(task_id=TaskId("t-a"), attempt=1, cause=None)], ended.append)
        await until(lambda: ended)
        assert engine.cluster.tasks.tasks[TaskId("t-a")].status == "completed"


async def test_a_stop_does_not_wait_for_ever_for_a_machine_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    monkeypatch.setattr(tasks_module, "ELSEWHERE_S", 0.1)
    engine, runner, launcher = among_several(tmp_path, "b")
    async with running(engine, runner):
        await engine.submit(StopTask(task_id=TaskId("t-a"), reason="enough"))
        await until(lambda: engine.cluster.tasks.tasks[TaskId("t-a")].status == "stopped")
        assert "has reported" in engine.cluster.tasks.tasks[TaskId("t-a")].reason
        assert launcher.stopped == []


async def test_a_standby_takes_up_its_own_attempts_starts_none_and_reports_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    reported: list[EndAttempt] = []

    async def report(end: EndAttempt) -> None:
        reported.append(end)

    engine, runner, launcher = among_several(tmp_path, "a", report)
    async with running(engine, runner):
        await until(lambda: launcher.adopted is not None)
        assert launcher.adopted == ["t-a-1"]
        runner._observe(Exited(run_id="t-a-1", task_id=TaskId("t-a"), cause=None))
        await until(lambda: reported)
        assert reported == [EndAttempt(task_id=TaskId("t-a"), attempt=1, cause=None)]
        assert launcher.started == []
        assert engine.cluster.tasks.tasks[TaskId("t-a")].status == "running", "it is the leader's to say"


async def test_a_task_says_whether_the_coordinator_of_its_machine_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    monkeypatch.setattr(tasks_module, "AWAY_S", 0.05)
    engine, runner, _ = among_several(tmp_path, "b")
    reason = lambda: engine.cluster.tasks.tasks[TaskId("t-a")].reason  # noqa: E731
    async with running(engine, runner):
        await until(lambda: "on a, whose coordinator is unreachable" in reason())
        runner.see_attended(["a"])
        await until(lambda: reason() == "attempt 1 on a, supervised by a standby")
        runner.see_attended([])
        await until(lambda: "on a, whose coordinator is unreachable" in reason())
        task = engine.cluster.tasks.tasks[TaskId("t-a")]
        assert (task.status, task.attempt, task.cause) == ("running", 1, None)


async def test_an_attempt_is_taken_up_without_its_recipe_and_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Ray: both are with the coordinator that has started it."""
    monkeypatch.setattr(tasks_module, "LOOK_S", 0.01)
    engine, runner, launcher = among_several(tmp_path, "a")
    runner._planner.recipes._recipes.clear()
    async with running(engine, runner):
        await until(lambda: launcher.adopted is not None)
        assert launcher.adopted == ["t-a-1"]
        assert engine.cluster.tasks.tasks[TaskId("t-a")].status == "running"
