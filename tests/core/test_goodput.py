"""Every second that a worker reports is counted once, over restarts of everything."""

from __future__ import annotations

import pytest

from strata.core.messages import JobId, WorkerId
from strata.core.telemetry.goodput import JOBS_KEPT, LIFE_METRIC, Goodput

JOB = JobId("job")


def said(goodput: Goodput, worker: str, life: float, *parts_s: float) -> None:
    names = ("training_total_s", "checkpoint_total_s", "recovery_total_s", "waiting_total_s")
    metrics = {LIFE_METRIC: life, "loss": 1.0, **dict(zip(names, parts_s, strict=True))}
    goodput.take(JOB, WorkerId(worker), metrics)


def parts(goodput: Goodput) -> tuple[float, ...]:
    view = goodput.view(JOB)
    return (view.training_s, view.checkpoint_s, view.recovery_s, view.waiting_s)


def test_workers_and_processes_add_up_and_a_heartbeat_counts_once() -> None:
    goodput = Goodput()
    said(goodput, "a", 1.0, 8.0, 1.0, 0.0, 1.0)
    said(goodput, "a", 1.0, 8.0, 1.0, 0.0, 1.0)
    said(goodput, "b", 2.0, 8.0, 0.0, 0.0, 2.0)
    said(goodput, "a", 1.0, 10.0, 1.0, 0.0, 1.5)
    assert parts(goodput) == (18.0, 1.0, 0.0, 3.5)
    said(goodput, "a", 3.0, 1.0, 0.0, 4.0, 0.5)  # A new process in the same place.
    view = goodput.view(JOB)
    assert parts(goodput) == (19.0, 1.0, 4.0, 4.0)
    assert view.total_s == 28.0
    assert view.goodput == pytest.approx(19 / 28)
    assert view.processes == 3


def test_what_was_counted_survives_a_restart_of_the_coordinator() -> None:
    before = Goodput()
    said(before, "a", 1.0, 8.0, 1.0, 0.0, 1.0)
    after = Goodput()
    after.load(before.dump())
    said(after, "a", 1.0, 9.0, 1.0, 0.0, 1.0)
    assert parts(after) == (9.0, 1.0, 0.0, 1.0)
    assert after.view(JOB).processes == 1
    for nonsense in (b"", b"[]", b'{"job": {}}', b'{"job": 3}'):
        with pytest.raises(ValueError):
            Goodput().load(nonsense)


def test_impossible_metrics_are_not_counted() -> None:
    goodput = Goodput()
    goodput.take(JOB, WorkerId("a"), {"training_total_s": 5.0})
    said(goodput, "a", 1.0, float("nan"), 0.0, 0.0, 0.0)
    said(goodput, "a", 1.0, -1.0, 0.0, 0.0, 0.0)
    said(goodput, "a", 1.0, float("inf"), 0.0, 0.0, 0.0)
    assert goodput.view(JOB).goodput is None
    assert goodput.jobs() == []
    said(goodput, "a", 1.0, 5.0, 0.0, 0.0, 0.0)
    said(goodput, "a", 1.0, 3.0, 0.0, 0.0, 0.0)
    assert parts(goodput)[0] == 5.0, "time does not run backwards"


def test_jobs_are_bounded() -> None:
    goodput = Goodput()
    for number in range(JOBS_KEPT + 10):
        goodput.take(JobId(str(number)), WorkerId("a"), {LIFE_METRIC: 1.0, "training_total_s": 1.0})
    assert len(goodput.jobs()) == JOBS_KEPT
    assert goodput.jobs()[-1] == str(JOBS_KEPT + 9)
