"""Each failure is one incident, whoever reports it and in whatever order; it ends with the recovery or the run."""

from __future__ import annotations

from typing import Literal

import pytest

from strata.core.event_text import describe
from strata.core.faults.failures import HANG, Failure, WorkerError
from strata.core.faults.incidents import IncidentView
from strata.core.messages import (
    DEFAULT_JOB,
    EndHang,
    IncidentClosed,
    IncidentReported,
    InvalidArgument,
    JobId,
    RegisterWorker,
    ReportFailure,
    ReportRecovery,
    ReportSlow,
    WorkerId,
    WorkerSpec,
)
from tests.core.builders import Fleet

GLOO = WorkerError(type="RuntimeError", message="gloo: Connection closed by peer")
TYPO = WorkerError(type="NameError", message="no 'modle'", where=("/x/a.py:3",), traceback="Traceback …")


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.joins("a", "b")
    return fleet


def killed(rank: int, *, pid: int = 0, host: str = "h1", code: int = -9) -> Failure:
    return Failure(rank=rank, host=host, pid=pid or 100 + rank, exit_code=code)


def report(fleet: Fleet, *failures: Failure, stops: bool = False, job: str = "default") -> None:
    decision: Literal["stop", "restart"] = "stop" if stops else "restart"
    fleet.do(
        ReportFailure(
            failures=failures, launch="launch-1", job_id=JobId(job), decision=decision, reason=f"to {decision}"
        )
    )  # fmt: skip


def recover(fleet: Fleet, *, before: int = 2, after: int = 2, lost: int = 7) -> None:
    fleet.do(
        ReportRecovery(
            worker_id=WorkerId("a"),
            incarnation=0,
            phases_s={"detect": 0.5, "load": 1.5},
            resumed_step=1_240,
            lost_steps=lost,
            tier="memory",
            world_before=before,
            world_after=after,
            reason="",
        )
    )


def shown(fleet: Fleet) -> list[IncidentView]:
    found = fleet.cluster.incidents.shown()
    assert fleet.replayed().cluster.incidents.shown() == found
    assert fleet.compacted().cluster.incidents.shown() == found
    return found


def test_a_kill_that_is_recovered_in_a_second_is_a_red_event_and_one_incident(fleet: Fleet) -> None:
    report(fleet, killed(1))
    (opened,) = (event for event in fleet.journal if isinstance(event, IncidentReported))
    severity, text = describe(opened)
    assert severity == "error"
    assert "rank 1 (h1, pid 101) was killed by SIGKILL (unknown); restarting" in text
    recover(fleet)
    (incident,) = shown(fleet)
    assert (incident.state, incident.rank, incident.host, incident.pid) == ("recovered", 1, "h1", 101)
    assert (incident.lost_steps, incident.resumed_step, incident.lost_s) == (7, 1_240, 2.0)
    assert incident.lost_gpu_s == 4.0, "two workers have waited"
    assert incident.phases_s == {"detect": 0.5, "load": 1.5}
    assert fleet.cluster.incidents.shown("launch-1") == fleet.cluster.incidents.shown("default")
    assert fleet.cluster.incidents.shown("another") == []


def test_a_report_that_is_said_again_counts_once(fleet: Fleet) -> None:
    report(fleet, killed(1))
    known = len(fleet.journal)
    report(fleet, killed(1))
    recover(fleet)
    report(fleet, killed(1))
    assert len(fleet.journal) == known + 2
    assert len(shown(fleet)) == 1


def test_several_machines_report_one_failure_and_the_first_failing_rank_is_found(fleet: Fleet) -> None:
    report(fleet, Failure(rank=0, host="h0", pid=1, exit_code=1, error=GLOO, at_s=1.0))
    assert shown(fleet)[0].failure_class == "network"
    report(fleet, killed(3, host="h1"))
    report(fleet, Failure(rank=4, host="h2", pid=9, exit_code=1, error=GLOO, at_s=1.0))
    (incident,) = shown(fleet)
    assert (incident.rank, incident.host, incident.failure_class) == (3, "h1", "unknown")
    assert len(incident.failures) == 3


def test_the_next_failure_is_the_next_incident_also_before_the_run_has_recovered(fleet: Fleet) -> None:
    report(fleet, killed(1))
    report(fleet, killed(1, pid=202))
    newest, before = shown(fleet)
    assert (newest.state, before.state) == ("open", "failed_again")
    recover(fleet)
    report(fleet, killed(0, pid=203), stops=True)
    assert [one.state for one in shown(fleet)] == ["stopped", "recovered", "failed_again"]


def test_a_consequence_that_is_reported_late_opens_nothing(fleet: Fleet) -> None:
    report(fleet, killed(1))
    recover(fleet)
    report(fleet, Failure(rank=0, host="h0", pid=1, exit_code=1, error=GLOO))
    (incident,) = shown(fleet)
    assert (incident.state, incident.rank, len(incident.failures)) == ("recovered", 1, 2)


def test_a_lost_worker_is_an_incident_and_says_less_than_its_agent(fleet: Fleet) -> None:
    fleet.lose("b")
    (incident,) = shown(fleet)
    assert (incident.failure_class, incident.state) == ("node_lost", "open")
    report(fleet, killed(1))
    (incident,) = shown(fleet)
    assert (incident.failure_class, incident.rank) == ("unknown", 1)


