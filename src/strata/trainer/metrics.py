"""What one training run has cost and achieved, in bounded memory.

Nothing is sampled or estimated: every metric is a sum, a count or an extreme of what was recorded. Percentiles
come from the most recent records only, and say so in their names. The clock is passed in; times are monotonic
seconds. `state_dict` carries the totals through a restart, so efficiency counts the time that crashes took. What is not
a number is refused before anything is counted. The recording methods also take the arguments of earlier versions.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat, overload

from strata.trainer.errors import CheckpointValidationError

log = logging.getLogger("strata.trainer")

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
        value = _number(value, "value")
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
    save_s_by_tier: dict[str, Series] = field(default_factory=dict)

    @overload
    def record_save(
        self, duration_s: float, *, size_bytes: int = 0, tier: str = "", stall_s: float = 0.0
    ) -> None: ...
    @overload
    def record_save(self, tier: str, /, duration: float) -> None: ...
    @overload
    def record_save(self, *, tier: str, duration: float) -> None: ...
    def record_save(
        self,
        duration_s: float | str | None = None,
        duration: float | None = None,
        *,
        size_bytes: int = 0,
        tier: str = "",
        stall_s: float = 0.0,
    ) -> None:
        tier, seconds = _tier_and_seconds(duration_s, duration, tier)
        stalled, added = _number(stall_s, "stall_s"), _number(size_bytes, "size_bytes")
        self.save_s.record(seconds)
        self.stall_s.record(stalled)
        self.saved_bytes += int(added)
        if tier:
            self.by_tier[tier] = self.by_tier.get(tier, 0) + 1
            self.save_s_by_tier.setdefault(tier, Series()).record(seconds)

    @overload
    def record_load(self, duration_s: float) -> None: ...
    @overload
    def record_load(self, tier: str, /, duration: float) -> None: ...
    @overload
    def record_load(self, *, tier: str, duration: float) -> None: ...
    def record_load(
        self, duration_s: float | str | None = None, duration: float | None = None, *, tier: str = ""
    ) -> None:
        """Loads are not counted by tier."""
        self.load_s.record(_tier_and_seconds(duration_s, duration, tier)[1])

    def avg_save_time(self, tier: str | None = None) -> float:
        """Seconds, of all saves or of those to one tier."""
        return (self.save_s if tier is None else self.save_s_by_tier.get(tier, Series())).mean

    def max_save_time(self) -> float:
        return self.save_s.maximum

    @property
    def async_failures(self) -> int:
        return self.failures

    def record_failure(self) -> None:
        self.failures += 1

    def record_skip(self) -> None:
        self.skipped += 1

    @property
    def bytes_per_second(self) -> float:
        return self.saved_bytes / self.save_s.total if self.save_s.total else 0.0


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """One recovery from one world to the next."""

    timestamp: float
    """Unix seconds."""
    old_world_size: int
    new_world_size: int
    recovery_time: float
    """Seconds."""
    checkpoint_tier: str | None = None
    step_resumed: int = 0


@dataclass(slots=True)
class RecoveryMetrics:
    """Recoveries, each by phase, and the steps that had to be trained again."""

    total_s: Series = field(default_factory=Series)
    lost_steps: Series = field(default_factory=Series)
    phases_s: dict[str, Series] = field(default_factory=dict)
    events: deque[RecoveryEvent] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The newest of those that were recorded with their worlds."""
    worker_joins: int = 0
    """Recoveries into a larger world."""
    worker_failures: int = 0
    """Recoveries into a smaller one."""

    def record(self, phases_s: Mapping[str, float], *, lost_steps: int = 0) -> None:
        durations_s = {phase: _number(duration_s, phase) for phase, duration_s in phases_s.items()}
        self._record(sum(durations_s.values()), lost_steps)
        for phase, duration_s in durations_s.items():
            self.phases_s.setdefault(phase, Series()).record(duration_s)

    @overload
    def record_recovery(self, duration_s: float, *, lost_steps: int = 0) -> None: ...
    @overload
    def record_recovery(
        self,
        old_world_size: int,
        /,
        new_world_size: int,
        recovery_time: float,
        checkpoint_tier: str | None = None,
        step_resumed: int = 0,
    ) -> None: ...
    @overload
    def record_recovery(
        self,
        *,
        old_world_size: int,
        new_world_size: int,
        recovery_time: float,
        checkpoint_tier: str | None = None,
        step_resumed: int = 0,
    ) -> None: ...
    def record_recovery(
        self,
        duration_s: float | None = None,
        new_world_size: int | None = None,
        recovery_time: float | None = None,
        checkpoint_tier: str | None = None,
        step_resumed: int = 0,
        *,
        lost_steps: int = 0,
        old_world_size: int | None = None,
    ) -> None:
        """A recovery whose phases nobody has measured."""
        if new_world_size is None and recovery_time is None and old_world_size is None:
            self._record(_number(duration_s, "duration_s"), lost_steps)
            return
        before = int(_number(duration_s if old_world_size is None else old_world_size, "old_world_size"))
        after = int(_number(new_world_size, "new_world_size"))
        seconds = _number(recovery_time, "recovery_time")
        self._record(seconds, lost_steps)
        self.events.append(RecoveryEvent(time.time(), before, after, seconds, checkpoint_tier, step_resumed))
        self.worker_joins += after > before
        self.worker_failures += after < before

    def _record(self, duration_s: float, lost_steps: float) -> None:
        lost_steps = _number(lost_steps, "lost_steps")
        self.total_s.record(duration_s)
        self.lost_steps.record(lost_steps)

    @property
    def count(self) -> int:
        return self.total_s.count

    @property
    def total_recovery_time(self) -> float:
        return self.total_s.total

    @property
    def avg_recovery_time(self) -> float:
        return self.total_s.mean


