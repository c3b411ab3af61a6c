"""What is forgotten, and what never is."""

from __future__ import annotations

from strata.core.cluster import Cluster, Limits
from strata.core.fleet.membership import MembershipLimits
from strata.core.fleet.retention import DAY_S, RetentionLimits
from strata.core.messages import (
    BeginAttempt,
    CreateTask,
    Event,
    Instant,
    RecordsForgotten,
    StopTask,
    SwapValue,
    TaskId,
    TaskSpec,
    Tick,
)
from tests.core.builders import Fleet

LIMITS = Limits(retention=RetentionLimits(always_kept=2, slack_s=0.0))


class Clockwork:
    """A cluster whose clock is set by hand, and all of its events."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.cluster = Cluster(limits)
        self.day = 1.0
        self.events: list[Event] = []

    def handle(self, command: object) -> tuple[Event, ...]:
        now = Instant(mono_s=self.day * DAY_S, wall_s=1.7e9 + self.day * DAY_S)
        events = self.cluster.handle(command, now).events  # type: ignore[arg-type]
        self.events += events
        return events

    def create(self, name: str) -> None:
        spec = TaskSpec(
            task_id=TaskId(name),
            name=name,
            type="t",
            dataset_id=None,
            worker_count=1,
            config_json="{}",
        )
        self.handle(CreateTask(spec=spec))

    def stop(self, name: str) -> None:
        self.handle(StopTask(task_id=TaskId(name), reason=""))

    def tick_on(self, day: float) -> list[RecordsForgotten]:
        self.day = day
        return [event for event in self.handle(Tick()) if isinstance(event, RecordsForgotten)]

    def replayed(self) -> Cluster:
        again = Cluster(self.limits)
        for event in self.events:
            again.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        return again


def test_tasks_that_ended_long_ago_are_forgotten_and_a_replay_forgets_the_same() -> None:
    clock = Clockwork()
    for name in ("a", "b", "waits", "runs", "c", "d"):
        clock.create(name)
    clock.handle(BeginAttempt(task_id=TaskId("runs"), reason=""))
    for name in ("a", "b", "c", "d"):
        clock.stop(name)
    assert not clock.tick_on(30.5)
    (forgotten,) = clock.tick_on(31.5)
    assert forgotten.tasks == ("a", "b", "c", "d")
    assert set(clock.cluster.tasks.tasks) == {"waits", "runs"}
    assert not clock.tick_on(32.0)
    assert clock.replayed().compact() == clock.cluster.compact()


def test_a_task_that_ended_lately_is_kept_however_long_ago_it_was_created() -> None:
    clock = Clockwork()
    for name in ("long", "b", "c"):
        clock.create(name)
    clock.tick_on(40.0)
    clock.stop("long")
    assert not clock.tick_on(60.0)
    (forgotten,) = clock.tick_on(71.0)
    assert forgotten.tasks == ("long",)


def test_some_of_each_kind_are_kept_whatever_the_clock_says() -> None:
    clock = Clockwork(Limits(retention=RetentionLimits(slack_s=0.0)))
    for n in range(130):
        clock.create(f"t-{n}")
        clock.stop(f"t-{n}")
    (forgotten,) = clock.tick_on(1e5)
    assert forgotten.tasks == tuple(f"t-{n}" for n in range(30))
    assert len(clock.cluster.tasks.tasks) == 100


def test_values_are_dropped_after_their_days() -> None:
    clock = Clockwork(Limits(retention=RetentionLimits(values_s=3 * DAY_S)))
    clock.handle(SwapValue(key="k", body=b"v", expected_version=0, soft=False))
    clock.tick_on(3.9)
    assert clock.cluster.values.get("k") is not None
    clock.tick_on(4.1)
    assert clock.cluster.values.get("k") is None


def test_what_is_forgotten_together_waits_for_an_hour_of_it() -> None:
    clock = Clockwork(Limits(retention=RetentionLimits(always_kept=0)))
    clock.create("a")
    clock.stop("a")
    clock.create("b")
    clock.stop("b")
    assert not clock.tick_on(31.02)
    assert [len(each.tasks) for each in clock.tick_on(31.05)] == [2]


def test_removed_checkpoints_are_forgotten_and_those_that_exist_never() -> None:
    fleet = Fleet(
        Limits(
            membership=MembershipLimits(heartbeat_timeout_s=1e9),
            retention=RetentionLimits(always_kept=0, slack_s=0.0),
        )
    )
    fleet.join("a")
    for name in ("c1", "c2", "c3", "c4"):
        fleet.save("a", name)
    fleet.save("a", "c5", status="failed")
    fleet.save("a", "c6", status="in_progress")
    for name in ("c1", "c3"):
        fleet.save("a", name, status="removed")
    revision = fleet.cluster.checkpoints.revision
    fleet.now_s += 7 * DAY_S + 1
    fleet.do(Tick())
    assert list(fleet.cluster.checkpoints.records) == ["c2", "c4"]
    assert fleet.latest() == "c4"
    assert fleet.cluster.checkpoints.revision == revision  # Nothing that exists has changed.
    for again in (fleet.replayed(), fleet.compacted()):
        assert again.cluster.compact() == fleet.cluster.compact()


def test_barriers_that_ended_long_ago_are_forgotten() -> None:
    limits = RetentionLimits(always_kept=1, slack_s=0.0)
    fleet = Fleet(Limits(membership=MembershipLimits(heartbeat_timeout_s=1e9), retention=limits))
    fleet.join("a")
    for step in range(3):
        fleet.arrive("a", step=step)
    assert len(fleet.cluster.barriers.ended) == 3
    fleet.now_s += DAY_S + 1
    fleet.do(Tick())
    assert [key[2] for key, _ in fleet.cluster.barriers.ended] == [2]
    for again in (fleet.replayed(), fleet.compacted()):
        assert again.cluster.compact() == fleet.cluster.compact()
