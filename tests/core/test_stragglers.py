"""A rank that holds the others up is named, and only after it has done so for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.core.messages import JobId, WorkerId
from strata.core.telemetry.stragglers import REPORTS, Change, StepTime, Stragglers, _median_without

JOB = JobId("job")


def report(judge: Stragglers, step: int, **own_s: float) -> list[Change]:
    times = [StepTime(worker_id=WorkerId(name), step=step, own_s=seconds) for name, seconds in own_s.items()]
    return judge.judge(JOB, times)


def test_slow_rank_is_named_after_several_reports_and_taken_back_after_as_many() -> None:
    judge = Stragglers()
    for step in range(REPORTS - 1):
        assert report(judge, step, a=0.10, b=0.11, c=0.20) == []
    (change,) = report(judge, REPORTS, a=0.10, b=0.11, c=0.20)
    assert (change.worker_id, change.slow) == ("c", True)
    assert change.reason == "200 ms/step, 1.9× the median of 105 ms"
    assert judge.slow == {"c": change.reason}
    report(judge, 10, a=0.10, b=0.10, c=0.30)
    assert "3.0× the median" in judge.slow[WorkerId("c")], "the reason is of now"
    for step in range(20, 20 + REPORTS - 1):
        assert report(judge, step, a=0.10, b=0.11, c=0.12) == []
    (change,) = report(judge, 30, a=0.10, b=0.11, c=0.12)
    assert (change.worker_id, change.slow) == ("c", False)
    assert judge.slow == {}


def test_one_bad_step_or_the_same_report_again_says_nothing() -> None:
    judge = Stragglers()
    for step in range(50):
        assert report(judge, step, a=0.1, b=0.1, c=0.5 if step % REPORTS else 0.1) == []
    report(judge, 50, a=0.1, b=0.1, c=0.1)
    for _ in range(50):
        assert report(judge, 100, a=0.1, b=0.1, c=0.5) == []


def test_of_two_ranks_the_slower_one_is_named() -> None:
    judge = Stragglers()
    changes = [change for step in range(10) for change in report(judge, step, a=0.3, b=0.1)]
    assert [change.worker_id for change in changes] == ["a"]


def test_everyone_slow_alike_or_by_a_hair_is_nobody_slow() -> None:
    judge = Stragglers()
    for step in range(20):
        assert report(judge, step, a=2.0, b=2.1, c=2.3) == []
        assert judge.judge(JobId("quick"), [step_time(n, step, 0.0002 * n) for n in range(1, 9)]) == []


def step_time(number: int, step: int, own_s: float) -> StepTime:
    return StepTime(worker_id=WorkerId(f"w{number}"), step=step, own_s=own_s)


def test_who_leaves_or_is_alone_is_not_slow_any_more() -> None:
    judge = Stragglers()
    for step in range(REPORTS):
        report(judge, step, a=0.1, b=0.1, c=0.5)
    assert set(judge.slow) == {"c"}
    report(judge, 50, a=0.1, b=0.1)
    assert judge.slow == {}
    for step in range(60, 60 + REPORTS):
        report(judge, step, a=0.1, b=0.1, c=0.5)
    report(judge, 70, c=0.5)
    assert judge.slow == {}
    judge.keep_only({})
    assert judge._records == {}


def test_a_job_that_goes_back_to_an_earlier_step_is_still_judged() -> None:
    judge = Stragglers()
    report(judge, 1_000, a=0.1, b=0.1, c=0.5)
    assert [c.worker_id for step in range(2 * REPORTS) for c in report(judge, step, a=0.1, b=0.1, c=0.5)] == [
        "c"
    ]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=20), st.data())
def test_median_of_the_others(values: list[float], data: st.DataObject) -> None:
    ordered = sorted(values)
    index = data.draw(st.integers(0, len(values) - 1))
    others = ordered[:index] + ordered[index + 1 :]
    middle = len(others) // 2
    expected = others[middle] if len(others) % 2 else (others[middle - 1] + others[middle]) / 2
    assert _median_without(ordered, ordered[index]) == expected
