"""Who belongs to the fleet: incarnations, generations, ranks, and when silence means failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from strata.core import views
from strata.core.fleet import membership
from strata.core.fleet.membership import RECONNECT_S
from strata.core.fleet.run_registry import RUNS_KEPT, RunRegistry
from strata.core.messages import (
    DEFAULT_JOB,
    Command,
    DatasetId,
    DeregisterWorker,
    Event,
    IncidentReported,
    InvalidArgument,
    JobId,
    NameInUse,
    Overloaded,
    PlanEpoch,
    ReconcileCheckpoints,
    Refused,
    ReportRecovery,
    Stale,
    Unknown,
    WorkerFailed,
    WorkerForgotten,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)
from tests.core.builders import Fleet, arrival, instant, limits, notice, shown

A = WorkerId("a")


def failed(events: Sequence[Event]) -> list[str]:
    """Who has failed, and that nothing else has happened beside the incidents of it."""
    assert all(isinstance(event, WorkerFailed | IncidentReported) for event in events)
    return [event.worker_id for event in events if isinstance(event, WorkerFailed)]


FENCED: dict[str, Any] = {
    type(command).__name__: command
    for command in (
        DeregisterWorker(worker_id=A, incarnation=0, reason=""),
        arrival("a"),
        notice("a", "c1"),
        PlanEpoch(worker_id=A, incarnation=0, generation=0, dataset_id=DatasetId("d"), epoch=3),
        ReconcileCheckpoints(
            worker_id=A,
            incarnation=0,
            job_id=JobId(""),
            run_id="",
            run_generation=0,
            present=(),
            revision=0,
        ),
        ReportRecovery(
            worker_id=A,
            incarnation=0,
            phases_s={"load": 1.0},
            resumed_step=1,
            lost_steps=0,
            tier="local",
            world_before=2,
            world_after=1,
            reason="",
        ),
    )
}
"""Every command that a worker sends as itself."""


def commands_with(field: str) -> list[str]:
    return [kind.__name__ for kind in get_args(Command) if field in {f.name for f in fields(kind)}]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(limits(forget_failed_after_s=600.0))


# --- incarnations and generations ---------------------------------------------------------------------------


def test_every_registration_is_a_new_incarnation_and_a_new_generation(fleet: Fleet) -> None:
    seen = []
    for worker_id in ("a", "b", "a", "a"):
        incarnation = fleet.join(worker_id)
        seen.append((incarnation, fleet.generation()))
    assert seen == sorted(set(seen))


def test_a_retried_registration_is_the_same_incarnation(fleet: Fleet) -> None:
    first = fleet.join("a", registration="r1")
    history = fleet.cluster.compact()
    assert fleet.join("a", registration="r1") == first
    assert fleet.cluster.compact() == history
    assert fleet.join("a", registration="r2") > first


def test_a_registration_without_an_id_is_never_taken_for_a_retry(fleet: Fleet) -> None:
    assert fleet.join("a") < fleet.join("a")


def test_the_same_registration_id_with_other_facts_is_no_retry(fleet: Fleet) -> None:
    first = fleet.join("a", registration="r1", port=1)
    assert fleet.join("a", registration="r1", port=2) > first
    assert fleet.cluster.membership.members[A].spec.port == 2


def test_a_retry_after_the_worker_was_declared_failed_is_a_new_incarnation(fleet: Fleet) -> None:
    first = fleet.join("a", registration="r1")
    fleet.lose("a")
    assert fleet.join("a", registration="r1") > first


@pytest.mark.parametrize("restart", [Fleet.replayed, Fleet.compacted])
def test_incarnations_and_generations_never_repeat_after_a_restart(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.joins("a", "b")
    fleet.join("a")
    last = fleet.join("c")
    fleet.leave("c")  # The newest incarnation and the newest generation belong to nobody now.
    generation = fleet.cluster.membership.generation
    again = restart(fleet)
    assert again.join("d") > last
    assert again.generation() > generation


@pytest.mark.parametrize("change", ["join", "rejoin", "leave", "fail"])
def test_every_change_of_the_members_is_a_generation(fleet: Fleet, change: str) -> None:
    fleet.joins("a", "b")
    before = fleet.generation()
    match change:
        case "join":
            fleet.join("c")
        case "rejoin":
            fleet.join("a")
        case "leave":
            fleet.leave("a")
        case "fail":
            fleet.lose("a")
    assert fleet.generation() > before


@pytest.mark.parametrize("restart", [Fleet.replayed, Fleet.compacted])
def test_generations_are_counted_for_each_job_by_itself(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.joins("a", "b")
    fleet.join("x", job="other")
    fleet.lose("a")
    fleet = restart(fleet)
    fleet.leave("b")
    assert fleet.cluster.membership.job_changes == {"default": 4, "other": 1}


def test_a_generation_belongs_to_one_job(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.join("x", job="other")
    before = fleet.generation()
    fleet.join("y", job="other")
    assert fleet.generation() == before
    fleet.join("a", job="other")  # It moves: both jobs change.
    assert before < fleet.generation() != fleet.generation("other")
    assert (fleet.ranks(), fleet.ranks("other")) == ({"b": 0}, {"x": 0, "y": 1, "a": 2})


# --- fencing ------------------------------------------------------------------------------------------------


def test_the_list_of_fenced_commands_is_complete() -> None:
    assert sorted(FENCED) == sorted(commands_with("incarnation"))


def refused(fleet: Fleet, command: Any, refusal: type[Exception], words: str) -> None:
    history = fleet.cluster.compact()
    with pytest.raises(refusal, match=words):
        fleet.do(command)
    assert fleet.cluster.compact() == history


@pytest.mark.parametrize("kind", sorted(FENCED))
def test_a_replaced_incarnation_is_refused_whatever_it_asks(fleet: Fleet, kind: str) -> None:
    fleet.register("d")
    old = fleet.join("a")
    new = fleet.join("a")
    refused(fleet, replace(FENCED[kind], incarnation=old), Stale, f"incarnation {new} replaced it")
    fleet.do(replace(FENCED[kind], incarnation=new))


@pytest.mark.parametrize("kind", sorted(FENCED))
def test_a_failed_worker_is_refused_whatever_it_asks(fleet: Fleet, kind: str) -> None:
    fleet.register("d")
    incarnation = fleet.join("a")
    fleet.lose("a")
    for said in (incarnation, 0):
        refused(fleet, replace(FENCED[kind], incarnation=said), Stale, "declared failed")


@pytest.mark.parametrize("kind", sorted(FENCED))
def test_a_worker_that_left_is_unknown_whatever_it_asks(fleet: Fleet, kind: str) -> None:
    fleet.register("d")
    incarnation = fleet.join("a")
    fleet.leave("a")
    refused(fleet, replace(FENCED[kind], incarnation=incarnation), Unknown, "not known")


@pytest.mark.parametrize("kind", sorted(commands_with("generation")))
def test_a_stale_generation_is_refused_whatever_it_asks(fleet: Fleet, kind: str) -> None:
    fleet.register("d")
    incarnation = fleet.join("a")
    old = fleet.generation()
    fleet.join("b")
    command = replace(FENCED[kind], incarnation=incarnation, generation=old)
    refused(fleet, command, Stale, f"Generation {old} .* is over")
    fleet.do(replace(command, generation=fleet.generation()))


@pytest.mark.parametrize("kind", sorted(FENCED))
def test_an_incarnation_that_never_was_is_refused(fleet: Fleet, kind: str) -> None:
    fleet.register("d")
    fleet.join("a")
    for number in (99, -1, 2**70):
        refused(fleet, replace(FENCED[kind], incarnation=number), Stale, "is over|is not known here")


# --- why one is stale -----------------------------------------------------------------------------------------


def cause_of(fleet: Fleet, incarnation: int) -> str:
    with pytest.raises(Refused) as refusal:
        fleet.cluster.membership.admit(A, incarnation=incarnation)
    return refusal.value.cause


RESTARTS = [lambda fleet: fleet, Fleet.replayed, Fleet.compacted]


@pytest.mark.parametrize("restart", RESTARTS)
def test_only_one_whose_place_another_took_was_superseded(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    first = fleet.join("a", registration="r1")
    second = fleet.join("a", registration="r2")
    fleet = restart(fleet)
    assert cause_of(fleet, first) == "superseded"
    fleet.lose("a")
    assert (cause_of(fleet, first), cause_of(fleet, second)) == ("superseded", "failed")
    third = fleet.join("a", registration="r3")
    fleet = restart(fleet)
    assert (cause_of(fleet, second), cause_of(fleet, third + 1)) == ("superseded", "unknown")
    fleet.leave("a")
    assert cause_of(fleet, third) == "unknown"


@pytest.mark.parametrize("restart", RESTARTS)
def test_one_that_failed_is_not_superseded_by_a_retry_of_its_own_registration(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    first = fleet.join("a", registration="r1")
    fleet.lose("a")
    fleet.join("a", registration="r1")  # A copy of the call that was late.
    assert cause_of(restart(fleet), first) == "failed"


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_registration_that_is_over_cannot_come_back_late(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.join("a", registration="r1")
    fleet.lose("a")
    second = fleet.join("a", registration="r2")
    fleet = restart(fleet)
    with pytest.raises(Stale, match="was superseded by incarnation") as late:
        fleet.join("a", registration="r1")
    assert late.value.cause == "superseded"
    fleet.cluster.membership.admit(A, incarnation=second)


@pytest.mark.parametrize("restart", RESTARTS)
def test_a_registration_that_arrives_late_does_not_bring_back_who_has_left(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.join("b")
    fleet.join("a", registration="r1")
    fleet.leave("a")
    fleet = restart(fleet)
    with pytest.raises(Stale, match="is over: the worker has left") as late:
        fleet.join("a", registration="r1")  # A copy of the call that was under way for long.
    assert late.value.cause == "unknown", "whoever still asks may register again"
    assert list(fleet.cluster.membership.roster(DEFAULT_JOB)) == ["b"]
    second = fleet.join("a", registration="r2")
    fleet = restart(fleet)
    with pytest.raises(Stale, match=f"was superseded by incarnation {second}"):
        fleet.join("a", registration="r1")
    fleet.cluster.membership.admit(A, incarnation=second)


@pytest.mark.parametrize("restart", RESTARTS)
def test_one_whose_place_was_taken_stays_superseded_when_its_successor_has_left(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.join("a", registration="frozen")
    fleet.join("a", registration="its successor")
    fleet.leave("a", reason="trained to the end")
    fleet = restart(fleet)
    with pytest.raises(Stale, match="was superseded by one that has left since") as late:
        fleet.join("a", registration="frozen")  # It wakes, and has not received the reply to its call.
    assert late.value.cause == "superseded"
    assert fleet.cluster.membership.members == {}


def test_a_registration_for_the_job_before_does_not_move_a_worker_back(fleet: Fleet) -> None:
    fleet.join("a", "one", registration="r1")
    fleet.join("a", "two", registration="r2")
    with pytest.raises(Stale, match="was superseded"):
        fleet.join("a", "one", registration="r1")
    fleet.join("a", "three", registration="r2")  # An id that names another job is another registration.
    assert fleet.cluster.membership.members[A].spec.job_id == "three"


def test_registrations_of_a_limited_number_of_departed_workers_are_known(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "DEPARTED_KEPT", 2)
    for name in ("a", "b", "c"):
        fleet.join(name, registration=f"r-{name}")
        fleet.leave(name)
    assert fleet.cluster.membership.departed == {"b": ("r-b",), "c": ("r-c",)}


# --- runs -----------------------------------------------------------------------------------------------------


def test_a_job_belongs_to_one_live_run_at_a_time(fleet: Fleet) -> None:
    first = fleet.join("a", run_id="one", registration="r1")
    for other in ("a", "b"):
        with pytest.raises(
            NameInUse, match=r"used by another live run .'a' on host '10\.0\.0\.1', run one"
        ) as used:
            fleet.join(other, run_id="two")
        assert "job=" in used.value.hint
    assert fleet.join("c") > first, "one that names no run is as free as ever"
    assert fleet.join("a", run_id="one", registration="r2") > first
    fleet.join("d", "another job", run_id="two")
    with pytest.raises(NameInUse):
        fleet.join("d", run_id="three")


@pytest.mark.parametrize("gone", ["left", "failed", "dropped", "silent"])
@pytest.mark.parametrize("restart", RESTARTS)
def test_the_name_of_a_run_that_has_ended_is_free(
    fleet: Fleet, restart: Callable[[Fleet], Fleet], gone: str
) -> None:
    fleet.join("a", run_id="one")
    fleet = restart(fleet)
    match gone:
        case "left":
            fleet.leave("a")
        case "failed":
            fleet.lose("a")
        case "dropped":
            fleet.drop("a")
        case "silent":
            fleet.now_s += RECONNECT_S
    fleet.join("b", run_id="two")
    fleet.join("a", run_id="two")
    assert set(fleet.ranks()) == {"a", "b"}


def test_a_run_whose_stream_is_open_is_live_however_long_it_is_silent(fleet: Fleet) -> None:
    fleet.join("a", run_id="one")
    fleet.connect("a")
    fleet.now_s += 2 * RECONNECT_S
    with pytest.raises(NameInUse):
        fleet.join("b", run_id="two")


@pytest.mark.parametrize("restart", RESTARTS)
def test_an_earlier_generation_of_a_run_cannot_register(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.join("a", run_id="run", run_generation=3)
    fleet.leave("a")
    fleet = restart(fleet)
    with pytest.raises(Stale, match="Generation 3 of run 'run' has started") as stale:
        fleet.join("a", run_id="run", run_generation=2)
    assert stale.value.cause == "run_generation"
    fleet.join("a", run_id="run", run_generation=3)
    fleet.join("b", run_id="run", run_generation=4)
    fleet.join("c", "elsewhere", run_id="other", run_generation=0)


def test_only_so_many_runs_are_remembered() -> None:
    runs, job = RunRegistry(), JobId("j")
    for number in range(RUNS_KEPT + 2):
        runs.note(job, f"r{number}", 1)
        runs.note(job, "r0", number)
    kept = runs.compact()
    assert len(kept) == RUNS_KEPT
    assert (job, "r0", RUNS_KEPT + 1) in kept


def test_what_one_job_says_of_a_run_fences_no_other_job(fleet: Fleet) -> None:
    fleet.join("a", run_id="run", run_generation=3)
    fleet.join("x", "another job", run_id="run", run_generation=9)
    fleet.join("b", run_id="run", run_generation=3)


# --- ranks --------------------------------------------------------------------------------------------------


def test_ranks_follow_the_order_of_joining(fleet: Fleet) -> None:
    fleet.joins("c", "a", "b")
    assert fleet.ranks() == {"c": 0, "a": 1, "b": 2}


def test_a_worker_that_registers_again_in_place_keeps_its_rank(fleet: Fleet) -> None:
    fleet.joins("a", "b", "c")
    fleet.join("a")
    assert fleet.ranks() == {"a": 0, "b": 1, "c": 2}
    assert fleet.compacted().ranks() == fleet.ranks()


def test_a_worker_that_comes_back_after_a_loss_is_last(fleet: Fleet) -> None:
    fleet.joins("a", "b", "c")
    fleet.lose("a")
    assert fleet.ranks() == {"b": 0, "c": 1}
    fleet.join("a")
    assert fleet.ranks() == {"b": 0, "c": 1, "a": 2}
    assert [worker.id for worker in views.workers(fleet.cluster)] == ["b", "c", "a"]


# --- silence and dropped streams ----------------------------------------------------------------------------


def test_a_dropped_stream_means_failure_after_the_grace(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.drop("a")
    assert fleet.tick(0.49).events == ()
    failed, incident = fleet.tick(0.01).events
    assert isinstance(incident, IncidentReported)
    assert (incident.failure_class, incident.decision) == ("node_lost", "restart")
    assert isinstance(failed, WorkerFailed)
    assert (failed.worker_id, failed.reason) == (
        "a",
        "connection lost 0.5 s ago, not reconnected",
    )
    assert fleet.ranks() == {"b": 0}


def test_a_stream_that_comes_back_within_the_grace_changes_nothing(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.drop("a")
    fleet.now_s += 0.4
    fleet.connect("a")
    assert fleet.tick(10).events == ()


def test_a_stall_of_the_coordinator_is_counted_against_nobody(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.drop("a")
    fleet.now_s += 9.9
    fleet.stall(9.8)
    assert fleet.tick(0.3).events == ()
    assert failed(fleet.tick(0.1).events) == ["a"]
    fleet.stall(60.0)
    assert fleet.tick(29.9).events == (), "no heartbeat is later than now"
    assert failed(fleet.tick(0.2).events) == ["b"]


def test_the_end_of_an_older_incarnations_stream_does_not_affect_the_newer(fleet: Fleet) -> None:
    old = fleet.join("a")
    fleet.join("a")
    fleet.drop("a", incarnation=old)
    assert fleet.tick(5).events == ()


def test_silence_means_failure_after_the_heartbeat_timeout(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.now_s += 20
    fleet.beat("b")
    assert fleet.tick(9.9).events == ()
    failed, _ = fleet.tick(0.1).events
    assert isinstance(failed, WorkerFailed)
    assert failed.worker_id == "a"
    assert "no heartbeat for 30.0 s" in failed.reason


def test_everyone_lost_in_one_tick_has_a_generation_of_its_own(fleet: Fleet) -> None:
    fleet.joins("a", "b", "c")
    failures = [event for event in fleet.tick(31).events if isinstance(event, WorkerFailed)]
    assert [event.worker_id for event in failures] == ["a", "b", "c"]
    assert len({event.generation for event in failures}) == 3


def test_the_wall_clock_decides_nothing(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.lose("b")
    for jump_s in (1e9, -1e9):
        jumped = replace(instant(fleet.now_s), wall_s=fleet.now.wall_s + jump_s)
        assert list(fleet.cluster.membership.decide_tick(jumped)) == []


@pytest.mark.parametrize("restart", [Fleet.replayed, Fleet.compacted])
def test_after_a_restart_everyone_has_a_full_timeout_to_come_back(
    fleet: Fleet, restart: Callable[[Fleet], Fleet]
) -> None:
    fleet.join("a")
    fleet.drop("a")
    fleet.now_s += 1000  # The coordinator was down that long: the silence was its own.
    again = restart(fleet)
    assert again.tick(29.9).events == ()
    assert [type(event) for event in again.tick(0.1).events] == [WorkerFailed, IncidentReported]


# --- forgetting and limits ----------------------------------------------------------------------------------


def test_a_failed_worker_is_forgotten_in_the_end(fleet: Fleet) -> None:
    fleet.joins("a", "b")
    fleet.lose("a")
    generation = fleet.generation()
    for _ in range(24):
        fleet.beat("b")
        assert fleet.tick(25).events == ()
    fleet.beat("b")
    (forgotten,) = fleet.tick(1).events
    assert isinstance(forgotten, WorkerForgotten)
    assert list(fleet.cluster.membership.members) == ["b"]
    assert fleet.generation() == generation  # It had stopped being a member long before.


def test_a_worker_that_came_back_is_not_forgotten(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.lose("a")
    fleet.join("a")
    fleet.now_s += 599
    fleet.beat("a")
    fleet.now_s += 20
    assert fleet.tick().events == ()


def test_a_full_fleet_refuses_strangers_and_keeps_its_own() -> None:
    fleet = Fleet(limits(max_workers=2))
    fleet.joins("a", "b")
    with pytest.raises(Overloaded, match="limit"):
        fleet.join("c")
    fleet.join("a")  # Known already: registering again needs no further place.
    fleet.leave("b")
    fleet.join("c")


@pytest.mark.parametrize("registration", ["\ud800", "x" * 10_000])
def test_a_registration_id_that_cannot_be_written_down_is_refused(fleet: Fleet, registration: str) -> None:
    with pytest.raises(InvalidArgument, match="registration_id"):
        fleet.join("a", registration=registration)
    assert fleet.cluster.membership.members == {}


# --- reasons and history ------------------------------------------------------------------------------------


def test_every_change_says_why(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.join("a")
    fleet.lose("a")
    fleet.join("a")
    fleet.leave("a", reason="done")
    told = [e.reason for e in fleet.journal if isinstance(e, WorkerJoined | WorkerFailed | WorkerLeft)]
    assert told == [
        "'a' is new",
        "'a' registered again; incarnation 1 is fenced",
        "connection lost 0.5 s ago, not reconnected",
        "'a' rejoined after a failure",
        "done",
    ]


def test_compaction_keeps_jobs_seats_states_and_numbers(fleet: Fleet) -> None:
    fleet.joins("a", "b", "c", "d")
    fleet.join("x", job="other")
    fleet.join("gone", job="empty")
    fleet.leave("gone")
    fleet.join("b")
    fleet.lose("c")
    fleet.join("c")
    fleet.lose("a")
    fleet.leave("d")
    fleet.join("x")
    for again in (fleet.replayed(), fleet.compacted(), fleet.compacted().compacted()):
        assert shown(again.cluster) == shown(fleet.cluster)
        assert again.cluster.membership.members == fleet.cluster.membership.members
        assert again.cluster.compact() == fleet.cluster.compact()
