"""Barriers: all or nobody, exactly once, and nobody left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.core import views
from strata.core.messages import (
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    InvalidArgument,
    Overloaded,
)
from tests.core.builders import Fleet, broken, limits, released, waiting


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.joins("a", "b", "c")
    return fleet


# --- releasing ----------------------------------------------------------------------------------------------


def test_last_arrival_releases_everyone(fleet: Fleet) -> None:
    for worker in ("c", "a"):
        ticket, decision = fleet.arrive(worker)
        assert (released(decision), ticket.outcome) == (None, None)
    fleet.now_s += 2
    _, decision = fleet.arrive("b")
    end = released(decision)
    assert end is not None
    assert (end.arrived, end.waited_s) == (("c", "a", "b"), 2.0)
    assert end.reason == "all 3 arrived within 2000.0 ms"
    assert waiting(fleet) == []


def test_arrival_orders_count_up_from_zero(fleet: Fleet) -> None:
    assert [fleet.arrive(worker)[0].order for worker in ("b", "c", "a")] == [0, 1, 2]


def test_a_number_of_participants_may_be_named(fleet: Fleet) -> None:
    fleet.arrive("a", expected=2)
    _, decision = fleet.arrive("c", expected=2)
    end = released(decision)
    assert end is not None
    assert end.arrived == ("a", "c")


def test_retried_arrival_counts_once(fleet: Fleet) -> None:
    first, _ = fleet.arrive("a", expected=2)
    again, decision = fleet.arrive("a", expected=2)
    assert (again, decision.events) == (first, ())
    assert waiting(fleet) == [("b", 1, 2)]


def test_a_second_call_of_one_worker_takes_the_place_of_its_first(fleet: Fleet) -> None:
    fleet.arrive("a", expected=2, call_id="first")
    ticket, decision = fleet.arrive("a", expected=2, call_id="second")
    assert (ticket.order, released(decision)) == (0, None)
    _, decision = fleet.arrive("b", expected=2)
    end = released(decision)
    assert end is not None
    assert end.call_ids == ("second", "b-1")


def test_barriers_of_other_names_steps_and_jobs_do_not_mix(fleet: Fleet) -> None:
    fleet.joins("x", "y", job="other")
    fleet.arrive("a", "p", expected=2)
    fleet.arrive("b", "q", expected=2)
    fleet.arrive("c", "p", step=7, expected=2)
    fleet.arrive("x", "p", expected=2)
    assert len(waiting(fleet)) == 4
    _, decision = fleet.arrive("y", "p", expected=2)
    end = released(decision)
    assert end is not None
    assert end.arrived == ("x", "y")


def test_one_expected_worker_passes_at_once(fleet: Fleet) -> None:
    _, decision = fleet.arrive("a", expected=1)
    assert released(decision) is not None


# --- knowing the outcome again ------------------------------------------------------------------------------


def run_round(fleet: Fleet, number: int, *workers: str) -> None:
    for worker in workers:
        fleet.arrive(worker, call_id=f"{worker}-{number}")


@pytest.mark.parametrize("restart", [None, Fleet.replayed, Fleet.compacted])
def test_reconnecting_worker_learns_the_outcome(
    fleet: Fleet, restart: Callable[[Fleet], Fleet] | None
) -> None:
    run_round(fleet, 1, "b", "a", "c")
    fleet = restart(fleet) if restart else fleet
    ticket, decision = fleet.arrive("a", call_id="a-1")
    assert decision.events == ()
    assert isinstance(ticket.outcome, BarrierReleased)
    assert (ticket.order, ticket.round) == (1, 0)


def test_reconnecting_worker_learns_that_the_barrier_was_broken(fleet: Fleet) -> None:
    fleet.arrive("a", call_id="a-1")
    fleet.lose("c")
    ticket, _ = fleet.arrive("a", call_id="a-1")
    assert isinstance(ticket.outcome, BarrierBroken)
    assert ticket.outcome.missing[0] == "c"


def test_a_new_call_opens_a_new_round(fleet: Fleet) -> None:
    run_round(fleet, 1, "a", "b", "c")
    ticket, decision = fleet.arrive("a", call_id="a-2")
    assert (ticket.round, ticket.outcome, released(decision)) == (1, None, None)
    run_round(fleet, 2, "b")
    _, decision = fleet.arrive("c", call_id="c-2")
    end = released(decision)
    assert end is not None
    assert end.round == 1


def test_a_late_retry_learns_its_own_round_while_the_next_one_is_open(fleet: Fleet) -> None:
    run_round(fleet, 1, "a", "b", "c")
    run_round(fleet, 2, "b", "c")  # They continue; `a` never received its release and retries.
    ticket, decision = fleet.arrive("a", call_id="a-1")
    assert decision.events == ()
    assert isinstance(ticket.outcome, BarrierReleased)
    assert ticket.round == 0
    _, decision = fleet.arrive("a", call_id="a-2")
    assert released(decision) is not None


def test_a_late_retry_learns_its_own_round_after_others_met_again(fleet: Fleet) -> None:
    fleet.arrive("a", expected=2, call_id="a-1")
    fleet.arrive("b", expected=2, call_id="b-1")
    fleet.arrive("b", expected=2, call_id="b-2")
    fleet.arrive("c", expected=2, call_id="c-1")
    for again in (fleet, fleet.replayed(), fleet.compacted()):
        ticket, decision = again.arrive("a", expected=2, call_id="a-1")
        assert (ticket.round, decision.events) == (0, ())
        assert isinstance(ticket.outcome, BarrierReleased)


def test_a_message_that_was_long_under_way_counts_in_no_later_round(fleet: Fleet) -> None:
    for number in (1, 2, 3):
        run_round(fleet, number, "a", "b", "c")
    run_round(fleet, 4, "b", "c")
    for again in (fleet, fleet.compacted()):
        ticket, decision = again.arrive("a", call_id="a-2")
        assert (ticket.round, decision.events) == (1, ())


def test_a_call_without_an_id_is_a_retry_of_the_release_it_was_part_of(fleet: Fleet) -> None:
    for worker in ("a", "b", "c"):
        fleet.arrive(worker, call_id="")
    ticket, decision = fleet.arrive("b", call_id="")
    assert decision.events == ()
    assert isinstance(ticket.outcome, BarrierReleased)


def test_a_restarted_worker_does_not_inherit_the_release_of_its_predecessor(fleet: Fleet) -> None:
    for worker in ("a", "b", "c"):
        fleet.arrive(worker, call_id="")
    fleet.joins("a", "b", "c")  # The whole job starts again.
    for restart in (fleet, fleet.replayed(), fleet.compacted()):
        ticket, decision = restart.arrive("a", call_id="")
        assert (ticket.outcome, released(decision)) == (None, None)


def test_a_broken_barrier_can_be_met_at_again_without_call_ids(fleet: Fleet) -> None:
    fleet.arrive("a", call_id="")
    fleet.lose("c")
    fleet.arrive("a", call_id="")
    _, decision = fleet.arrive("b", call_id="")
    end = released(decision)
    assert end is not None
    assert (end.arrived, end.round) == (("a", "b"), 1)


# --- time ---------------------------------------------------------------------------------------------------


def test_time_out_names_the_silent_ones(fleet: Fleet) -> None:
    fleet.arrive("b", timeout_s=5.0)
    fleet.now_s += 4.9
    assert fleet.tick().events == ()
    end = broken(fleet.tick(0.1))
    assert end.missing == ("a", "c")
    assert end.reason == (
        "1 of 3 arrived and it timed out after 5.0 s; missing: a (last heartbeat 5.0 s ago), c (last heartbeat 5.0 s ago)"
    )


def test_a_time_out_without_anybody_to_name_says_so() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.arrive("a", expected=2, timeout_s=1.0)
    end = broken(fleet.tick(1.0))
    assert (end.missing, "never registered" in end.reason) == ((), True)


def test_a_newcomer_who_has_not_come_is_not_called_missing(fleet: Fleet) -> None:
    fleet.arrive("a", timeout_s=5)
    fleet.join("d")
    assert broken(fleet.tick(5)).missing == ("b", "c")


def test_one_lost_while_others_waited_is_still_named_at_the_time_out(fleet: Fleet) -> None:
    fleet.join("d")
    fleet.lose("d")
    fleet.now_s += 1
    fleet.arrive("a", expected=2, timeout_s=5)
    fleet.lose("c")
    assert broken(fleet.tick(5)).missing == ("b", "c")


def test_the_most_impatient_caller_decides(fleet: Fleet) -> None:
    fleet.arrive("a", timeout_s=100.0)
    fleet.arrive("b", timeout_s=3.0)
    assert broken(fleet.tick(3.0)).missing == ("c",)


def test_without_a_time_the_default_applies() -> None:
    fleet = Fleet(limits(barrier_timeout_s=7.0, heartbeat_timeout_s=1000.0))
    fleet.joins("a", "b")
    fleet.arrive("a")
    assert fleet.tick(6.9).events == ()
    assert broken(fleet.tick(0.1)).arrived == ("a",)


def test_many_missing_are_counted_and_the_first_named() -> None:
    fleet = Fleet()
    fleet.joins(*(f"w{n:03}" for n in range(100)))
    fleet.arrive("w000", timeout_s=1.0)
    end = broken(fleet.tick(1.0))
    assert len(end.missing) == 99
    assert end.reason.endswith("w008 (last heartbeat 1.0 s ago) and 91 more")


# --- bad values and limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"barrier_id": ""},
        {"barrier_id": "x" * 1000},
        {"barrier_id": "a\nb"},
        {"step": -1},
        {"step": 2**60},
        {"expected": -1},
        {"expected": 10**9},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"call_id": "\ud800"},
        {"call_id": "x" * 1000},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_bad_values_are_refused_and_change_nothing(fleet: Fleet, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        fleet.arrive("a", **fields)
    assert waiting(fleet) == []


def test_callers_must_agree_on_how_many_are_expected(fleet: Fleet) -> None:
    fleet.arrive("a", expected=2)
    with pytest.raises(InvalidArgument, match="was opened for 2"):
        fleet.arrive("b", expected=3)
    assert waiting(fleet) == [("b", 1, 2)]


def test_too_many_open_barriers_are_refused() -> None:
    fleet = Fleet(limits(max_open=2))
    fleet.joins("a", "b")
    fleet.arrive("a", "p")
    fleet.arrive("a", "q")
    with pytest.raises(Overloaded):
        fleet.arrive("a", "r")
    fleet.arrive("b", "p")  # What is open may still be filled.
    fleet.arrive("a", "r")


def test_only_so_many_outcomes_are_remembered() -> None:
    fleet = Fleet(limits(ended_kept=3))
    fleet.join("a")
    for step in range(10):
        fleet.arrive("a", step=step)
    kept = [view.step for view in views.barriers(fleet.cluster, limit=100)]
    assert kept == [9, 8, 7]
    assert [view.step for view in views.barriers(fleet.compacted().cluster, limit=100)] == kept


def test_outcomes_of_large_barriers_are_remembered_for_fewer_of_them() -> None:
    fleet = Fleet(limits(arrivals_kept=10))
    fleet.joins("a", "b", "c", "d")
    for step in range(5):
        for worker in ("a", "b", "c", "d"):
            fleet.arrive(worker, step=step)
    assert [view.step for view in views.barriers(fleet.cluster, limit=100)] == [4, 3]


def test_arrivals_are_soft_and_outcomes_are_journaled(fleet: Fleet) -> None:
    fleet.arrive("a")
    assert not any(isinstance(event, BarrierArrived) for event in fleet.journal)
    again = fleet.replayed()
    assert waiting(again) == []
    for worker in ("a", "b"):  # After a restart whoever waits arrives again.
        again.arrive(worker)
    ticket, decision = again.arrive("c")
    assert isinstance(ticket, BarrierTicket)
    assert released(decision) is not None
