"""Figures are sums and counts of what was recorded, and survive a restart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from elastic_harness.errors import CheckpointValidationError
from elastic_harness.metrics import RECENT, RecoveryEvent, Series, TrainingMetrics


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


def test_saves_and_loads_are_recorded_as_earlier_versions_did() -> None:
    checkpoint = TrainingMetrics().checkpoint
    checkpoint.record_save("nvme", duration=1.5)
    checkpoint.record_save("nvme", 0.5)
    checkpoint.record_save(tier="s3", duration=4.0)
    checkpoint.record_load("nvme", duration=0.8)
    checkpoint.record_load("s3", 1.2)
    assert (checkpoint.avg_save_time("nvme"), checkpoint.avg_save_time("memory")) == (1.0, 0.0)
    assert (checkpoint.avg_save_time(), checkpoint.max_save_time()) == (2.0, 4.0)
    assert checkpoint.by_tier == {"nvme": 2, "s3": 1}
    assert (checkpoint.load_s.count, checkpoint.load_s.mean) == (2, 1.0)
    checkpoint.record_failure()
    assert checkpoint.async_failures == 1


def test_recoveries_are_recorded_as_earlier_versions_did() -> None:
    recovery = TrainingMetrics().recovery
    recovery.record_recovery(
        old_world_size=4, new_world_size=3, recovery_time=15.0, checkpoint_tier="nvme", step_resumed=1000
    )
    recovery.record_recovery(3, 4, 5.0)
    recovery.record_recovery(4, 4, 1.0, "memory", 1200)
    assert (recovery.count, len(recovery.events)) == (3, 3)
    assert (recovery.worker_joins, recovery.worker_failures) == (1, 1)
    assert (recovery.total_recovery_time, recovery.avg_recovery_time) == (21.0, 7.0)
    first = recovery.events[0]
    assert first == RecoveryEvent(first.timestamp, 4, 3, 15.0, "nvme", 1000)
    assert first.timestamp > 1e9
    recovery.record_recovery(2.0)
    assert (recovery.count, len(recovery.events)) == (4, 3), "nobody has said between which worlds"


def test_gradients_are_recorded_as_earlier_versions_did() -> None:
    gradient = TrainingMetrics().gradient
    assert (gradient.clip_frequency, gradient.avg_clip_magnitude) == (0.0, 0.0)
    gradient.record_step(clipped=True, grad_norm=2.5)
    gradient.record_step(clipped=True, grad_norm=3.5)
    gradient.record_step(grad_norm=0.5)
    gradient.record_step()
    assert (gradient.total_steps, gradient.clip_count, gradient.clip_frequency) == (4, 2, 0.5)
    assert (gradient.avg_clip_magnitude, gradient.norm.count) == (3.0, 3)


def test_adjustments_of_the_rate_are_recorded_as_earlier_versions_did() -> None:
    lr = TrainingMetrics().lr
    lr.record_adjustment(old_lr=1e-4, new_lr=5e-5)
    lr.record_adjustment(5e-5, 1e-5, "by hand")
    assert [adjustment[1:] for adjustment in lr.adjustments] == [
        (1e-4, 5e-5, "topology_change"),
        (5e-5, 1e-5, "by hand"),
    ]
    assert (lr.current, lr.topology_changes) == (1e-5, 1)


def test_progress_without_measured_steps_has_the_efficiency_of_earlier_versions(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    metrics = TrainingMetrics(clock=clock)
    clock.now_s += 10.0
    metrics.update_step(step=500, tokens_processed=2000)
    metrics.update_step(1000, 2000)
    metrics.recovery.record_recovery(4, 3, 2.5)
    assert (metrics.current_step, metrics.total_tokens, metrics.tokens_per_second) == (1000, 4000, 400.0)
    assert metrics.training_efficiency == 0.75
    with caplog.at_level(logging.INFO):
        metrics.log_summary()
    assert "1000 steps, 400 tokens/s, efficiency 75.0 %" in caplog.text
    after = TrainingMetrics(clock=clock)
    after.load_state_dict(metrics.state_dict())
    assert (after.current_step, after.recovery.worker_failures) == (1000, 1)


WRONG: list[Callable[[TrainingMetrics], Any]] = [
    lambda m: m.checkpoint.record_save("nvme"),  # type: ignore[call-overload]
    lambda m: m.checkpoint.record_save(1.0, 2.0),  # type: ignore[call-overload]
    lambda m: m.checkpoint.record_save(1.0, stall_s="long"),  # type: ignore[call-overload]
    lambda m: m.checkpoint.record_save(1.0, tier="nvme", size_bytes=None),  # type: ignore[call-overload]
    lambda m: m.checkpoint.record_load("nvme"),  # type: ignore[call-overload]
    lambda m: m.recovery.record_recovery(4, 3),  # type: ignore[call-overload]
    lambda m: m.recovery.record_recovery(1.0, lost_steps="two"),  # type: ignore[call-overload]
    lambda m: m.recovery.record({"load": 1.0, "detect": "a while"}),  # type: ignore[dict-item]
    lambda m: m.gradient.record_step(True, "2.5"),  # type: ignore[arg-type]
    lambda m: m.gradient.record("2.5", max_norm=1.0),  # type: ignore[arg-type]
    lambda m: m.lr.record_adjustment(1e-4, None),  # type: ignore[arg-type]
    lambda m: m.record_step(1.0, tokens="many"),  # type: ignore[arg-type]
    lambda m: m.update_step(5, tokens_processed="many"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("record", WRONG)
def test_a_record_that_is_refused_does_not_count(record: Callable[[TrainingMetrics], Any]) -> None:
    metrics = trained(Clock())
    before = metrics.state_dict()
    with pytest.raises(TypeError):
        record(metrics)
    assert metrics.state_dict() == before


def test_totals_of_the_version_before_load_without_what_was_added() -> None:
    state = trained(Clock()).state_dict()
    for added in ("tiers", "worlds", "current_step"):
        del state[added]
    state["gradient"] = state["gradient"][:2]
    metrics = TrainingMetrics()
    metrics.load_state_dict(state)
    assert (metrics.steps, metrics.checkpoint.by_tier, metrics.gradient.clipped) == (4, {"NVME": 1}, 1)
    with pytest.raises(CheckpointValidationError, match="The saved state of the metrics is a NoneType"):
        metrics.load_state_dict(None)  # type: ignore[arg-type]
