"""Figures are sums and counts of what was recorded, and survive a restart."""

from __future__ import annotations

import json

import pytest

from elastic_harness.errors import CheckpointValidationError
from elastic_harness.metrics import RECENT, Series, TrainingMetrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def trained(clock: Clock) -> TrainingMetrics:
    metrics = TrainingMetrics(clock=clock)
    for step in range(4):
        clock.now_s += 2.0
        metrics.record_step(2.0, tokens=1000, samples=8, loss=4.0 - step)
    metrics.checkpoint.record_save(0.5, size_bytes=1_000_000, tier="NVME", stall_s=0.01)
    metrics.checkpoint.record_load(0.25)
    metrics.checkpoint.record_failure()
    metrics.recovery.record({"detect": 0.5, "rendezvous": 1.0, "load": 0.5}, lost_steps=3)
    clock.now_s += 2.0
    metrics.gradient.record(3.0, max_norm=1.0)
    metrics.gradient.record(float("nan"), max_norm=1.0)
    metrics.lr.record(3e-4)
    metrics.lr.record_topology_change()
    return metrics


def test_throughput_and_efficiency_count_the_whole_wall_clock() -> None:
    metrics = trained(Clock())
    assert metrics.training_time == 10.0
    assert metrics.tokens_per_second == 400.0
    assert metrics.training_efficiency == pytest.approx(0.8)


def test_a_run_that_has_not_started_divides_by_nothing() -> None:
    metrics = TrainingMetrics(clock=Clock())
    assert (metrics.tokens_per_second, metrics.training_efficiency, metrics.training_time) == (0.0, 0.0, 0.0)
    json.dumps(metrics.summary(), allow_nan=False)


def test_summary_is_json_and_says_what_was_recorded() -> None:
    summary = json.loads(json.dumps(trained(Clock()).summary(), allow_nan=False))
    assert (summary["steps"], summary["loss"], summary["samples"]) == (4, 1.0, 32)
    assert summary["checkpoint"]["by_tier"] == {"NVME": 1}
    assert summary["checkpoint"]["bytes_per_second"] == 2_000_000
    assert summary["recovery"]["mean_s"] == 2.0
    assert summary["recovery"]["lost_steps"] == 3
    assert summary["recovery"]["phase_mean_s"]["rendezvous"] == 1.0
    assert summary["gradient"] == {"norm_mean": 3.0, "norm_max": 3.0, "clipped": 1, "non_finite": 1}
    assert summary["lr"] == {"current": 3e-4, "topology_changes": 1}


def test_totals_continue_after_a_restart_and_the_time_away_counts() -> None:
    clock = Clock()
    before = trained(clock)
    after = TrainingMetrics(clock=clock)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), away_s=6.0)
    assert after.steps == 4
    assert after.training_time == 16.0
    assert after.training_efficiency == pytest.approx(0.5)
    for part in ("checkpoint", "recovery", "gradient", "lr"):
        old, new = before.summary()[part], after.summary()[part]
        assert new == old


def test_memory_stays_bounded_and_extremes_do_not_forget() -> None:
    series = Series()
    for value in range(10 * RECENT):
        series.record(float(value))
    assert len(series.recent) == RECENT
    assert (series.minimum, series.maximum, series.count) == (0.0, 10 * RECENT - 1, 10 * RECENT)
    assert series.recent_percentile(0) == 9 * RECENT
    assert series.recent_percentile(100) == 10 * RECENT - 1


def test_the_run_records_for_its_parts() -> None:
    clock = Clock()
    direct, through = TrainingMetrics(clock=clock), TrainingMetrics(clock=clock)
    direct.checkpoint.record_save(0.5, size_bytes=10, tier="NVME")
    direct.checkpoint.record_load(0.25)
    direct.recovery.record_recovery(2.0, lost_steps=3)
    direct.gradient.record_norm(3.0, max_norm=1.0)
    direct.lr.record_lr(3e-4)
    direct.lr.record_topology_change()
    through.record_checkpoint_save(0.5, size_bytes=10, tier="NVME")
    through.record_checkpoint_load(0.25)
    through.record_recovery(2.0, lost_steps=3)
    through.record_gradient_norm(3.0, max_norm=1.0)
    through.record_lr(3e-4)
    through.record_topology_change()
    assert through.summary() == direct.summary()
    assert (through.recovery.count, through.lr.current, through.gradient.clipped) == (1, 3e-4, 1)


def test_totals_of_an_earlier_version_say_what_they_lack_and_change_nothing() -> None:
    metrics = trained(Clock())
    before = metrics.summary()
    with pytest.raises(
        CheckpointValidationError, match=r"has no 'training_time_s', 'tokens'.*; it has steps"
    ):
        metrics.load_state_dict({"steps": 3})
    assert metrics.summary() == before
