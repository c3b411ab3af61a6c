"""Barriers whose members are lost, replaced or joined by others while some of them wait."""

from __future__ import annotations

import pytest

from strata.core import views
from strata.core.messages import BarrierBroken, Stale
from tests.core.builders import Fleet, broken, released, waiting


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.joins("a", "b", "c")
    return fleet


# --- losses -------------------------------------------------------------------------------------------------


def test_loss_breaks_the_barrier_and_names_the_missing() -> None:
    fleet = Fleet()
    workers = [f"w{n}" for n in range(8)]
    fleet.joins(*workers)
    for worker in workers[:6]:
        fleet.arrive(worker)
    end = broken(fleet.lose("w7"))
    assert end.arrived == tuple(workers[:6])
    assert end.missing == ("w7", "w6")
    assert end.reason.startswith("6 of 8 arrived and 'w7' was lost (connection lost")
    assert "w6 (last heartbeat" in end.reason
    assert waiting(fleet) == []


def test_goodbye_breaks_the_barrier_too(fleet: Fleet) -> None:
    fleet.arrive("a")
    end = broken(fleet.leave("c", reason="scaled down"))
    assert end.missing == ("c", "b")
    assert "c (left)" in end.reason


def test_loss_of_one_who_had_arrived_breaks_the_barrier(fleet: Fleet) -> None:
    fleet.joins("d", "e")
    fleet.arrive("a", expected=3)
    fleet.arrive("b", expected=3)
    end = broken(fleet.lose("b"))
    assert (end.arrived, end.missing[0]) == (("a",), "b")


def test_the_one_who_was_lost_is_notified_too(fleet: Fleet) -> None:
    """A barrier where only the lost worker stood still ends: its call may be waiting."""
    fleet.arrive("a")
    end = broken(fleet.lose("a"))
    assert (end.arrived, end.missing[0]) == ((), "a")


def test_loss_of_a_bystander_breaks_nothing(fleet: Fleet) -> None:
    fleet.join("d")
    fleet.arrive("a", expected=2)
    assert [e for e in fleet.lose("d").events if isinstance(e, BarrierBroken)] == []
    _, decision = fleet.arrive("b", expected=2)
    assert released(decision) is not None


def test_loss_in_one_job_leaves_the_others_barriers_alone(fleet: Fleet) -> None:
    fleet.joins("x", "y", job="other")
    fleet.arrive("x")
    fleet.lose("a")
    assert waiting(fleet) == [("b", 1, 2)]


def test_a_worker_that_moves_to_another_job_is_lost_to_the_old_one(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.join("c", job="other")
    assert waiting(fleet) == []
    (view,) = views.barriers(fleet.cluster, limit=9)
    assert (view.status, view.missing) == ("broken", ["c", "b"])


def test_one_loss_ends_every_barrier_that_needs_the_lost(fleet: Fleet) -> None:
    fleet.arrive("a", "p")
    fleet.arrive("b", "q")
    fleet.arrive("b", "small", expected=2)
    ends = [event for event in fleet.lose("c").events if isinstance(event, BarrierBroken)]
    assert [end.barrier_id for end in ends] == ["p", "q"]
    assert waiting(fleet) == [("small", 1, 2)]


def test_the_arrival_of_a_replaced_incarnation_does_not_count(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.arrive("b")
    old, _ = fleet.arrive("a")
    joined = fleet.join("a")
    end = [e for e in fleet.journal if isinstance(e, BarrierBroken)][-1]
    assert (end.arrived, end.missing, end.round) == (("b",), ("a", "c"), old.round)
    assert "incarnation 1 is fenced" in end.reason
    for worker in ("b", "c"):
        _, decision = fleet.arrive(worker, call_id=f"{worker}-2")
        assert released(decision) is None
    _, decision = fleet.arrive("a", incarnation=joined, call_id="a-2")
    assert released(decision) is not None


def test_a_worker_replaced_before_it_arrived_keeps_its_place(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.arrive("b")
    fleet.join("c")
    assert waiting(fleet) == [("b", 2, 3)]
    _, decision = fleet.arrive("c")
    assert released(decision) is not None


def test_a_zombie_cannot_pass_a_barrier(fleet: Fleet) -> None:
    fleet.arrive("a", expected=2)
    fleet.lose("c")
    with pytest.raises(Stale):
        fleet.arrive("c", expected=2)
    assert waiting(fleet) == [("b", 1, 2)]


# --- joins --------------------------------------------------------------------------------------------------


def test_joins_do_not_break_a_waiting_barrier(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.arrive("b")
    fleet.join("d")
    _, decision = fleet.arrive("c")
    end = released(decision)
    assert end is not None
    assert (end.arrived, end.generation) == (("a", "b", "c"), fleet.generation())


def test_a_newcomer_who_comes_is_awaited_beside_the_others_and_not_in_their_place(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.join("d")
    fleet.arrive("d")
    _, decision = fleet.arrive("b")
    assert released(decision) is None  # Three have come, but `c` was expected and has not.
    _, decision = fleet.arrive("c")
    end = released(decision)
    assert end is not None
    assert end.arrived == ("a", "d", "b", "c")


def test_a_newcomer_does_not_make_up_for_a_loss(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.join("d")
    assert broken(fleet.lose("c")).missing == ("c", "b")


def test_loss_of_a_newcomer_who_had_not_come_breaks_nothing(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.join("d")
    fleet.lose("d")
    assert waiting(fleet) == [("b", 1, 3)]


def test_a_barrier_may_wait_for_workers_that_have_yet_to_register() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.arrive("a", expected=2)
    fleet.join("b")
    _, decision = fleet.arrive("b", expected=2)
    assert released(decision) is not None


# --- generations --------------------------------------------------------------------------------------------


def test_an_arrival_that_names_its_generation_is_not_left_behind_by_a_join(fleet: Fleet) -> None:
    old = fleet.generation()
    fleet.arrive("a", generation=old)
    fleet.join("d")
    end = [event for event in fleet.journal if isinstance(event, BarrierBroken)][-1]
    assert (end.arrived, end.missing) == (("a",), ("b", "c"))
    assert f"generation {old} is over ('d' is new)" in end.reason
    with pytest.raises(Stale):
        fleet.arrive("b", generation=old)


def test_one_arrival_with_a_generation_binds_the_barrier(fleet: Fleet) -> None:
    fleet.arrive("a")
    fleet.arrive("b", generation=fleet.generation())
    fleet.join("d")
    assert waiting(fleet) == []


def test_a_barrier_of_one_generation_ends_with_any_loss(fleet: Fleet) -> None:
    fleet.join("d")
    fleet.arrive("a", expected=2, generation=fleet.generation())
    assert broken(fleet.lose("d")).missing == ("d", "b", "c")


def test_a_barrier_of_one_generation_releases_within_it(fleet: Fleet) -> None:
    for worker in ("a", "b"):
        fleet.arrive(worker, generation=fleet.generation())
    fleet.join("x", job="other")
    _, decision = fleet.arrive("c", generation=fleet.generation())
    end = released(decision)
    assert end is not None
    assert end.generation == fleet.generation()
