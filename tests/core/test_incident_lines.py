"""However a failure becomes known, it is one error in the log, with what explains it."""

from __future__ import annotations

import pytest

from strata.core.event_text import describe
from strata.core.faults.failures import Failure
from strata.core.faults.incident_lines import EXPLAINED_WITHIN_S, REMEMBERED, IncidentLine, IncidentLines
from strata.core.messages import DEFAULT_JOB, RegisterWorker, WorkerId, WorkerSpec
from tests.core.builders import Fleet
from tests.core.test_incidents import killed, recover, report


class Logged:
    """The lines of a coordinator whose events these are."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.fleet.joins("a")
        spec = WorkerSpec(
            worker_id=WorkerId("c"),
            job_id=DEFAULT_JOB,
            hostname="h1",
            port=1,
            gpu_count=0,
            memory_bytes=0,
            metadata={"pid": "103"},
        )
        self.fleet.do(RegisterWorker(spec=spec, registration_id="c-1"))
        self.fleet.connect("c")
        self._lines = IncidentLines()
        self._seen = len(self.fleet.journal)
        self.now_s = 0.0
        self.said: list[tuple[str, str]] = []

    def take(self) -> None:
        events, self._seen = self.fleet.journal[self._seen :], len(self.fleet.journal)
        self._say(self._lines.committed(events, now_s=self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._say(self._lines.due(now_s=self.now_s))

    def _say(self, lines: list[IncidentLine]) -> None:
        self.said += [(level, describe(event).text) for level, event in lines]

    def errors(self) -> list[str]:
        return [text for level, text in self.said if level == "error"]


@pytest.mark.parametrize("recovered", [False, True])
@pytest.mark.parametrize("agent_first", [False, True])
def test_who_lost_a_worker_and_who_saw_it_end_write_one_error(agent_first: bool, recovered: bool) -> None:
    logged = Logged()
    if agent_first:
        report(logged.fleet, killed(3))
        logged.take()
    logged.fleet.lose("c")
    logged.take()
    if recovered:
        recover(logged.fleet)
        logged.take()
    report(logged.fleet, killed(3))
    logged.take()
    logged.wait(10 * EXPLAINED_WITHIN_S)
    (error,) = logged.errors()
    assert "rank 3 (h1, pid 103) was killed by SIGKILL" in error


def test_a_failure_that_nobody_explains_is_an_error_in_time_and_once() -> None:
    logged = Logged()
    logged.fleet.lose("c")
    logged.take()
    logged.wait(EXPLAINED_WITHIN_S / 2)
    assert [level for level, _ in logged.said] == ["warning"], "it is found meanwhile"
    logged.wait(EXPLAINED_WITHIN_S / 2)
    logged.wait(EXPLAINED_WITHIN_S)
    assert len(logged.errors()) == 1
    report(logged.fleet, killed(3))
    logged.take()
    assert len(logged.errors()) == 1
    assert "killed by SIGKILL" in logged.said[-1][1], "what comes late is found all the same"


def test_every_failure_has_its_own_error_and_little_is_remembered() -> None:
    logged = Logged()
    for number in range(3):
        report(logged.fleet, killed(0, pid=200 + number))
        recover(logged.fleet)
        logged.take()
    assert len(logged.errors()) == 3
    assert len(logged._lines._written) <= REMEMBERED


def test_a_machine_that_is_taken_away_as_announced_is_no_error() -> None:
    logged = Logged()
    report(logged.fleet, Failure(rank=0, host="h1", pid=7, exit_code=-15))
    logged.take()
    assert logged.errors() == []
    assert len(logged.said) == 1
