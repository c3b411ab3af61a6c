"""Machines that go: asked once with the earliest deadline, drained when all have left or time is over, remembered, and what was lost."""

from __future__ import annotations

from typing import Any

import pytest

from strata.core.event_text import describe
from strata.core.fleet.drains import Draining, DrainView
from strata.core.messages import (
    CancelDrain,
    ClockResumed,
    DrainHost,
    HandoverRecorded,
    HostDrained,
    InvalidArgument,
    JobId,
    ReportHandover,
    ReportRecovery,
    Unknown,
    WorkerId,
)
from tests.core.builders import Fleet


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.join("job-rank0", "job", hostname="a")
    fleet.join("job-rank1", "job", hostname="b")
    return fleet


def drain(fleet: Fleet, host: str = "b", *, within_s: float = 90.0, agents: int = 1) -> None:
    fleet.do(DrainHost(host=host, within_s=within_s, reason="rack 4.", by="ada", agents=agents))


def handover(fleet: Fleet, *, node: str = "b_1", **fields: Any) -> None:
    said: dict[str, Any] = {
        "host": "b",
        "node": node,
        "launch": "run",
        "job_id": None,
        "saved_step": 7,
        "lost_steps": 0,
        "where": "durable",
        "reason": "step 7 is durable: 0 steps lost",
    }
    fleet.do(ReportHandover(**{**said, **fields}))


def recovered(fleet: Fleet, *, lost: int, job: str = "job", hosts: tuple[str, ...] = ()) -> None:
    fleet.do(
        ReportRecovery(
            worker_id=WorkerId(f"{job}-rank0"),
            incarnation=0,
            phases_s={"load": 0.1},
            resumed_step=40,
            lost_steps=lost,
            tier="memory",
            world_before=2,
            world_after=1,
            reason="",
            hosts=hosts,
        )
    )


def shown(fleet: Fleet) -> list[DrainView]:
    found = fleet.cluster.drains.shown()
    for other in (fleet.replayed(), fleet.compacted()):
        assert other.cluster.drains.shown() == found
        assert [one.left for one in other.cluster.drains.hosts.values()] == [
            one.left for one in fleet.cluster.drains.hosts.values()
        ]
    return found


def test_a_machine_is_draining_until_its_agents_have_left(fleet: Fleet) -> None:
    drain(fleet, agents=2)
    (one,) = shown(fleet)
    assert (one.state, one.reason, one.by, one.deadline - one.since) == ("draining", "rack 4", "ada", 90.0)
    handover(fleet)
    handover(fleet)  # A retried call counts once.
    assert shown(fleet)[0].state == "draining"
    handover(fleet, node="b_2")
    (one,) = shown(fleet)
    assert (one.state, one.outcome) == ("drained", "2 agents left before the deadline")
    (run,) = one.handovers
    assert (run.run, run.lost_steps, run.where) == ("job", 0, "durable")


def test_a_machine_without_agents_is_drained_at_once(fleet: Fleet) -> None:
    drain(fleet, agents=0)
    assert shown(fleet)[0].state == "drained"


def test_at_its_deadline_a_machine_is_drained_whoever_is_left(fleet: Fleet) -> None:
    drain(fleet, agents=2)
    handover(fleet)
    fleet.tick(89.9)
    assert shown(fleet)[0].state == "draining"
    (event,) = (e for e in fleet.tick(0.2).events if isinstance(e, HostDrained))
    assert event.reason == "the deadline has passed; 1 of 2 agents had left"
    assert not [e for e in fleet.tick(60).events if isinstance(e, HostDrained)]


def test_a_deadline_outlives_a_restart_whose_clock_is_another(fleet: Fleet) -> None:
    drain(fleet)
    again = fleet.replayed()
    again.now_s = fleet.now_s + 80  # Of the same wall clock.
    again.observe(ClockResumed())
    assert again.cluster.drains.left_s("b", again.now) == pytest.approx(10)
    again.tick(11)
    assert again.cluster.drains.shown()[0].state == "drained"


def test_the_earlier_deadline_counts(fleet: Fleet) -> None:
    drain(fleet, within_s=90)
    drain(fleet, within_s=300)
    assert fleet.cluster.drains.left_s("b", fleet.now) == 90
    drain(fleet, within_s=30)
    assert fleet.cluster.drains.left_s("b", fleet.now) == 30
    assert len(shown(fleet)) == 1


def test_nobody_joins_from_there_until_it_is_cancelled(fleet: Fleet) -> None:
    drain(fleet)
    with pytest.raises(Draining, match="'b' is draining: rack 4") as refusal:
        fleet.cluster.drains.admit("b")
    assert refusal.value.hint == "To use it again: strata drain b --cancel"
    fleet.tick(91)
    with pytest.raises(Draining, match="is drained"):
        fleet.cluster.drains.admit("b")
    fleet.cluster.drains.admit("a")
    fleet.do(CancelDrain(host="b", by="bob"))
    fleet.cluster.drains.admit("b")
    assert shown(fleet) == []
    with pytest.raises(Unknown, match="drained machine"):
        fleet.do(CancelDrain(host="b", by="bob"))


def test_what_was_lost_is_what_those_who_continue_say(fleet: Fleet) -> None:
    drain(fleet)
    handover(fleet, saved_step=40, lost_steps=None, where="memory", reason="step 40 is in memory")
    assert shown(fleet)[0].handovers[0].lost_steps is None
    recovered(fleet, lost=3)
    (run,) = shown(fleet)[0].handovers
    assert (run.lost_steps, run.saved_step) == (3, 40)
    assert run.reason == "the run continued at step 40 from memory with 1 worker; 3 steps lost"
    recovered(fleet, lost=9)  # Of something else.
    assert shown(fleet)[0].handovers[0].lost_steps == 3


def test_a_recovery_that_is_faster_than_the_agent_is_not_forgotten(fleet: Fleet) -> None:
    drain(fleet)
    recovered(fleet, lost=2)
    handover(fleet, lost_steps=None)
    (one,) = shown(fleet)
    assert (one.state, one.handovers[0].lost_steps) == ("drained", 2)


def test_a_late_report_of_the_recovery_before_says_nothing(fleet: Fleet) -> None:
    drain(fleet)
    recovered(fleet, lost=6, hosts=("a", "b"))  # When the machine joined.
    assert shown(fleet)[0].handovers == ()
    handover(fleet, lost_steps=None)
    recovered(fleet, lost=6, hosts=("a", "b"))
    assert shown(fleet)[0].handovers[0].lost_steps is None
    recovered(fleet, lost=1, hosts=("a",))
    assert shown(fleet)[0].handovers[0].lost_steps == 1


def test_a_recovery_of_another_job_says_nothing(fleet: Fleet) -> None:
    fleet.join("other-rank0", "other", hostname="a")
    drain(fleet)
    recovered(fleet, lost=5, job="other")
    assert shown(fleet)[0].handovers == ()


def test_an_agent_that_leaves_by_itself_is_in_the_history_alone(fleet: Fleet) -> None:
    handover(fleet)
    (event,) = (e for e in fleet.journal if isinstance(e, HandoverRecorded))
    assert event.job_id == JobId("job")
    assert describe(event).text == "job leaves machine b: step 7 is durable: 0 steps lost"
    assert shown(fleet) == []


@pytest.mark.parametrize("within_s", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_deadline_is_a_time_to_come(fleet: Fleet, within_s: float) -> None:
    with pytest.raises(InvalidArgument):
        drain(fleet, within_s=within_s)
    assert shown(fleet) == []
