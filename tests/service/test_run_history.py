"""The history of a run's metrics: exact, bounded, the same after a restart, and true after a rollback."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.coordinator.metrics import run_history
from strata.coordinator.metrics.columns import pack, unpack
from strata.coordinator.metrics.run_history import Curve, RunHistory
from strata.core.messages import Overloaded, Unknown
from strata.core.telemetry.branches import Start
from strata.core.telemetry.downsampling import Buckets
from strata.core.telemetry.run_details import RunDetails
from strata.core.telemetry.run_metrics import MetricBatch, MetricRows

BEGAN_S = 1_700_000_000.0


def started(generation: int, resumed: int = 0, *, at_ms: int = 0) -> Start:
    return Start(generation=generation, started_ms=at_ms or generation, resumed_step=resumed)


def batch(
    start: Start,
    number: int,
    steps: Sequence[int],
    columns: Mapping[str, Sequence[float]],
    *,
    dropped: int = 0,
) -> MetricBatch:
    rows = MetricRows(
        names=tuple(columns),
        steps=np.asarray(steps, np.int64),
        times=BEGAN_S + np.asarray(steps, np.float64),
        values=np.column_stack([np.asarray(column, np.float64) for column in columns.values()]),
    )
    return MetricBatch(number=number, start=start, rows=(rows,), dropped=dropped)


def put(history: RunHistory, made: MetricBatch, *, run: str = "r", job: str = "j") -> None:
    """Returns once it is kept."""
    kept = threading.Event()
    history.put(run, job, made, kept.set)
    assert history.flush()
    assert kept.wait(10)


def pairs(curve: Curve) -> list[tuple[int, float]]:
    return list(zip(curve.points.last.tolist(), curve.points.mean.tolist(), strict=True))


@pytest.fixture
def history(tmp_path: Path) -> Iterator[RunHistory]:
    made = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=1 << 30)
    yield made
    made.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are made soon, and chunks are small, so that few values use every level."""
    monkeypatch.setattr(run_history, "TAIL_ROWS", 4)
    monkeypatch.setattr(run_history, "VALUES_PER_CHUNK", 64)
    monkeypatch.setattr(run_history, "BUCKETS_PER_CHUNK", 32)


def test_values_are_read_as_they_were_logged(history: RunHistory) -> None:
    put(history, batch(started(1), 1, [1, 2, 3], {"loss": [3.0, 0.1, float("nan")], "lr": [1, 2, 3]}))
    (loss, lr) = history.curves("r", ["loss", "lr"], points=100)
    np.testing.assert_equal(loss.committed.points.final, [3.0, 0.1, float("nan")])
    assert pairs(lr.committed) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert lr.committed.times.tolist() == [BEGAN_S + 1, BEGAN_S + 2, BEGAN_S + 3]
    summary = history.summary("r")
    found = {each.name: each for each in summary.metrics}
    assert (found["loss"].min, found["loss"].max, found["loss"].nonfinite) == (0.1, 3.0, 1)
    assert (found["loss"].last, found["lr"].last, found["lr"].last_step) == (None, 3.0, 3)


def test_a_batch_that_comes_again_counts_once(history: RunHistory) -> None:
    for _ in range(2):
        put(history, batch(started(1), 1, [1], {"a": [5.0]}))
    put(history, batch(started(1), 2, [2], {"a": [6.0]}))
    (found,) = history.curves("r", ["a"], points=10)
    assert pairs(found.committed) == [(1, 5.0), (2, 6.0)]


def test_after_a_rollback_the_abandoned_branch_is_kept_separately(history: RunHistory) -> None:
    put(history, batch(started(1), 1, range(1, 11), {"a": range(1, 11)}))
    put(history, batch(started(2, resumed=6), 1, range(7, 9), {"a": [70, 80]}))
    (found,) = history.curves("r", ["a"], points=100)
    assert pairs(found.committed) == [*((n, float(n)) for n in range(1, 7)), (7, 70.0), (8, 80.0)]
    (branch,) = found.abandoned
    assert branch.generation == 1
    assert pairs(branch) == [(n, float(n)) for n in range(7, 11)]
    summary = history.summary("r")
    assert [(s.generation, s.resumed_step, s.committed_until) for s in summary.starts] == [
        (1, 0, 6),
        (2, 6, None),
    ]
    (metric,) = summary.metrics
    assert (metric.count, metric.last, metric.last_step, metric.max) == (8, 80.0, 8, 80.0)


def test_another_job_that_names_the_same_run_changes_nothing_for_the_first(history: RunHistory) -> None:
    put(history, batch(started(1), 1, [1, 2], {"a": [1, 2]}), job="mine")
    put(history, batch(started(9), 1, [1], {"a": [99]}), job="theirs")
    (mine,) = history.curves("r", ["a"], job="mine", points=10)
    assert pairs(mine.committed) == [(1, 1.0), (2, 2.0)]
    assert history.summary("r", job="mine").jobs == ["mine"]
    assert history.summary("r").jobs == ["mine", "theirs"]
    assert history.resolve("mine") == "r"
    with pytest.raises(Unknown):
        history.resolve("r", job="a stranger")


