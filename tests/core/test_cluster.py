"""The cluster as a whole: refusals change nothing, and a history always leads back to the state it came from."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.coordinator.journal import codec
from strata.core import views
from strata.core.cluster import Cluster
from strata.core.messages import (
    SOFT_EVENTS,
    BarrierBroken,
    BarrierReleased,
    BeginAttempt,
    Command,
    Decision,
    Event,
    ExitCause,
    QueueTask,
    Rebalance,
    Refused,
    SwapValue,
    TaskId,
    Tick,
    VersionsReserved,
    WorkerJoined,
)
from tests.core import hostile
from tests.core.builders import Fleet, data_json, limits, shown, trained

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def same(one: Cluster, other: Cluster) -> None:
    assert shown(one) == shown(other)
    assert one.compact() == other.compact()


def busy_fleet() -> Fleet:
    """Something of everything, so that a command has state it could spoil."""
    fleet = Fleet(limits(heartbeat_timeout_s=1e9))
    fleet.joins("a", "b")
    fleet.join("c", job="other")
    fleet.register("d")
    fleet.plan()
    fleet.save("a", "d", data_json=data_json(trained([(0, 15)])))
    fleet.arrive("a", "d", expected=2)
    fleet.arrive("b", "d", expected=2)
    fleet.arrive("a", "b")
    fleet.create_task("t")
    fleet.do(SwapValue(key="a", body=b"1", expected_version=0))
    return fleet


def attempted(fleet: Fleet, command: Command) -> Decision | Refused:
    try:
        return fleet.do(command)
    except Refused as refusal:
        return refusal


# --- hostile commands ---------------------------------------------------------------------------------------


@pytest.mark.timeout(600)  # Making a failure small takes a while.
@settings(RELAXED, max_examples=2 * settings().max_examples)
@given(st.lists(hostile.commands, min_size=1, max_size=4))
@example([QueueTask(task_id=TaskId("t"), reason="")])
@example([SwapValue(key="b", body=b"x", expected_version=0, soft=True)])
@example([BeginAttempt(task_id=TaskId("t"), reason="")])
def test_a_refusal_changes_nothing_and_what_is_accepted_can_be_written_down(commands: list[Command]) -> None:
    fleet = busy_fleet()
    for command in commands:
        history, seen = fleet.cluster.compact(), shown(fleet.cluster)
        waiting = list(views.barriers(fleet.cluster, limit=0))
        answer = attempted(fleet, command)
        if isinstance(answer, Refused):
            assert fleet.cluster.compact() == history
            assert shown(fleet.cluster) == seen
            assert list(views.barriers(fleet.cluster, limit=0)) == waiting
            assert answer.hint
            assert len(str(answer)) < 2000
            assert str(answer).isprintable()
            continue
        for event in answer.events:
            assert event.reason
            assert codec.decode(codec.kind_of(event), codec.encode(event)) == event
        msgspec.json.encode(shown(fleet.cluster))
    restarted = fleet.replayed().cluster
    same(fleet.compacted().cluster, restarted)
    assert shown(restarted) == shown(fleet.cluster)
    if not any(isinstance(event, VersionsReserved) for event in fleet.journal):
        same(restarted, fleet.cluster)  # After soft swaps values get new versions; see `Values.resume_clock`.


def test_every_command_has_a_hostile_form() -> None:
    assert set(hostile.by_kind) == set(get_args(Command)) - {Rebalance, Tick}


# --- histories ----------------------------------------------------------------------------------------------

WORKERS = st.sampled_from(["a", "b", "c", "d"])
JOBS = st.sampled_from(["default", "default", "default", "other"])
CHECKPOINTS = st.sampled_from([f"c{n}" for n in range(6)])


class Histories(RuleBasedStateMachine):
    """Any sequence of commands, restarts among them; its journal must always tell the whole story."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.incarnations: set[int] = set()
        self.ended: set[tuple[Any, ...]] = set()
        self.forgetful = False

    def attempt(self, verb: str, *arguments: Any, **named: Any) -> None:
        """Refusals are answers too."""
        known = len(self.fleet.journal)
        try:
            getattr(self.fleet, verb)(*arguments, **named)
        except Refused:
            assert len(self.fleet.journal) == known
            return
        for event in self.fleet.journal[known:]:
            self.check(event)

    def check(self, event: Event) -> None:
        match event:
            case WorkerJoined():
                assert event.incarnation not in self.incarnations
                self.incarnations.add(event.incarnation)
            case BarrierReleased() | BarrierBroken():
                # Rounds count from zero again once a barrier's past has been dropped.
                past = (event.job_id, event.barrier_id, event.step, event.round)
                assert past not in self.ended or self.forgetful
                self.ended.add(past)
            case _:
                pass

    @initialize(limits_=st.sampled_from([limits(), limits(ended_kept=2), limits(forget_failed_after_s=5.0)]))
    def start(self, limits_: Any) -> None:
        self.fleet = Fleet(limits_)
        self.forgetful = limits_.barriers.ended_kept < 10

    @rule(worker=WORKERS, job=JOBS, registration=st.sampled_from(["", "r1", "r2"]))
    def join(self, worker: str, job: str, registration: str) -> None:
        self.attempt("join", worker, job, registration=registration)

    @rule(worker=WORKERS, incarnation=st.integers(0, 5))
    def leave(self, worker: str, incarnation: int) -> None:
        self.attempt("leave", worker, incarnation=incarnation)

    @rule(worker=WORKERS)
    def lose(self, worker: str) -> None:
        if worker in self.fleet.cluster.membership.pulses:
            self.attempt("lose", worker)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.attempt("tick", seconds)

    @rule(
        worker=WORKERS,
        barrier=st.sampled_from(["p", "q"]),
        expected=st.integers(0, 3),
        call=st.sampled_from(["", "1", "2", "3"]),
        timeout_s=st.sampled_from([0.0, 5.0]),
    )
    def arrive(self, worker: str, barrier: str, expected: int, call: str, timeout_s: float) -> None:
        call_id = f"{worker}-{call}" if call else ""
        self.attempt("arrive", worker, barrier, expected=expected, call_id=call_id, timeout_s=timeout_s)

    @rule(dataset=st.sampled_from(["d", "e"]), shard=st.sampled_from([10, 30]))
    def register(self, dataset: str, shard: int) -> None:
        self.attempt("register", dataset, shard=shard)

    @rule()
    def plan(self) -> None:
        self.attempt("plan")

    @rule(worker=WORKERS, epoch=st.integers(0, 5))
    def open_epoch(self, worker: str, epoch: int) -> None:
        self.attempt("open_epoch", worker, epoch)

    @rule(
        worker=WORKERS,
        checkpoint=CHECKPOINTS,
        status=st.sampled_from(["in_progress", "completed", "completed", "failed", "removed"]),
        tier=st.sampled_from(["local", "s3"]),
        stop=st.sampled_from([0, 15, 60, 100]),
        epoch=st.integers(0, 1),
    )
    def save(self, worker: str, checkpoint: str, status: str, tier: str, stop: int, epoch: int) -> None:
        position = data_json(trained([(0, stop)], epoch=epoch)) if stop else ""
        self.attempt("save", worker, checkpoint, status=status, tiers=(tier,), data_json=position)

    @rule(task=st.sampled_from(["t", "u"]))
    def create_task(self, task: str) -> None:
        self.attempt("create_task", task)

    @rule(
        task=st.sampled_from(["t", "u"]),
        verb=st.sampled_from(["begin", "end", "stop_task", "restart_task"]),
        step=st.integers(0, 3),
    )
    def move_task(self, task: str, verb: str, step: int) -> None:
        self.attempt(verb, task)
        if task in self.fleet.cluster.tasks.tasks:
            self.attempt("progress", step, 10, task)

    @rule(task=st.sampled_from(["t", "u"]), retry=st.booleans())
    def fail_task(self, task: str, retry: bool) -> None:
        self.attempt("end", task, cause=ExitCause(kind="lost", message="gone", may_retry=retry))

    @rule(key=st.sampled_from(["k", "l"]), version=st.integers(0, 4))
    def swap(self, key: str, version: int) -> None:
        self.attempt("do", SwapValue(key=key, body=b"x", expected_version=version))

    @precondition(lambda self: self.fleet.journal)
    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        self.fleet = self.fleet.compacted() if from_snapshot else self.fleet.replayed()

    @invariant()
    def its_journal_leads_back_to_it(self) -> None:
        same(self.fleet.replayed().cluster, self.fleet.cluster)

    @invariant()
    def its_snapshot_leads_back_to_it(self) -> None:
        same(self.fleet.compacted().cluster, self.fleet.cluster)

    @invariant()
    def ranks_have_no_gaps(self) -> None:
        for job in self.fleet.cluster.membership.jobs():
            assert list(self.fleet.ranks(job).values()) == list(range(len(self.fleet.ranks(job))))

    @invariant()
    def plans_that_are_not_stale_are_even_and_name_only_members(self) -> None:
        cluster = self.fleet.cluster
        for (job, _, _), entry in cluster.datasets.plans.items():
            if job not in cluster.datasets.dirty_jobs:
                assert set(entry.plan.workers) == set(cluster.membership.roster(job))

    @invariant()
    def whoever_waits_is_a_member(self) -> None:
        cluster = self.fleet.cluster
        for barrier in cluster.barriers.open.values():
            assert set(barrier.arrived) <= set(cluster.membership.roster(barrier.key[0]))
            assert 0 < len(barrier.arrived) < barrier.expected


