"""What a run has cost, reckoned by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.events import Outcome
from strata.core.faults.cost import MEANINGS, CostView, PriceList, cost
from strata.core.faults.failures import CLASSES, FailureClass
from strata.core.faults.incidents import Cost, Incident, Incidents
from strata.core.messages import IncidentClosed, IncidentReported, Instant, JobId, RecoveryRecorded, WorkerId
from strata.core.telemetry.goodput import Goodput, GoodputView

RUN = JobId("llm")


def spent(
    *, training: float, checkpoint: float = 0.0, recovery: float = 0.0, waiting: float = 0.0
) -> GoodputView:
    total = training + checkpoint + recovery + waiting
    return GoodputView(
        job_id=RUN,
        task_id=None,
        training_s=training,
        checkpoint_s=checkpoint,
        recovery_s=recovery,
        waiting_s=waiting,
        total_s=total,
        goodput=training / total if total else None,
        processes=1,
        queued_s=None,
    )


def incident(
    number: int,
    kind: FailureClass,
    lost_gpu_s: float | None,
    outcome: Outcome = "recovered",
    *,
    saved: tuple[int, float] = (0, 0.0),
) -> Incident:
    reported = IncidentReported(
        incident_id=number,
        job_id=RUN,
        launch="",
        subject="run",
        failure_class=kind,
        fingerprint="",
        first=None,
        failures=(),
        what="",
        decision="",
        reason="",
        at_s=0.0,
    )
    closed = IncidentClosed(
        incident_id=number,
        job_id=RUN,
        outcome=outcome,
        reason="",
        at_s=1.0,
        lost_gpu_s=lost_gpu_s,
        saved_steps=saved[0],
        saved_gpu_s=saved[1],
    )
    return Incident(reported=reported, opened_at_s=0.0, closed=closed)


def reckon(view: GoodputView, *incidents: Incident, gpus: int = 1, price: float | None = 3.6) -> CostView:
    return cost(RUN, spent=[view], incidents=incidents, gpus_per_worker=gpus, price=price, currency="USD")


def test_a_run_by_hand() -> None:
    # 3.6 an hour is a thousandth a second.
    found = reckon(
        spent(training=8_000.0, checkpoint=500.0, recovery=1_000.0, waiting=500.0),
        incident(1, "oom", 300.0, saved=(40, 80.0)),
        incident(2, "oom", 100.0),
        incident(3, "preemption", 200.0, saved=(10, 20.0)),
        incident(4, "user_error", 2_000.0, "stopped"),
        gpus=2,
    )
    assert found.counted == "gpu"
    assert found.spent.cost == pytest.approx(20.0)
    assert found.spent.hours == pytest.approx(20_000 / 3600)
    assert found.training.cost == pytest.approx(16.0)
    losses = {str(loss.cause): (loss.incidents, round(loss.cost or 0.0, 9)) for loss in found.lost_by_cause}
    assert losses == {
        "user_error": (1, 2.0),
        "recovery": (0, 1.4),
        "checkpoint": (0, 1.0),
        "waiting": (0, 1.0),
        "oom": (2, 0.4),
        "preemption": (1, 0.2),
    }
    assert found.lost.cost == pytest.approx(6.0)
    assert [loss.cause for loss in found.lost_by_cause][:2] == ["user_error", "recovery"]
    assert (found.saved.recoveries, found.saved.steps) == (2, 50)
    assert found.saved.cost == pytest.approx(0.1)


def test_without_gpus_workers_are_counted_and_without_a_price_hours_alone() -> None:
    found = reckon(spent(training=3_600.0), gpus=0, price=None)
    assert (found.counted, found.spent.hours, found.spent.cost) == ("worker", 1.0, None)
    assert found.saved.cost is None
    assert all(loss.cost is None for loss in found.lost_by_cause)


def test_what_incidents_explain_is_not_counted_twice() -> None:
    found = reckon(spent(training=100.0, recovery=50.0), incident(1, "hang", 80.0))
    losses = {loss.cause: loss.hours * 3600 for loss in found.lost_by_cause}
    assert losses["recovery"] == 0.0
    assert losses["hang"] == pytest.approx(80.0)


def test_open_incidents_and_those_that_stop_nothing_cost_nothing_yet() -> None:
    still_open = Incident(reported=incident(1, "oom", 5.0).reported, opened_at_s=0.0)
    assert reckon(spent(training=1.0), still_open).lost.hours == 0.0


SECONDS = st.floats(0, 1e9)


@given(
    SECONDS,
    SECONDS,
    SECONDS,
    SECONDS,
    st.lists(st.tuples(st.sampled_from(CLASSES), SECONDS), max_size=9),
    st.integers(0, 16),
)
def test_causes_add_up_to_what_is_lost(
    training: float,
    checkpoint: float,
    recovery: float,
    waiting: float,
    failures: list[tuple[FailureClass, float]],
    gpus: int,
) -> None:
    view = spent(training=training, checkpoint=checkpoint, recovery=recovery, waiting=waiting)
    incidents = [incident(number, kind, lost) for number, (kind, lost) in enumerate(failures)]
    found = reckon(view, *incidents, gpus=gpus)
    assert sum(loss.hours for loss in found.lost_by_cause) == pytest.approx(found.lost.hours)
    assert found.lost.hours * 3600 >= max(1, gpus) * (checkpoint + recovery + waiting) * (1 - 1e-9) - 1e-3
    assert all(loss.hours >= 0 for loss in found.lost_by_cause)


def test_every_class_has_a_meaning() -> None:
    assert {*CLASSES, "checkpoint", "recovery", "waiting"} == set(MEANINGS)


def test_the_price_is_that_of_the_first_pattern_that_fits() -> None:
    prices = PriceList(default=1.0, by_run={"llm-*": 2.0, "*": 3.0})
    assert (prices.of("llm-7b"), prices.of("other")) == (2.0, 3.0)
    assert (PriceList(default=1.0).of("any"), PriceList().of("any")) == (1.0, None)
    assert PriceList(by_run={"a.b": 2.0}).of("axb") is None


@pytest.mark.parametrize(("saved_step", "saved"), [(1_200, 40), (None, 1_240), (1_240, 0), (1_300, 0)])
def test_a_recovery_saves_the_steps_since_the_newest_durable_checkpoint(
    saved_step: int | None, saved: int
) -> None:
    recorded = RecoveryRecorded(
        job_id=RUN,
        worker_id=WorkerId("w"),
        phases_s={"load": 1.0},
        resumed_step=1_240,
        lost_steps=0,
        tier="memory",
        world_before=4,
        world_after=4,
        reason="",
        at_s=0.0,
    )
    reckoned = Cost(step=1_241, saved_step=saved_step, step_s=0.5, workers=4, gpus_per_worker=2)
    closed = Incidents().decide_recovery(recorded, reckoned, Instant(mono_s=0.0, wall_s=0.0))[-1]
    assert isinstance(closed, IncidentClosed)
    assert (closed.saved_steps, closed.saved_gpu_s) == (saved, saved * 0.5 * 8)


def test_gpus_of_workers_outlive_a_restart() -> None:
    time = Goodput()
    time.take(RUN, WorkerId("w"), {"account_began_s": 1.0, "training_total_s": 2.0}, gpus=8)
    again = Goodput()
    again.load(time.dump())
    assert (time.gpus_per_worker(RUN), again.gpus_per_worker(RUN), again.gpus_per_worker(JobId("x"))) == (
        8,
        8,
        0,
    )
