"""The last hour by the second, the last day by the minute: gaps are gaps, and memory does not grow."""

from __future__ import annotations

from strata.coordinator.metrics.history import JOB_SERIES, JOBS_KEPT, MINUTES, SECONDS, History, Track

NOW_S = 1_700_000_000.0 - 1_700_000_000.0 % 3600


def seen(track: Track, now_s: float, since_s: float, step: int = 1, name: str = "loss") -> list[float | None]:
    view = track.view([name], now_s=now_s, since_s=since_s, step=step, job_id=None)
    assert list(view.series) == [name]
    assert view.start + step * len(view.series[name].values) > now_s
    return view.series[name].values


def test_a_second_without_a_measurement_is_a_gap() -> None:
    track = Track(JOB_SERIES)
    for offset, value in ((0, 1.0), (1, 2.0), (4, 5.0), (5, None), (6, float("nan")), (7, 8.0)):
        track.put(NOW_S + offset + 0.3, {"loss": value})
    assert seen(track, NOW_S + 9, NOW_S - 2) == [
        None,
        None,
        1.0,
        2.0,
        None,
        None,
        5.0,
        None,
        None,
        8.0,
        None,
        None,
    ]
    assert seen(track, NOW_S + 7, NOW_S, name="step") == [None] * 8


def test_minutes_are_means_of_their_seconds() -> None:
    track = Track(JOB_SERIES)
    for second in range(150):
        track.put(NOW_S + second, {"loss": float(second) if second % 2 == 0 else None})
    assert seen(track, NOW_S + 149, NOW_S, step=60) == [29.0, 89.0, 134.0]


def test_rings_keep_an_hour_and_a_day() -> None:
    track = Track(JOB_SERIES)
    for minute in range(MINUTES + 30):
        track.put(NOW_S + minute * 60, {"loss": float(minute)})
    last_s = NOW_S + (MINUTES + 29) * 60
    minutes = seen(track, last_s, 0.0, step=60)
    assert len(minutes) == MINUTES
    assert (minutes[0], minutes[-1]) == (30.0, MINUTES + 29.0)
    seconds = seen(track, last_s, 0.0)
    assert len(seconds) == SECONDS
    assert [value for value in seconds if value is not None] == [
        float(MINUTES + 30 - 60 + n) for n in range(60)
    ]


def test_a_clock_that_is_set_back_starts_over() -> None:
    track = Track(JOB_SERIES)
    track.put(NOW_S, {"loss": 1.0})
    track.put(NOW_S - 10, {"loss": 2.0})
    assert seen(track, NOW_S, NOW_S - 10)[-1] == 1.0
    track.put(NOW_S - 30 * 86_400, {"loss": 3.0})
    assert seen(track, NOW_S - 30 * 86_400, 0.0)[-2:] == [None, 3.0]


def test_jobs_that_were_silent_longest_are_evicted() -> None:
    history = History()
    for number in range(JOBS_KEPT + 5):
        history.put(NOW_S + number, {}, {str(number): {"loss": 1.0}, "0": {"loss": 2.0}})
    assert len(history.jobs) == JOBS_KEPT
    assert "0" in history.jobs
    assert "1" not in history.jobs