TestHistories = pytest.mark.timeout(600)(Histories.TestCase)  # Making a failure small takes a while.
TestHistories.settings = settings(
    RELAXED, max_examples=settings().max_examples * 3 // 5, stateful_step_count=40
)


# --- commands and events ------------------------------------------------------------------------------------


def test_only_soft_facts_stay_out_of_the_journal() -> None:
    fleet = busy_fleet()
    assert not any(isinstance(event, SOFT_EVENTS) for event in fleet.journal)
    assert fleet.cluster.barriers.open
    assert not fleet.replayed().cluster.barriers.open


def test_a_plan_that_was_stale_when_the_snapshot_was_taken_is_stale_after_the_restart() -> None:
    fleet = Fleet()
    fleet.join("a")
    fleet.register("d")
    fleet.plan()
    fleet.leave("a")
    for again in (fleet.replayed(), fleet.compacted()):
        again.plan()
        assert set(again.owners().values()) == {None}


def test_plans_are_stale_from_a_change_until_the_next_plan() -> None:
    fleet = Fleet()
    stale = []
    for change in (partial(fleet.join, "a"), partial(fleet.register, "d"), partial(fleet.lose, "a")):
        change()
        stale.append(fleet.cluster.plans_are_stale)
        fleet.plan()
        stale.append(fleet.cluster.plans_are_stale)
    assert stale == [True, False] * 3


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
def test_every_fact_carries_its_reason_and_its_time(kind: type[Event]) -> None:
    assert {"reason", "at_s"} <= {field.name for field in fields(kind)}