@dataclass(slots=True)
class GradientMetrics:
    """Gradient norms before clipping."""

    norm: Series = field(default_factory=Series)
    clipped: int = 0
    non_finite: int = 0
    unmeasured: int = 0
    """Steps whose norm nobody has given."""
    recent_clipped: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Norms of the newest steps that were clipped."""

    def record(self, norm: float, *, max_norm: float | None = None) -> None:
        self.record_step(max_norm is not None and norm > max_norm, norm)

    record_norm = record_gradient_norm = record

    def record_step(self, clipped: bool = False, grad_norm: float | None = None) -> None:
        """One step of the optimizer, where the caller knows whether it was clipped."""
        if grad_norm is None:
            self.unmeasured += 1
        else:
            norm = _number(grad_norm, "grad_norm")
            if norm != norm or norm in (float("inf"), float("-inf")):
                self.non_finite += 1  # Kept apart: one of them would make every mean meaningless.
                return
            self.norm.record(norm)
            if clipped:
                self.recent_clipped.append(norm)
        self.clipped += bool(clipped)

    @property
    def total_steps(self) -> int:
        return self.norm.count + self.non_finite + self.unmeasured

    @property
    def clip_count(self) -> int:
        return self.clipped

    @property
    def clip_frequency(self) -> float:
        return self.clipped / self.total_steps if self.total_steps else 0.0

    @property
    def avg_clip_magnitude(self) -> float:
        """The mean norm before clipping of the newest steps that were clipped."""
        return sum(self.recent_clipped) / len(self.recent_clipped) if self.recent_clipped else 0.0


@dataclass(slots=True)
class LRMetrics:
    """The learning rate and how often the world made it change."""

    lr: Series = field(default_factory=Series)
    topology_changes: int = 0
    adjustments: deque[tuple[float, float, float, str]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The newest: when (Unix seconds), from which rate, to which, and why."""

    def record(self, lr: float) -> None:
        self.lr.record(lr)

    record_lr = record

    def record_topology_change(self) -> None:
        self.topology_changes += 1

    def record_adjustment(self, old_lr: float, new_lr: float, reason: str = "topology_change") -> None:
        old, new = _number(old_lr, "old_lr"), _number(new_lr, "new_lr")
        self.adjustments.append((time.time(), old, new, reason))
        self.lr.record(new)
        self.topology_changes += reason == "topology_change"

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
        self.current_step = 0
        """Of the whole run, as `update_step` was given it."""
        self.checkpoint = CheckpointMetrics()
        self.recovery = RecoveryMetrics()
        self.gradient = GradientMetrics()
        self.lr = LRMetrics()

    def record_step(
        self, duration_s: float, *, tokens: int = 0, samples: int = 0, loss: float | None = None
    ) -> None:
        """One optimizer step that counts: a step trained again after a crash is recorded as lost, not here."""
        seconds, known = _number(duration_s, "duration_s"), None if loss is None else _number(loss, "loss")
        added = _number(tokens, "tokens"), _number(samples, "samples")
        self.step_s.record(seconds)
        self.tokens += int(added[0])
        self.samples += int(added[1])
        if known is not None:
            self.loss.record(known)

    def update_step(self, step: int, tokens_processed: int = 0) -> None:
        """Where training is, for loops that do not measure their steps."""
        at, added = _number(step, "step"), _number(tokens_processed, "tokens_processed")
        self.current_step = int(at)
        self.tokens += int(added)

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
    def total_tokens(self) -> int:
        return self.tokens

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
        """The share of the wall-clock time that went into steps: 1.0 means that nothing was lost. Where no step was
        measured (`update_step`), the share that did not go into recoveries."""
        elapsed_s = self.training_time
        if elapsed_s <= 0:
            return 0.0
        if not self.steps and self.current_step:
            return max(0.0, 1.0 - self.recovery.total_s.total / elapsed_s)
        return min(1.0, self.step_s.total / elapsed_s)

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

    def log_summary(self) -> None:
        """The main metrics as one line of the log."""
        log.info(
            "%d steps, %.0f tokens/s, efficiency %.1f %%; %d saves, %.2f s each, %d failed; %d recoveries, %.2f s each; "
            "%.1f %% of the gradients clipped",
            max(self.steps, self.current_step),
            self.tokens_per_second,
            100 * self.training_efficiency,
            self.checkpoint.save_s.count,
            self.checkpoint.save_s.mean,
            self.checkpoint.failures,
            self.recovery.count,
            self.recovery.total_s.mean,
            100 * self.gradient.clip_frequency,
        )

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
            "gradient": [self.gradient.clipped, self.gradient.non_finite, self.gradient.unmeasured],
            "topology_changes": self.lr.topology_changes,
            "series": {name: series.state_dict() for name, series in self._series().items()},
            "phases": _states(self.recovery.phases_s),
            "tiers": _states(self.checkpoint.save_s_by_tier),
            "worlds": [self.recovery.worker_joins, self.recovery.worker_failures],
            "current_step": self.current_step,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, away_s: float = 0.0) -> None:
        """Continue an earlier run's totals. `away_s` is the time between its last record and this start. Raises
        `CheckpointValidationError`, and changes nothing, for a state that lacks some of them."""
        if not isinstance(state, Mapping):
            raise CheckpointValidationError(f"The saved state of the metrics is a {type(state).__name__}")
        saved = state.get("series") or {}
        missing = [name for name in self.state_dict() if name not in state and name not in _ADDED]
        missing += [f"series.{name}" for name in self._series() if name not in saved]
        if missing:
            raise CheckpointValidationError.missing_state("the metrics", *missing, found=state)
        for name, series in self._series().items():
            series.load_state_dict(saved[name])
        self.recovery.phases_s = _loaded(state["phases"])
        self._earlier_s = float(state["training_time_s"]) + away_s
        self.tokens = int(state["tokens"])
        self.samples = int(state["samples"])
        self.current_step = int(state.get("current_step", 0))
        saved_bytes, failures, skipped, by_tier = state["checkpoint"]
        self.checkpoint.saved_bytes, self.checkpoint.failures = int(saved_bytes), int(failures)
        self.checkpoint.skipped, self.checkpoint.by_tier = int(skipped), dict(by_tier)
        self.checkpoint.save_s_by_tier = _loaded(state.get("tiers", {}))
        clipped, non_finite, *rest = state["gradient"]
        self.gradient.clipped, self.gradient.non_finite = int(clipped), int(non_finite)
        self.gradient.unmeasured = int(rest[0]) if rest else 0
        joins, losses = state.get("worlds", (0, 0))
        self.recovery.worker_joins, self.recovery.worker_failures = int(joins), int(losses)
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


_ADDED = ("tiers", "worlds", "current_step")
"""What states of earlier versions do not have."""


def _states(series: Mapping[str, Series]) -> dict[str, list[float]]:
    return {name: each.state_dict() for name, each in series.items()}


def _loaded(states: Mapping[str, list[float]]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for name, values in states.items():
        found[name] = Series()
        found[name].load_state_dict(values)
    return found


def _number(value: SupportsFloat | None, name: str) -> float:
    """Of Python, NumPy or torch; a text is none, whatever it says."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def _tier_and_seconds(first: float | str | None, duration: float | None, tier: str) -> tuple[str, float]:
    """`(seconds, tier=...)`, or as earlier versions had it `(tier, duration)`."""
    if isinstance(first, str):
        tier, first = first, None
    if first is not None and duration is not None:
        raise TypeError(f"the duration is given twice: {first!r} and {duration!r}")
    return tier, _number(duration if first is None else first, "duration")