@pytest.mark.parametrize("recovered", [False, True])
def test_an_agent_that_speaks_after_the_coordinator_has_lost_the_worker_says_how_it_ended(
    fleet: Fleet, recovered: bool
) -> None:
    spec = WorkerSpec(
        worker_id=WorkerId("c"),
        job_id=DEFAULT_JOB,
        hostname="h1",
        port=1,
        gpu_count=0,
        memory_bytes=0,
        metadata={"pid": "103"},
    )
    fleet.do(RegisterWorker(spec=spec, registration_id="c-1"))
    fleet.connect("c")
    fleet.lose("c")
    if recovered:
        recover(fleet)
    report(fleet, killed(3, code=-11))
    report(fleet, killed(3, code=-11))
    (incident,) = shown(fleet)
    assert (incident.state, incident.rank) == ("recovered" if recovered else "open", 3)
    assert "was killed by SIGSEGV" in incident.text
    assert incident.reason == "to restart", "the agent's, who has decided it"
    assert len(incident.failures) == 1


def test_a_recovery_that_nobody_announced_is_an_incident_and_growth_is_none(fleet: Fleet) -> None:
    recover(fleet, before=2, after=3)
    assert shown(fleet) == []
    recover(fleet, before=3, after=2)
    (incident,) = shown(fleet)
    assert (incident.failure_class, incident.state) == ("preemption", "recovered")
    report(fleet, killed(2))
    (incident,) = shown(fleet)
    assert (incident.rank, incident.failure_class, incident.state) == (2, "unknown", "recovered")


def test_an_error_that_stops_the_run_says_what_to_do(fleet: Fleet) -> None:
    report(fleet, Failure(rank=0, host="h", pid=1, exit_code=1, error=TYPO), stops=True)
    (incident,) = shown(fleet)
    assert (incident.state, incident.failure_class, incident.decision) == ("stopped", "user_error", "stop")
    assert incident.fingerprint == "user_error/NameError/a.py:3"
    assert "Fix the program" in incident.next_step
    closed = next(event for event in fleet.journal if isinstance(event, IncidentClosed))
    assert describe(closed).severity == "error"


def test_saves_that_fail_in_a_row_are_one_incident_until_one_succeeds(fleet: Fleet) -> None:
    for name in ("c1", "c2"):
        fleet.save("a", name, status="failed", reason="NoSpace: no space left")
    (incident,) = shown(fleet)
    assert (incident.subject, incident.failure_class, incident.state) == ("save", "storage", "open")
    fleet.save("a", "c3")
    assert [one.state for one in shown(fleet)] == ["recovered"]


def test_a_slow_rank_is_an_incident_until_it_is_no_longer_slow(fleet: Fleet) -> None:
    for slow in (True, True, False, False):
        fleet.do(ReportSlow(job_id=JobId("default"), worker_id=WorkerId("b"), slow=slow, reason="3× slower"))
    (incident,) = shown(fleet)
    assert (incident.subject, incident.state) == ("slow_rank", "recovered")


def hung(rank: int, *, waits: bool = False, step: int = 40) -> Failure:
    said = "it waits for other ranks" if waits else "it is stuck itself"
    error = WorkerError(type=HANG, message=f"no step for 9 s; {said}", traceback="File a.py", step=step)
    return Failure(rank=rank, host="h1", pid=100 + rank, error=error)


def test_a_rank_that_hangs_and_is_not_ended_is_an_incident_until_steps_are_made_again(fleet: Fleet) -> None:
    report(fleet, hung(0, waits=True))
    report(fleet, hung(1))
    (incident,) = shown(fleet)
    assert (incident.state, incident.failure_class, incident.rank) == ("open", "hang", 1)
    assert (incident.decision, "hang_policy" in incident.reason) == ("continue", True)
    assert fleet.cluster.incidents.hanging() == {DEFAULT_JOB: 40}
    fleet.tick(3.0)
    fleet.do(EndHang(job_id=DEFAULT_JOB, step=41))
    fleet.do(EndHang(job_id=DEFAULT_JOB, step=42))
    (incident,) = shown(fleet)
    assert (incident.state, incident.lost_steps, incident.closed_reason) == (
        *("recovered", 0),
        "step 41 was completed after 3.0 s",
    )
    assert incident.lost_gpu_s == 6.0, "two workers have waited"
    assert fleet.cluster.incidents.hanging() == {}
    report(fleet, hung(0, step=50))
    assert [(one.rank, one.state) for one in shown(fleet)] == [(0, "open"), (1, "recovered")]


def test_a_step_made_before_a_hang_does_not_close_it(fleet: Fleet) -> None:
    report(fleet, hung(0, step=40))
    report(fleet, hung(1, step=41))
    fleet.do(EndHang(job_id=DEFAULT_JOB, step=41))
    assert [one.state for one in shown(fleet)] == ["open"], "whoever made step 41 hangs now"
    fleet.do(EndHang(job_id=DEFAULT_JOB, step=42))
    assert [one.state for one in shown(fleet)] == ["recovered"]


def test_a_rank_that_hung_and_is_killed_for_it_is_one_incident_with_both(fleet: Fleet) -> None:
    report(fleet, hung(0, waits=True))
    report(fleet, hung(1))
    report(fleet, killed(1))
    (incident,) = shown(fleet)
    assert (incident.decision, incident.rank, len(incident.failures)) == ("restart", 1, 2)
    assert "was killed by SIGKILL" in incident.text
    assert fleet.cluster.incidents.hanging() == {}, "its end is known: steps of others do not close it"
    fleet.do(EndHang(job_id=DEFAULT_JOB, step=41))
    recover(fleet)
    assert [one.state for one in shown(fleet)] == ["recovered"]
    assert shown(fleet)[0].lost_steps == 7


def test_a_report_without_failures_or_with_endless_ones_is_refused(fleet: Fleet) -> None:
    for failures in ((), tuple(killed(0, pid=n + 1) for n in range(65))):
        with pytest.raises(InvalidArgument, match="failures"):
            report(fleet, *failures)