@pytest.mark.usefixtures("small")
@given(
    lives=st.lists(
        st.tuples(st.integers(0, 300), st.lists(st.integers(1, 90), min_size=1, max_size=12)),
        min_size=1,
        max_size=4,
    ),
    window=st.tuples(st.integers(0, 900), st.integers(0, 900)),
    points=st.integers(1, 300),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_of_any_run_has_the_values_that_made_the_model(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[tuple[int, list[int]]],
    window: tuple[int, int],
    points: int,
) -> None:
    history = RunHistory(tmp_path_factory.mktemp("h") / "metrics.sqlite", limit_bytes=1 << 30)
    chance = np.random.default_rng(1)
    model: dict[int, float] = {}
    logged: list[tuple[int, dict[int, float]]] = []
    reached = 0
    for generation, (back, sizes) in enumerate(lives, start=1):
        resumed = max(0, reached - back) if generation > 1 else 0
        model = {step: value for step, value in model.items() if step <= resumed}
        mine: dict[int, float] = {}
        reached = resumed
        for number, size in enumerate(sizes, start=1):
            steps = list(range(reached + 1, reached + size + 1))
            values = chance.standard_normal(size).tolist()
            put(history, batch(started(generation, resumed), number, steps, {"a": values, "b": values[::-1]}))
            mine.update(zip(steps, values, strict=True))
            reached += size
        model.update(mine)
        logged.append((resumed, mine))
    history.close()
    history = RunHistory(history.path, limit_bytes=1 << 30)  # Nothing was in memory only.
    try:
        first, last = sorted(window)
        (found,) = history.curves("r", ["a"], first=first, last=last, points=points)
        wanted = {step: value for step, value in model.items() if first <= step <= last}
        got = found.committed.points
        assert len(got) <= points
        assert int(got.count.sum()) == len(wanted)
        if wanted:
            assert (got.first[0], got.last[-1]) == (min(wanted), max(wanted))
            assert got.low.min() == min(wanted.values())
            assert got.high.max() == max(wanted.values())
            assert got.final[-1] == wanted[max(wanted)]
            weighted = float((got.mean * got.count).sum()) / len(wanted)
            assert weighted == pytest.approx(float(np.mean(list(wanted.values()))), abs=1e-9)
        if len(wanted) <= points:
            assert dict(pairs(found.committed)) == wanted
        every = sum(len([s for s in mine if first <= s <= last]) for _, mine in logged)
        abandoned = sum(int(branch.points.count.sum()) for branch in found.abandoned)
        assert abandoned == every - len(wanted), "a value is in no branch, or in two"
        (total,) = [each for each in history.summary("r").metrics if each.name == "a"]
        assert (total.count, total.min, total.max) == (len(model), min(model.values()), max(model.values()))
        assert (total.last, total.last_step) == (model[max(model)], max(model))
    finally:
        history.close()


@pytest.mark.usefixtures("small")
def test_a_full_history_is_downsampled_and_loses_no_extreme(tmp_path: Path) -> None:
    history = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=800_000)
    values = np.random.default_rng(2).standard_normal(60_000)
    values[1_234] = 50.0
    try:
        for number in range(60):
            steps = np.arange(number * 1_000, (number + 1) * 1_000)
            put(history, batch(started(1), number + 1, steps.tolist(), {"a": values[steps].tolist()}))
        history._next_tidy_mono_s = 0.0  # Now, instead of within a second.
        assert history.flush()
        assert history.used_bytes() <= 800_000
        (found,) = history.curves("r", ["a"], points=200)
        assert int(found.committed.points.count.sum()) == 60_000
        assert found.committed.points.high.max() == 50.0
        (newest,) = history.curves("r", ["a"], first=59_950, points=200)
        assert [value for _, value in pairs(newest.committed)] == values[59_950:].tolist()
        (oldest,) = history.curves("r", ["a"], first=1_000, last=2_000, points=200)
        assert oldest.committed.points.high.max() == 50.0
    finally:
        history.close()


@pytest.mark.usefixtures("small")
def test_complete_runs_are_removed_last_and_the_silent_first(tmp_path: Path) -> None:
    history = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=120_000)
    try:
        for number in range(60):
            columns = {f"m{n}": [float(n)] for n in range(100)}
            put(history, batch(started(1), 1, [1], columns), run=f"run-{number}", job=f"job-{number}")
        history._next_tidy_mono_s = 0.0
        assert history.flush()
        left = [each.run for each in history.runs(limit=100)]
        assert history.used_bytes() <= 120_000
        assert 0 < len(left) < 60
        assert left == [f"run-{number}" for number in range(59, 59 - len(left), -1)]
    finally:
        history.close()


