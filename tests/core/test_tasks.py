"""Tasks: what may follow what, each with a reason; attempts, retries and progress; limits that let work go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from strata.core.fleet.tasks import ENDED, Task, Tasks
from strata.core.messages import (
    Conflict,
    CreateTask,
    Event,
    ExitCause,
    InvalidArgument,
    NoteProgress,
    NoteWhereabouts,
    Overloaded,
    StopTask,
    TaskChanged,
    TaskId,
    TaskStatus,
    Unknown,
    WorkerId,
)
from tests.core.builders import Fleet, instant, shown, task_spec

STATUSES: tuple[TaskStatus, ...] = get_args(TaskStatus)
LOST = ExitCause(kind="lost", message="its agent vanished")
REFUSED = ExitCause(kind="exit", message="the configuration is refused", may_retry=False)

Verb = Callable[[Fleet], Any]
VERBS: dict[str, Verb] = {
    "begin": lambda fleet: fleet.begin(),
    "end well": lambda fleet: fleet.end(),
    "end badly": lambda fleet: fleet.end(cause=LOST),
    "end for good": lambda fleet: fleet.end(cause=REFUSED),
    "stop": lambda fleet: fleet.stop_task(),
    "restart": lambda fleet: fleet.restart_task(),
}
WAY_TO: dict[str, list[str]] = {
    "pending": [],
    "running": ["begin"],
    "stopping": ["begin", "stop"],
    "completed": ["begin", "end well"],
    "failed": ["begin", "end for good"],
    "stopped": ["stop"],
}
REFUSAL = "refused"
FOLLOWS: dict[str, dict[str, str]] = {
    "pending": {"begin": "running", "stop": "stopped", "restart": REFUSAL},
    "running": {
        "begin": REFUSAL,
        "end well": "completed",
        "end badly": "pending",
        "end for good": "failed",
        "stop": "stopping",
        "restart": REFUSAL,
    },
    "stopping": {
        "begin": REFUSAL,
        "end well": "stopped",
        "end badly": "stopped",
        "end for good": "stopped",
        "restart": REFUSAL,
    },
    "completed": {"begin": REFUSAL, "restart": REFUSAL},
    "failed": {"begin": REFUSAL, "restart": "pending"},
    "stopped": {"begin": REFUSAL, "restart": "pending"},
}
"""What each verb makes of each state; what is not named leaves it as it is."""


def the_task(fleet: Fleet) -> Task:
    return fleet.cluster.tasks.get(TaskId("t"))


def state(fleet: Fleet) -> str:
    task = the_task(fleet)
    return "stopping" if task.stopping else task.status


def fleet_in(name: str) -> Fleet:
    fleet = Fleet()
    fleet.create_task("t")
    for verb in WAY_TO[name]:
        fleet.now_s += 1
        VERBS[verb](fleet)
    assert state(fleet) == name
    return fleet


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("before", WAY_TO)
def test_only_what_the_table_says_follows(before: str, verb: str) -> None:
    fleet = fleet_in(before)
    history = fleet.cluster.compact()
    expected = FOLLOWS[before].get(verb)
    if expected == REFUSAL:
        with pytest.raises(Conflict, match=f"'t' is {the_task(fleet).status}"):
            VERBS[verb](fleet)
    else:
        decision = VERBS[verb](fleet)
        assert bool(decision.events) == (expected is not None)
        assert decision.reply.reason
    if expected in (None, REFUSAL):
        assert fleet.cluster.compact() == history
    else:
        assert state(fleet) == expected
    assert fleet.compacted().cluster.tasks.tasks == fleet.cluster.tasks.tasks
    assert fleet.replayed().cluster.tasks.tasks == fleet.cluster.tasks.tasks
    assert shown(fleet.compacted().cluster) == shown(fleet.cluster)


def test_a_running_task_is_stopped_only_when_its_processes_have_exited() -> None:
    fleet = fleet_in("running")
    fleet.stop_task(reason="asked by Ada")
    task = the_task(fleet)
    assert (task.status, task.stopping, task.ended_at_s) == ("running", True, None)
    assert task.reason == "stopping: asked by Ada"
    fleet.now_s += 3
    fleet.end(cause=ExitCause(kind="signal", signal="SIGKILL", message="it had to be killed"))
    task = the_task(fleet)
    assert (task.status, task.stopping, task.ended_at_s) == ("stopped", False, fleet.now.wall_s)
    assert task.reason == "asked by Ada; it had to be killed"
    assert fleet.stop_task().events == ()  # Stopping twice is no error.


def test_an_attempt_that_failed_is_tried_again_until_its_retries_are_used_up() -> None:
    fleet = Fleet()
    fleet.create_task("t", max_retries=2)
    reasons = []
    for attempt in (1, 2, 3):
        fleet.begin()
        assert the_task(fleet).attempt == attempt
        fleet.end(cause=LOST)
        reasons.append(the_task(fleet).reason)
    assert "attempt 1 failed (its agent vanished)" in reasons[0]
    assert reasons[1].endswith("1 retry left")
    assert "no retries left" in reasons[2]
    assert (the_task(fleet).status, the_task(fleet).cause) == ("failed", LOST)
    fleet.restart_task(reason="try once more")
    fleet.begin()
    task = the_task(fleet)
    assert (task.attempt, task.failures) == (4, 0)  # Numbers are given out once; retries begin anew.
    fleet.end(cause=LOST)
    assert the_task(fleet).status == "pending"


def test_who_speaks_for_an_earlier_attempt_is_ignored() -> None:
    fleet = fleet_in("running")
    fleet.end(cause=LOST)
    fleet.begin()
    late = NoteProgress(task_id=TaskId("t"), attempt=1, worker_ids=(WorkerId("a"),), step=99, total_steps=100)
    assert fleet.end(attempt=1).events == ()
    assert fleet.do(late).events == ()
    assert (the_task(fleet).status, the_task(fleet).step) == ("running", 0)


def test_progress_and_time_left_come_from_steps() -> None:
    fleet = fleet_in("running")
    assert (the_task(fleet).progress_percent, the_task(fleet).eta_s) == (0.0, None)
    fleet.progress(0, 200)
    for step in (10, 20, 30, 40, 50):
        fleet.now_s += 2
        fleet.progress(step, 200)
    task = the_task(fleet)
    assert (task.progress_percent, task.worker_ids) == (25.0, ("a",))
    assert task.eta_s == pytest.approx(30.0)
    assert fleet.progress(50, 200).events == ()  # Nothing new, nothing to write down.
    fleet.now_s += 2
    fleet.progress(40, 200)  # Workers went back to a checkpoint.
    assert the_task(fleet).progress_percent == 20.0
    assert the_task(fleet).steps_per_s == pytest.approx(5.0)
    fleet.progress(40, 0)
    assert (the_task(fleet).progress_percent, the_task(fleet).eta_s) == (0.0, None)
    fleet.end()
    assert (the_task(fleet).progress_percent, the_task(fleet).eta_s) == (100.0, None)
    assert fleet.compacted().cluster.tasks.tasks == fleet.cluster.tasks.tasks


def test_a_pending_task_says_why_it_waits() -> None:
    fleet = fleet_in("pending")
    fleet.queue_task("2nd in the queue")
    assert the_task(fleet).reason == "2nd in the queue"
    assert fleet.queue_task("2nd in the queue").events == ()
    fleet.begin()
    assert fleet.queue_task("3rd in the queue").events == ()


def test_a_running_task_says_who_looks_after_it_and_only_that_changes() -> None:
    fleet = Fleet()
    fleet.create_task()
    fleet.begin()
    before = fleet.cluster.tasks.get(TaskId("t"))

    def note(reason: str, *, attempt: int = 1) -> list[Event]:
        command = NoteWhereabouts(task_id=TaskId("t"), attempt=attempt, reason=reason)
        return list(fleet.do(command).events)

    assert len(note("its machine is away")) == 1
    assert fleet.cluster.tasks.get(TaskId("t")) == replace(before, reason="its machine is away")
    assert note("its machine is away") == []
    assert note("an earlier one", attempt=0) == []
    fleet.do(StopTask(task_id=TaskId("t"), reason="enough"))
    assert note("its machine is back") == [], "that it stops matters more"


def test_timestamps_say_when_it_was_created_first_started_and_last_ended() -> None:
    fleet = fleet_in("failed")
    fleet.now_s += 10
    fleet.restart_task()
    task = the_task(fleet)
    created = instant(1000).wall_s
    assert (task.created_at_s, task.started_at_s, task.ended_at_s) == (created, created + 1, None)
    fleet.begin()
    fleet.now_s += 10
    fleet.end()
    task = the_task(fleet)
    assert (task.started_at_s, task.ended_at_s) == (created + 1, fleet.now.wall_s)


def test_a_history_from_before_there_were_attempts_is_understood() -> None:
    tasks = Tasks()
    tasks.apply(tasks.decide_create(CreateTask(spec=task_spec("t")), instant(0)))
    tasks.apply(
        TaskChanged(task_id=TaskId("t"), status="stopped", worker_ids=(), reason="asked to stop", at_s=1.0)
    )
    task = tasks.get(TaskId("t"))
    assert (task.status, task.attempt, task.stopping, task.cause) == ("stopped", 0, False, None)


def test_an_unknown_task_is_named_in_the_refusal() -> None:
    fleet = Fleet()
    for verb in (fleet.stop_task, fleet.restart_task, fleet.begin):
        with pytest.raises(Unknown, match="ghost"):
            verb("ghost")


def test_an_id_is_taken_once() -> None:
    fleet = Fleet()
    fleet.create_task("t")
    with pytest.raises(Conflict, match="exists already"):
        fleet.create_task("t")


def test_a_task_needs_its_dataset() -> None:
    fleet = Fleet()
    with pytest.raises(Unknown, match="dataset 'd'"):
        fleet.create_task("t", dataset_id="d")
    fleet.register("d")
    fleet.create_task("t", dataset_id="d")


@pytest.mark.parametrize(
    "fields",
    [
        {"task_id": ""},
        {"task_id": "a\nb"},
        {"name": ""},
        {"name": "x" * 10_000_000},
        {"type": ""},
        {"worker_count": 0},
        {"worker_count": -1},
        {"worker_count": 2**63},
        {"gpus_per_worker": -1},
        {"max_retries": 2**32 - 1},
        {"config_json": "[]"},
        {"config_json": '{"a": NaN}'},
        {"config_json": '{"a": "' + "x" * 300_000 + '"}'},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_bad_values_are_refused_and_change_nothing(fields: dict[str, Any]) -> None:
    fleet = Fleet()
    with pytest.raises(InvalidArgument):
        fleet.do(CreateTask(spec=task_spec(**fields)))
    assert fleet.cluster.tasks.tasks == {}


@pytest.mark.parametrize("reason", ["\ud800", "x" * 10_000, "a\0"])
def test_a_reason_that_cannot_be_written_down_is_refused(reason: str) -> None:
    fleet = Fleet()
    fleet.create_task()
    with pytest.raises(InvalidArgument, match="reason"):
        fleet.stop_task(reason=reason)
    assert the_task(fleet).status == "pending"


def test_the_oldest_ended_task_is_evicted_and_never_a_live_one() -> None:
    tasks = Tasks(max_tasks=3)
    for task_id in ("old", "ended", "alive"):
        tasks.apply(tasks.decide_create(CreateTask(spec=task_spec(task_id)), instant(0)))
    with pytest.raises(Overloaded):
        tasks.decide_create(CreateTask(spec=task_spec("one-more")), instant(0))
    fleet = Fleet()
    fleet.cluster.tasks = tasks
    fleet.stop_task("ended")
    fleet.create_task("one-more")
    assert list(tasks.tasks) == ["old", "alive", "one-more"]
    assert {"completed", "failed", "stopped"} == ENDED
