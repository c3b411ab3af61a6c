"""Metrics about the coordinator itself, each measured where it happens.

The same measurements serve `/metrics` (Prometheus) and `/api/metrics`. Nothing is estimated: a figure that has
not been measured yet is absent, not zero.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from strata.core.messages import (
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CheckpointFailed,
    Event,
    RecoveryRecorded,
    ShardsMoved,
    WorkerFailed,
)

RPS_WINDOW_S = 5.0
CHECKPOINT_WINDOW_S = 300.0
BARRIERS_KEPT = 1_000
_LONG_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 900)
RECOVERY_PHASES = frozenset({"detect", "abort", "regroup", "rendezvous", "spawn", "load", "first_step"})
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


class CoordinatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.events_total = 0
        self._requests = Counter(
            "strata_grpc_requests",
            "Unary calls and stream messages handled",
            ["method"],
            registry=self.registry,
        )
        self._refused = Counter(
            "strata_access_refused",
            "Calls whose caller was not recognised, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._barrier = Histogram(
            "strata_barrier_seconds",
            "First arrival to release",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._plan = Histogram(
            "strata_shard_assignment_seconds",
            "Time to reconcile all plans with their members",
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self._checkpoint_bytes = Counter(
            "strata_checkpoint_bytes", "Bytes of completed checkpoints", registry=self.registry
        )
        self._checkpoints = Counter(
            "strata_checkpoints", "Checkpoints by outcome", ["status"], registry=self.registry
        )
        self._checkpoint_seconds = Histogram(
            "strata_checkpoint_seconds",
            "First byte to durable, of completed checkpoints",
            buckets=_LONG_BUCKETS,
            registry=self.registry,
        )
        self._barriers = Counter(
            "strata_barriers", "Barriers that ended, by outcome", ["outcome"], registry=self.registry
        )
        self._shards_moved = Counter(
            "strata_shards_moved", "Shards given to another worker", registry=self.registry
        )
        self._recovery = Histogram(
            "strata_recovery_seconds",
            "Last step before a loss to the first step after it",
            buckets=_LONG_BUCKETS,
            registry=self.registry,
        )
        self._recovery_phases = Counter(
            "strata_recovery_phase_seconds",
            "Duration of recoveries by phase",
            ["phase"],
            registry=self.registry,
        )
        self._lost_steps = Counter(
            "strata_recovery_lost_steps", "Steps lost in recoveries", registry=self.registry
        )
        self._events = Counter("strata_events", "Events decided", registry=self.registry)
        self.event_readers = Gauge(
            "strata_event_readers", "Readers of the event stream", registry=self.registry
        )
        self.tasks = Gauge("strata_tasks", "Tasks by status", ["status"], registry=self.registry)
        self._notifications = Counter(
            "strata_notifications",
            "Notifications by channel and outcome",
            ["outcome"],
            registry=self.registry,
        )
        self._failures = Counter("strata_worker_failures", "Workers declared failed", registry=self.registry)
        self.workers = Gauge("strata_workers", "Known workers by status", ["status"], registry=self.registry)
        self.generation = Gauge("strata_generation", "Changes of the member set", registry=self.registry)
        self.sessions = Gauge("strata_sessions", "Connected worker sessions", registry=self.registry)
        self.agents = Gauge("strata_agents", "Connected agents of rendezvous", registry=self.registry)
        for family, values in (
            (self._checkpoints, ("completed", "failed")),
            (self._barriers, ("released", "broken")),
            (self._notifications, ("sent", "failed", "dropped")),
            (self._recovery_phases, RECOVERY_PHASES),
        ):
            for value in values:
                family.labels(value)  # From zero on: the first one must be an increase.
        self._counts: dict[str, int] = {}
        self._total = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=64)
        self._barrier_waits_s: deque[float] = deque(maxlen=BARRIERS_KEPT)
        self._saves: deque[tuple[float, int, float]] = deque(maxlen=1_000)
        self._last_plan_s: float | None = None

    # --- measured where it happens --------------------------------------------------------------------------

    def request(self, method: str) -> None:
        """Cheap enough for every heartbeat: Prometheus collects it when it asks."""
        self._counts[method] = self._counts.get(method, 0) + 1
        self._total += 1

    def access_refused(self, reason: str) -> None:
        self._refused.labels(reason).inc()

    def notified(self, outcome: str) -> None:
        """Called on threads of channels."""
        self._notifications.labels(outcome).inc()

    def planned(self, seconds: float) -> None:
        self._last_plan_s = seconds
        self._plan.observe(seconds)

    def decided(self, facts: int) -> None:
        self.events_total += facts
        self._events.inc(facts)

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BarrierReleased):
                self._barriers.labels("released").inc()
                self._barrier.observe(event.waited_s)
                self._barrier_waits_s.append(event.waited_s)
            elif isinstance(event, CheckpointCompleted):
                self._checkpoints.labels("completed").inc()
                self._checkpoint_bytes.inc(event.size_bytes)
                if event.duration_s > 0:
                    self._checkpoint_seconds.observe(event.duration_s)
                    self._saves.append((time.monotonic(), event.size_bytes, event.duration_s))
            elif isinstance(event, CheckpointFailed):
                self._checkpoints.labels("failed").inc()
            elif isinstance(event, WorkerFailed):
                self._failures.inc()
            elif isinstance(event, BarrierBroken):
                self._barriers.labels("broken").inc()
            elif isinstance(event, ShardsMoved):
                self._shards_moved.inc(sum(map(len, event.moved.values())))
            elif isinstance(event, RecoveryRecorded):
                self._recovered(event)

    def _recovered(self, event: RecoveryRecorded) -> None:
        self._recovery.observe(sum(event.phases_s.values()))
        self._lost_steps.inc(event.lost_steps)
        for phase, seconds in event.phases_s.items():
            # Names come from workers; the number of series must not.
            self._recovery_phases.labels(phase if phase in RECOVERY_PHASES else "other").inc(seconds)

    def sample(self) -> None:
        """Called about once a second: the rate is the difference over the window."""
        self._samples.append((time.monotonic(), self._total))

    # --- asked for ------------------------------------------------------------------------------------------

    def requests_per_second(self) -> float:
        now_s = time.monotonic()
        since = next((s for s in self._samples if now_s - s[0] <= RPS_WINDOW_S), None)
        if since is None or now_s - since[0] < 0.05:
            return 0.0
        return (self._total - since[1]) / (now_s - since[0])

    def barrier_p99_ms(self) -> float | None:
        if not self._barrier_waits_s:
            return None
        waits = sorted(self._barrier_waits_s)
        return waits[min(len(waits) - 1, int(len(waits) * 0.99))] * 1000

    def plan_ms(self) -> float | None:
        return None if self._last_plan_s is None else self._last_plan_s * 1000

    def checkpoint_mb_s(self) -> float | None:
        """Bytes over writing time of the checkpoints completed lately."""
        since_s = time.monotonic() - CHECKPOINT_WINDOW_S
        saves = [(size, seconds) for at_s, size, seconds in self._saves if at_s >= since_s]
        if not saves:
            return None
        return sum(size for size, _ in saves) / 1e6 / sum(seconds for _, seconds in saves)

    def bring_up(self) -> None:
        """Hand over what was only counted so far."""
        for method, count in self._counts.items():
            self._requests.labels(method).inc(count)
        self._counts.clear()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
