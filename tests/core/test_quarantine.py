"""Machines out of use: put there once with a reason, cleared, kept over restarts, and only for what was a device's fault."""

from __future__ import annotations

import pytest

from strata.core.event_text import describe
from strata.core.faults.failures import Failure, WorkerError
from strata.core.faults.incidents import IncidentView
from strata.core.faults.restarts import Policy, PolicyError, Restarts, Verdict
from strata.core.fleet.quarantine import Quarantined, QuarantineView
from strata.core.messages import (
    ClearHost,
    HostCleared,
    HostQuarantined,
    InvalidArgument,
    JobId,
    QuarantineHost,
    ReportFailure,
    Unknown,
)
from tests.core.builders import Fleet

ECC = Failure(
    rank=3,
    host="node-7",
    pid=812,
    gpu="3",
    exit_code=1,
    error=WorkerError(type="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"),
)
BUG = Failure(
    rank=0, host="node-8", pid=9, exit_code=1, error=WorkerError(type="KeyError", message="lr", traceback="t")
)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def shown(fleet: Fleet) -> list[QuarantineView]:
    found = fleet.cluster.quarantine.shown()
    assert fleet.replayed().cluster.quarantine.shown() == found
    assert fleet.compacted().cluster.quarantine.shown() == found
    return found


def incidents(fleet: Fleet) -> list[IncidentView]:
    return [one for one in fleet.cluster.incidents.shown() if one.subject == "quarantine"]


def add(fleet: Fleet, host: str = "node-7", reason: str = "GPU 3 has ECC errors.") -> None:
    fleet.do(QuarantineHost(host=host, reason=reason, by="ada"))


def report(fleet: Fleet, *failures: Failure, quarantine: bool = True) -> None:
    fleet.do(
        ReportFailure(
            failures=failures,
            launch="launch",
            job_id=JobId("llm"),
            decision="restart",
            reason="",
            quarantine=quarantine,
        )
    )


def test_a_machine_is_refused_with_its_reason_until_it_is_cleared(fleet: Fleet) -> None:
    fleet.cluster.quarantine.admit("node-7")
    add(fleet)
    with pytest.raises(Quarantined) as refused:
        fleet.cluster.quarantine.admit("node-7")
    assert str(refused.value.message) == "The machine 'node-7' is quarantined: GPU 3 has ECC errors."
    assert refused.value.hint == "When it is fixed: strata quarantine clear node-7"
    fleet.cluster.quarantine.admit("node-8")
    (one,) = shown(fleet)
    assert (one.host, one.by, one.run) == ("node-7", "ada", "")
    fleet.do(ClearHost(host="node-7", by="ada"))
    fleet.cluster.quarantine.admit("node-7")
    assert shown(fleet) == []


def test_it_is_an_event_that_says_so_and_an_incident_until_it_is_cleared(fleet: Fleet) -> None:
    add(fleet)
    (event,) = (event for event in fleet.journal if isinstance(event, HostQuarantined))
    assert describe(event) == ("error", "machine node-7 quarantined by ada: GPU 3 has ECC errors")
    (incident,) = incidents(fleet)
    assert (incident.state, incident.host, incident.run) == ("open", "node-7", "")
    assert incident.next_step == "Fix the machine, then: strata quarantine clear node-7"
    fleet.do(ClearHost(host="node-7", by="bob"))
    (cleared,) = (event for event in fleet.journal if isinstance(event, HostCleared))
    assert describe(cleared) == ("success", "machine node-7 released from quarantine: cleared by bob")
    assert [one.state for one in incidents(fleet)] == ["recovered"]


def test_a_second_time_changes_nothing_and_the_first_reason_stays(fleet: Fleet) -> None:
    add(fleet)
    known = len(fleet.journal)
    add(fleet, reason="another")
    assert len(fleet.journal) == known
    assert shown(fleet)[0].reason == "GPU 3 has ECC errors"


def test_what_is_not_there_cannot_be_cleared(fleet: Fleet) -> None:
    add(fleet)
    with pytest.raises(Unknown) as refused:
        fleet.do(ClearHost(host="node-9", by="ada"))
    assert refused.value.hint == "Quarantined machines: node-7."


@pytest.mark.parametrize("host", ["", "x" * 1_000, "a\0b"])
def test_a_name_that_is_none_is_refused(fleet: Fleet, host: str) -> None:
    with pytest.raises(InvalidArgument):
        add(fleet, host)


def test_a_run_whose_policy_says_so_takes_the_machine_of_a_failed_gpu_out_of_use(fleet: Fleet) -> None:
    report(fleet, ECC)
    (one,) = shown(fleet)
    assert (one.host, one.by, one.run) == ("node-7", "the policy of llm", "llm")
    assert "uncorrectable ECC error" in one.reason
    assert {incident.subject for incident in fleet.cluster.incidents.shown("llm")} == {"run", "quarantine"}


@pytest.mark.parametrize(
    ("failure", "quarantine"),
    [(BUG, True), (ECC, False), (Failure(host="", exit_code=1, device_faults=("Xid",)), True)],
)
def test_nothing_else_takes_a_machine_out_of_use(fleet: Fleet, failure: Failure, quarantine: bool) -> None:
    report(fleet, failure, quarantine=quarantine)
    assert shown(fleet) == []


def test_the_policy_decides_it_for_gpus_alone() -> None:
    restarts = Restarts(Policy.parse("gpu=quarantine"))
    verdict = restarts.failed(ECC, lasted_s=5.0, now_s=1.0)
    assert (verdict.decision, verdict.quarantine) == ("restart", True)
    assert "quarantines a machine whose GPU has failed" in verdict.reason
    assert not restarts.failed(BUG, lasted_s=5.0, now_s=2.0).quarantine
    assert not Restarts(Policy()).failed(ECC, lasted_s=5.0, now_s=1.0).quarantine
    with pytest.raises(PolicyError, match="preemption is 'quarantine'; it may be stop or continue"):
        Policy.parse("preemption=quarantine")


DAMAGED = Failure(
    rank=2,
    host="node-9",
    pid=5,
    exit_code=1,
    error=WorkerError(type="ReplicaDamaged", message="The state of rank 2 was corrupted 3 times"),
)


def test_a_machine_that_corrupts_again_and_again_is_out_of_use_whatever_the_policy_but_stop(
    fleet: Fleet,
) -> None:
    def verdict(policy: str = "", *, failure: Failure = DAMAGED, can_quarantine: bool = True) -> Verdict:
        restarts = Restarts(Policy.parse(policy))
        return restarts.failed(failure, lasted_s=100.0, now_s=1.0, can_quarantine=can_quarantine)

    assert verdict().quarantine
    assert "was corrupted 3 times" in verdict().reason
    assert verdict("gpu=stop").decision == "stop"
    assert not verdict(failure=ECC).quarantine  # That is the policy's to say.
    alone = verdict(can_quarantine=False)
    assert (alone.decision, alone.quarantine) == ("restart", False)
    report(fleet, DAMAGED)
    (held,) = shown(fleet)
    assert held.host == "node-9"
