"""What one training run has cost and achieved, in bounded memory.

Nothing is sampled or estimated: every metric is a sum, a count or an extreme of what was recorded. Percentiles
come from the most recent records only, and say so in their names. The clock is passed in; times are monotonic
seconds. `state_dict` carries the totals through a restart, so efficiency counts the time that crashes took.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strata.trainer.errors import CheckpointValidationError

RECENT = 512


@dataclass(slots=True)
class Series:
    """Count, sum, extremes and a window of the newest values of one quantity."""

    count: int = 0
    total: float = 0.0
    minimum: float = 0.0
    maximum: float = 0.0
    last: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def record(self, value: float) -> None:
        self.minimum = min(self.minimum, value) if self.count else value
        self.maximum = max(self.maximum, value) if self.count else value
        self.count += 1
        self.total += value
        self.last = value
        self.recent.append(value)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def recent_percentile(self, percent: float) -> float:
        """The nearest-rank percentile of the newest values; 0 when there are none."""
        if not self.recent:
            return 0.0
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def state_dict(self) -> list[float]:
        return [self.count, self.total, self.minimum, self.maximum, self.last]

    def load_state_dict(self, state: list[float]) -> None:
        self.count = int(state[0])
        self.total, self.minimum, self.maximum, self.last = (float(value) for value in state[1:5])
        self.recent.clear()


@dataclass(slots=True)
class CheckpointMetrics:
    """Saves and loads. `stall_s` is how long a save blocked training, `save_s` its total duration."""

    save_s: Series = field(default_factory=Series)
    stall_s: Series = field(default_factory=Series)
    load_s: Series = field(default_factory=Series)
    saved_bytes: int = 0
    failures: int = 0
    skipped: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)

    def record_save(
        self, duration_s: float, *, size_bytes: int = 0, tier: str = "", stall_s: float = 0.0
    ) -> None:
        self.save_s.record(duration_s)
        self.stall_s.record(stall_s)
        self.saved_bytes += size_bytes
        if tier:
            self.by_tier[tier] = self.by_tier.get(tier, 0) + 1

    def record_load(self, duration_s: float) -> None:
        self.load_s.record(duration_s)

    def record_failure(self) -> None:
        self.failures += 1

    def record_skip(self) -> None:
        self.skipped += 1

    @property
    def bytes_per_second(self) -> float:
        return self.saved_bytes / self.save_s.total if self.save_s.total else 0.0


@dataclass(slots=True)
class RecoveryMetrics:
    """Recoveries, each by phase, and the steps that had to be trained again."""

    total_s: Series = field(default_factory=Series)
    lost_steps: Series = field(default_factory=Series)
    phases_s: dict[str, Series] = field(default_factory=dict)

    def record(self, phases_s: Mapping[str, float], *, lost_steps: int = 0) -> None:
        for phase, duration_s in phases_s.items():
            self.phases_s.setdefault(phase, Series()).record(duration_s)
        self.total_s.record(sum(phases_s.values()))
        self.lost_steps.record(lost_steps)

    def record_recovery(self, duration_s: float, *, lost_steps: int = 0) -> None:
        """A recovery whose phases nobody has measured."""
        self.total_s.record(duration_s)
        self.lost_steps.record(lost_steps)

    @property
    def count(self) -> int:
        return self.total_s.count


@dataclass(slots=True)
class GradientMetrics:
    """Gradient norms before clipping."""

    norm: Series = field(default_factory=Series)
    clipped: int = 0
    non_finite: int = 0

    def record(self, norm: float, *, max_norm: float | None = None) -> None:
        if norm != norm or norm in (float("inf"), float("-inf")):
            self.non_finite += 1  # Kept apart: one of them would make every mean meaningless.
            return
        self.norm.record(norm)
        if max_norm is not None and norm > max_norm:
            self.clipped += 1

    record_norm = record_gradient_norm = record


@dataclass(slots=True)
class LRMetrics:
    """The learning rate and how often the world made it change."""

    lr: Series = field(default_factory=Series)
    topology_changes: int = 0

    def record(self, lr: float) -> None:
        self.lr.record(lr)

    record_lr = record

    def record_topology_change(self) -> None:
        self.topology_changes += 1

    @property
    def current(self) -> float:
        return self.lr.last


class TrainingMetrics:
    """The metrics of one run, from its first start to now."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._earlier_s = 0.0
        self.step_s = Series()
        self.loss = Series()
        self.tokens = 0
        self.samples = 0
        self.checkpoint = CheckpointMetrics()
        self.recovery = RecoveryMetrics()
        self.gradient = GradientMetrics()
        self.lr = LRMetrics()

    def record_step(
        self, duration_s: float, *, tokens: int = 0, samples: int = 0, loss: float | None = None
    ) -> None:
        """One optimizer step that counts: a step trained again after a crash is recorded as lost, not here."""
        self.step_s.record(duration_s)
        self.tokens += tokens
        self.samples += samples
        if loss is not None:
            self.loss.record(loss)

    def record_checkpoint_save(
        self, duration_s: float, *, size_bytes: int = 0, tier: str = "", stall_s: float = 0.0
    ) -> None:
        self.checkpoint.record_save(duration_s, size_bytes=size_bytes, tier=tier, stall_s=stall_s)

    def record_checkpoint_load(self, duration_s: float) -> None:
        self.checkpoint.record_load(duration_s)

    def record_recovery(self, duration_s: float, *, lost_steps: int = 0) -> None:
        self.recovery.record_recovery(duration_s, lost_steps=lost_steps)

    def record_gradient_norm(self, norm: float, *, max_norm: float | None = None) -> None:
        self.gradient.record(norm, max_norm=max_norm)

    def record_lr(self, lr: float) -> None:
        self.lr.record(lr)

    def record_topology_change(self) -> None:
        self.lr.record_topology_change()

    @property
    def steps(self) -> int:
        return self.step_s.count

    @property
    def training_time(self) -> float:
        """Wall-clock seconds since the first start, with everything that held training up."""
        return self._earlier_s + (self._clock() - self._started_s)

    @property
    def tokens_per_second(self) -> float:
        elapsed_s = self.training_time
        return self.tokens / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def training_efficiency(self) -> float:
        """The share of the wall-clock time that went into steps: 1.0 means that nothing was lost."""
        elapsed_s = self.training_time
        return min(1.0, self.step_s.total / elapsed_s) if elapsed_s > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """Everything, as plain numbers fit for JSON."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "samples": self.samples,
            "training_time_s": self.training_time,
            "tokens_per_second": self.tokens_per_second,
            "training_efficiency": self.training_efficiency,
            "step_mean_s": self.step_s.mean,
            "step_recent_p50_s": self.step_s.recent_percentile(50),
            "step_recent_p99_s": self.step_s.recent_percentile(99),
            "loss": self.loss.last,
            "checkpoint": {
                "saves": self.checkpoint.save_s.count,
                "loads": self.checkpoint.load_s.count,
                "failures": self.checkpoint.failures,
                "skipped": self.checkpoint.skipped,
                "save_mean_s": self.checkpoint.save_s.mean,
                "stall_total_s": self.checkpoint.stall_s.total,
                "load_mean_s": self.checkpoint.load_s.mean,
                "saved_bytes": self.checkpoint.saved_bytes,
                "bytes_per_second": self.checkpoint.bytes_per_second,
                "by_tier": dict(self.checkpoint.by_tier),
            },
            "recovery": {
                "count": self.recovery.count,
                "mean_s": self.recovery.total_s.mean,
                "max_s": self.recovery.total_s.maximum,
                "lost_steps": int(self.recovery.lost_steps.total),
                "phase_mean_s": {phase: series.mean for phase, series in self.recovery.phases_s.items()},
            },
            "gradient": {
                "norm_mean": self.gradient.norm.mean,
                "norm_max": self.gradient.norm.maximum,
                "clipped": self.gradient.clipped,
                "non_finite": self.gradient.non_finite,
            },
            "lr": {"current": self.lr.current, "topology_changes": self.lr.topology_changes},
        }

    def state_dict(self) -> dict[str, Any]:
        """The totals, for a checkpoint. Windows of recent values start empty after a restart."""
        return {
            "training_time_s": self.training_time,
            "tokens": self.tokens,
            "samples": self.samples,
            "checkpoint": [
                self.checkpoint.saved_bytes,
                self.checkpoint.failures,
                self.checkpoint.skipped,
                dict(self.checkpoint.by_tier),
            ],
            "gradient": [self.gradient.clipped, self.gradient.non_finite],
            "topology_changes": self.lr.topology_changes,
            "series": {name: series.state_dict() for name, series in self._series().items()},
            "phases": {name: series.state_dict() for name, series in self.recovery.phases_s.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, away_s: float = 0.0) -> None:
        """Continue an earlier run's totals. `away_s` is the time between its last record and this start. Raises
        `CheckpointValidationError`, and changes nothing, for a state that lacks some of them."""
        missing = [name for name in self.state_dict() if name not in state]
        missing += [f"series.{name}" for name in self._series() if name not in state.get("series", {})]
        if missing:
            raise CheckpointValidationError.missing_state("the metrics", *missing, found=state)
        for name, series in self._series().items():
            series.load_state_dict(state["series"][name])
        self.recovery.phases_s = {}
        for name, values in state["phases"].items():
            self.recovery.phases_s[name] = Series()
            self.recovery.phases_s[name].load_state_dict(values)
        self._earlier_s = float(state["training_time_s"]) + away_s
        self.tokens = int(state["tokens"])
        self.samples = int(state["samples"])
        saved_bytes, failures, skipped, by_tier = state["checkpoint"]
        self.checkpoint.saved_bytes, self.checkpoint.failures = int(saved_bytes), int(failures)
        self.checkpoint.skipped, self.checkpoint.by_tier = int(skipped), dict(by_tier)
        self.gradient.clipped, self.gradient.non_finite = (int(value) for value in state["gradient"])
        self.lr.topology_changes = int(state["topology_changes"])

    def _series(self) -> dict[str, Series]:
        return {
            "step_s": self.step_s,
            "loss": self.loss,
            "save_s": self.checkpoint.save_s,
            "stall_s": self.checkpoint.stall_s,
            "load_s": self.checkpoint.load_s,
            "recovery_s": self.recovery.total_s,
            "lost_steps": self.recovery.lost_steps,
            "gradient_norm": self.gradient.norm,
            "lr": self.lr.lr,
        }
