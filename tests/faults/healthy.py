"""Workers that do nothing wrong, beside whatever goes wrong: they keep reporting, and none of it may be lost or held against them."""

from __future__ import annotations

import time
from types import TracebackType

from strata import TrainingOrchestrator
from strata.coordinator.journal.sqlite import read_story
from strata.core.messages import CheckpointCompleted
from tests.service.fleet import Fleet
from tests.support import Coordinator

PROBE_EVERY_S = 0.01


class Healthy:
    """`count` workers in a process of their own, under load from the first moment."""

    def __init__(self, coordinator: Coordinator, *, count: int = 4, address: str = "") -> None:
        self._coordinator = coordinator
        self.names = [f"healthy-{number}" for number in range(count)]
        self.fleet = Fleet(address or coordinator.address, env={"STRATA_JOB_ID": "healthy"})
        answers = self.fleet.register(*self.names)
        self._incarnations = {answer["worker_id"]: answer["incarnation"] for answer in answers}
        for name in self.names:
            self.fleet.call(name, "begin_load")
        self._probe = TrainingOrchestrator(coordinator.address, job_id="probe")
        self._probe.register_worker("probe")
        assert self._probe.wait_connected(60)

    def round_trips_s(self, duration_s: float) -> list[float]:
        """How long a message on a session took to be answered, of one after the other: the way that heartbeats go, which are not
        answered themselves."""
        taken = []
        deadline_s = time.monotonic() + duration_s
        while time.monotonic() < deadline_s:
            began_s = time.perf_counter()
            self._probe.barrier(f"probe-{time.monotonic_ns()}", participants=1, timeout_s=60)
            taken.append(time.perf_counter() - began_s)
            time.sleep(PROBE_EVERY_S)
        return taken

    def check(self) -> dict[str, list[str]]:
        """Ends the load. Everything that was acknowledged is known, and nobody is another incarnation than at first."""
        acknowledged: dict[str, list[str]] = {"datasets": [], "checkpoints": []}
        for name in self.names:
            report = self.fleet.call(name, "end_load")
            assert report["errors"] == [], report["errors"]
            for kind, names in acknowledged.items():
                names += report[kind]
        assert all(self.fleet.call(name, "wait_connected", 60.0) for name in self.names)
        known = {row["id"]: row for row in self._coordinator.get("/api/workers")}
        now = [self.fleet.call(name, "is_current") for name in self.names]
        assert now == [True] * len(self.names)
        assert {name: known[name]["incarnation"] for name in self.names} == self._incarnations
        statuses = {name: known[name]["status"] for name in self.names}
        assert set(statuses.values()) <= {"active", "training"}, statuses
        there = {row["id"] for row in self._coordinator.get("/api/datasets")}
        assert set(acknowledged["datasets"]) <= there
        lost = set(acknowledged["checkpoints"]) - completed_checkpoints(self._coordinator)
        assert not lost, f"lost: {sorted(lost)[:5]}"
        assert acknowledged["checkpoints"], "there was no load"
        return acknowledged

    def __enter__(self) -> Healthy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probe.close()
        self.fleet.close()


def completed_checkpoints(coordinator: Coordinator) -> set[str]:
    """Every one in the journal: the listing shows only the newest."""
    story = (entry.event for entry in read_story(coordinator.data_dir))
    return {str(event.checkpoint_id) for event in story if isinstance(event, CheckpointCompleted)}


def p99(taken_s: list[float]) -> float:
    return sorted(taken_s)[int(0.99 * (len(taken_s) - 1))]
