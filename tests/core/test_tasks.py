"""Tasks: exactly the transitions of the table, each with a reason, and limits that let work go on."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest

from strata.core.messages import (
    Conflict,
    CreateTask,
    InvalidArgument,
    Overloaded,
    TaskId,
    TaskStatus,
    Unknown,
)
from strata.core.tasks import ENDED, Tasks
from tests.core.builders import Fleet, instant, shown, task_spec

STATUSES: tuple[TaskStatus, ...] = get_args(TaskStatus)

WAY_TO: dict[TaskStatus, list[TaskStatus]] = {
    "pending": [],
    "running": ["running"],
    "completed": ["running", "completed"],
    "failed": ["running", "failed"],
    "stopped": ["running", "stopped"],
}

ALLOWED: set[tuple[TaskStatus, TaskStatus]] = {
    ("pending", "running"),
    ("pending", "failed"),
    ("pending", "stopped"),
    ("running", "running"),  # Its workers changed.
    ("running", "pending"),  # It waits for workers again.
    ("running", "completed"),
    ("running", "failed"),
    ("running", "stopped"),
    ("failed", "pending"),  # Somebody tries again.
    ("stopped", "pending"),
}


def fleet_with_task(status: TaskStatus) -> Fleet:
    fleet = Fleet()
    fleet.create_task("t")
    for step in WAY_TO[status]:
        fleet.now_s += 1
        fleet.advance(step)
    assert fleet.cluster.tasks.get(TaskId("t")).status == status
    return fleet


@pytest.mark.parametrize(("before", "after"), list(product(STATUSES, STATUSES)))
def test_only_the_transitions_of_the_table_happen(before: TaskStatus, after: TaskStatus) -> None:
    fleet = fleet_with_task(before)
    history = fleet.cluster.compact()
    if (before, after) in ALLOWED:
        fleet.advance(after)
        assert fleet.cluster.tasks.get(TaskId("t")).status == after
    else:
        with pytest.raises(Conflict, match=f"is {before} and cannot become {after}"):
            fleet.advance(after)
        assert fleet.cluster.compact() == history


@pytest.mark.parametrize("status", STATUSES)
def test_stop_ends_what_runs_and_leaves_what_has_ended(status: TaskStatus) -> None:
    fleet = fleet_with_task(status)
    decision = fleet.stop_task()
    task = fleet.cluster.tasks.get(TaskId("t"))
    if status in ENDED:
        assert (decision.events, task.status) == ((), status)
    else:
        assert (task.status, task.reason, task.ended_at_s) == ("stopped", "asked to stop", fleet.now.wall_s)
    assert fleet.stop_task().events == ()  # Stopping twice is no error.


def test_times_tell_when_it_was_made_first_ran_and_last_ended() -> None:
    fleet = fleet_with_task("failed")
    fleet.now_s += 10
    fleet.advance("pending")
    task = fleet.cluster.tasks.get(TaskId("t"))
    created = instant(1000).wall_s
    assert (task.created_at_s, task.started_at_s, task.ended_at_s) == (created, created + 1, None)
    fleet.advance("running")
    fleet.now_s += 10
    fleet.advance("completed")
    task = fleet.cluster.tasks.get(TaskId("t"))
    assert (task.started_at_s, task.ended_at_s) == (created + 1, fleet.now.wall_s)


def test_workers_are_kept_until_others_are_named() -> None:
    fleet = Fleet()
    fleet.create_task()
    fleet.advance("running", workers=["a", "b"])
    fleet.advance("completed")
    assert fleet.cluster.tasks.get(TaskId("t")).worker_ids == ("a", "b")


@pytest.mark.parametrize(
    "way",
    [
        [],
        ["running"],
        ["failed"],
        ["failed", "pending"],
        ["running", "pending"],
        ["running", "failed", "pending"],
        ["running", "completed"],
        ["stopped"],
        ["running", "stopped", "pending", "running"],
    ],
    ids=lambda way: "-".join(way) or "created",
)
def test_compaction_keeps_a_task_as_it_is(way: list[TaskStatus]) -> None:
    fleet = Fleet()
    fleet.create_task()
    for number, status in enumerate(way):
        fleet.now_s += 1
        fleet.advance(status, workers=[f"w{number}"])
    assert fleet.compacted().cluster.tasks.tasks == fleet.cluster.tasks.tasks
    assert shown(fleet.compacted().cluster) == shown(fleet.cluster)


def test_an_unknown_task_is_named_in_the_refusal() -> None:
    fleet = Fleet()
    with pytest.raises(Unknown, match="ghost"):
        fleet.stop_task("ghost")
    with pytest.raises(Unknown, match="ghost"):
        fleet.advance("running", "ghost")


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
    assert fleet.cluster.tasks.get(TaskId("t")).status == "pending"


def test_the_oldest_ended_task_makes_room_and_none_that_lives_does() -> None:
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