def test_too_many_names_are_dropped_and_counted(history: RunHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_history, "NAMES_LIMIT", 3)
    put(history, batch(started(1), 1, [1, 2], {f"m{n}": [1, 2] for n in range(5)}, dropped=7))
    put(history, batch(started(2, 2), 1, [3], {"m0": [3]}))
    summary = history.summary("r")
    assert len(summary.metrics) < 5
    assert summary.dropped == 7 + 2 * (5 - len(summary.metrics))


def test_a_full_disk_keeps_nothing_and_answers_for_nothing(history: RunHistory) -> None:
    history.is_paused = lambda: True
    kept = threading.Event()
    made = batch(started(1), 1, [1], {"a": [1.0]})
    history.put("r", "j", made, kept.set)
    assert history.flush()
    assert not kept.is_set()
    history.is_paused = lambda: False
    put(history, made)
    assert [each.count for each in history.summary("r").metrics] == [1]


def test_a_file_that_cannot_be_read_is_put_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.sqlite").write_bytes(b"no database" * 1_000)
    history = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=1 << 30)
    put(history, batch(started(1), 1, [1], {"a": [1.0]}))
    history.close()
    assert list(tmp_path.glob("metrics.sqlite.unreadable-*"))


@pytest.mark.usefixtures("small")
def test_a_damaged_chunk_costs_that_run_its_history_and_no_other(tmp_path: Path) -> None:
    history = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=1 << 30)
    try:
        for run in ("damaged", "intact"):
            for number in range(5):
                put(history, batch(started(1), number + 1, [number], {"a": [1.0]}), run=run)
        with closing(sqlite3.connect(history.path, isolation_level=None)) as db:
            db.execute(
                "UPDATE chunks SET data = x'ff00000000' WHERE series IN (SELECT series.id FROM series JOIN starts "
                "ON starts.id = series.start JOIN runs ON runs.id = starts.run WHERE runs.run = 'damaged')"
            )
        for run in ("damaged", "intact"):
            for number in range(5, 12):
                put(history, batch(started(1), number + 1, [number], {"a": [1.0]}), run=run)
        assert [each.count for each in history.summary("intact").metrics] == [12]
        assert next(each.count for each in history.summary("damaged").metrics) < 12
    finally:
        history.close()


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=60),
    st.sampled_from([np.float64, np.float32, np.float16]),
    st.integers(0, 10**12),
    st.lists(st.integers(0, 50), min_size=60, max_size=60),
)
def test_columns_come_back_exactly(
    values: list[float], precision: type[np.floating], first: int, gaps: list[int]
) -> None:
    with np.errstate(over="ignore"):
        column = np.asarray(values).astype(precision).astype(np.float64)
    whole = Buckets.of(first + np.cumsum(gaps[: len(column)]), column)
    back = unpack(0, len(whole), pack(0, whole))
    np.testing.assert_array_equal(back.final, whole.final)
    np.testing.assert_array_equal(back.first, whole.first)
    tens = whole[: len(whole) // 16 * 16].complete_groups()
    if len(tens):
        again = unpack(1, len(tens), pack(1, tens))
        for name in ("first", "last", "count", "bad", "low", "high", "mean", "final"):
            np.testing.assert_array_equal(getattr(again, name), getattr(tens, name))


def test_details_of_the_latest_start_are_shown_and_survive_a_restart(tmp_path: Path) -> None:
    history = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=1 << 30)
    for generation, lr in ((1, 0.1), (2, 0.2)):
        details = RunDetails(command="train.py", config={"lr": lr}, versions={"python": "3"})
        made = MetricBatch(
            number=1, start=started(generation, at_ms=generation), rows=(), dropped=0, details=details
        )
        put(history, made)
    history.close()
    again = RunHistory(tmp_path / "metrics.sqlite", limit_bytes=1 << 30)
    info = again.info("r")
    assert info.details is not None
    assert (info.details.config, info.tags, info.notes, info.jobs) == ({"lr": 0.2}, [], "", ["j"])
    assert [each.run for each in again.runs(limit=5)] == ["r"], "it is known before it has logged"
    again.close()


def test_notes_belong_to_a_run_and_change_independently_of_its_tags(history: RunHistory) -> None:
    put(history, batch(started(1), 1, [1], {"a": [1.0]}), job="mine")
    put(history, batch(started(1), 1, [1], {"a": [1.0]}), job="theirs")
    history.annotate("r", job="mine", tags=["good"], notes=None)
    history.annotate("r", job="mine", tags=None, notes="as it was")
    assert (history.info("r", job="mine").tags, history.info("r", job="mine").notes) == (
        ["good"],
        "as it was",
    )
    assert history.info("r", job="theirs").tags == []
    history.annotate("r", job=None, tags=[], notes=None)
    assert (history.info("r", job="theirs").tags, history.info("r").notes) == ([], "as it was")
    history.is_paused = lambda: True
    with pytest.raises(Overloaded, match="disk"):
        history.annotate("r", job=None, tags=["x"], notes=None)
    with pytest.raises(Unknown):
        history.info("another")
