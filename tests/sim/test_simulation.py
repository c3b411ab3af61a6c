"""Two hundred small disasters, each decided by its seed, and proof that the simulator would notice a mistake.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_RUNS=5000` more of them; `python -m tests.sim --seed 17 --story`
tells everything that happened in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from strata.core.cluster import Cluster
from strata.core.faults import incidents
from strata.core.faults.incidents import Incidents
from strata.core.fleet import retention
from strata.core.fleet.barriers import Barriers, OpenBarrier
from strata.core.fleet.checkpoints import CheckpointEvent, Checkpoints
from strata.core.fleet.membership import Membership
from strata.core.fleet.run_registry import RunRegistry
from strata.core.messages import (
    CheckpointCompleted,
    Command,
    CountersRestored,
    Decision,
    Event,
    IncidentClosed,
    Instant,
    ReconcileCheckpoints,
    Stale,
)
from tests.sim.coordinator import Disk, SimCoordinator
from tests.sim.oracle import Violation
from tests.sim.scenario import Result, SimulationFailed, simulate

RUNS = int(os.environ.get("STRATA_SIM_RUNS", "200"))
PER_TEST = 25
ONE_SEED = os.environ.get("STRATA_SIM_SEED")


def batches() -> list[range]:
    if ONE_SEED is not None:
        return [range(int(ONE_SEED), int(ONE_SEED) + 1)]
    return [range(first, min(first + PER_TEST, RUNS)) for first in range(0, RUNS, PER_TEST)]


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"seeds-{seeds.start}-{seeds.stop - 1}")
def test_nothing_is_lost_or_repeated_and_stale_workers_are_refused(seeds: range) -> None:
    results = [simulate(seed) for seed in seeds]
    if len(seeds) == PER_TEST:
        assert_interesting(results)


def run_all(first: int, runs: int) -> None:
    for seed in range(first, first + runs):
        simulate(seed)


def assert_interesting(results: list[Result]) -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    assert sum(result.crashes for result in results) > 10
    assert sum(result.breaks for result in results) > 50
    assert sum(result.stale for result in results) > 50
    assert sum(result.releases for result in results) > 200
    assert sum(result.storage_refusals for result in results) > 10
    assert sum(result.incidents for result in results) > 10
    assert sum(result.forgotten for result in results) > 10


def test_one_seed_is_one_story() -> None:
    assert simulate(7) == simulate(7)
    assert simulate(7).fingerprint != simulate(8).fingerprint


# --- would it notice? ---------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]


def no_incarnation_is_checked(patch: Patch) -> None:
    admit = Membership.admit
    patch(
        Membership,
        "admit",
        lambda self, worker_id, *, incarnation, generation=0: admit(
            self, worker_id, incarnation=0, generation=generation
        ),
    )


def no_generation_is_checked(patch: Patch) -> None:
    admit = Membership.admit
    patch(
        Membership,
        "admit",
        lambda self, worker_id, *, incarnation, generation=0: admit(self, worker_id, incarnation=incarnation),
    )


def barriers_open_one_short(patch: Patch) -> None:
    opened = Barriers._opened

    def short(*arguments: Any) -> OpenBarrier:
        barrier = opened(*arguments)
        return replace(barrier, expected=max(1, barrier.expected - 1))

    patch(Barriers, "_opened", short)


def retries_count_again(patch: Patch) -> None:
    patch(Barriers, "_outcome_for", lambda *arguments: None)


def losses_do_not_end_barriers(patch: Patch) -> None:
    patch(Barriers, "decide_change", lambda *arguments, **named: iter(()))


def newcomers_take_the_place_of_others(patch: Patch) -> None:
    patch(OpenBarrier, "awaits", lambda self, member: True)


def answers_do_not_wait_for_the_disk(patch: Patch) -> None:
    write = SimCoordinator._write

    def hasty(self: SimCoordinator, events: list[Event], answers: list[Callable[[], None]]) -> None:
        self._answer(answers)
        if self.cluster is not None:
            write(self, events, [])

    patch(SimCoordinator, "_write", hasty)


def snapshots_forget_the_counters(patch: Patch) -> None:
    compaction = Cluster.compaction

    def forgetful(self: Cluster) -> Iterator[Event]:
        return (event for event in compaction(self) if not isinstance(event, CountersRestored))

    patch(Cluster, "compaction", forgetful)


def what_came_while_a_snapshot_was_drawn_is_taken_to_be_in_it(patch: Patch) -> None:
    snapshot = Disk.snapshot

    def hasty(self: Disk, events: list[Event], *, position: int) -> None:
        snapshot(self, events, position=self.position)

    patch(Disk, "snapshot", hasty)


def checkpoints_that_exist_are_forgotten(patch: Patch) -> None:
    patch(retention, "_is_unusable", lambda record: record.status == "completed")


def progress_is_not_taken_from_checkpoints(patch: Patch) -> None:
    patch(Checkpoints, "position", lambda self, job: None)


def a_late_upload_counts_as_the_newest(patch: Patch) -> None:
    apply = Checkpoints.apply

    def as_newest(self: Checkpoints, event: CheckpointEvent) -> None:
        if isinstance(event, CheckpointCompleted):
            self._timelines.get(event.job_id, {}).pop(event.checkpoint_id, None)
        apply(self, event)

    patch(Checkpoints, "apply", as_newest)


def no_generation_of_the_run_is_checked(patch: Patch) -> None:
    patch(RunRegistry, "admit", lambda *arguments: None)


def registrations_that_are_over_come_back(patch: Patch) -> None:
    patch(Membership, "must_be_new", lambda *arguments: None)


def who_was_taken_for_dead_is_called_superseded(patch: Patch) -> None:
    admit = Membership.admit

    def careless(self: Membership, *arguments: Any, **named: Any) -> Any:
        try:
            return admit(self, *arguments, **named)
        except Stale as stale:
            stale.cause = "superseded"
            raise

    patch(Membership, "admit", careless)


def what_does_not_exist_any_more_stays_in_the_registry(patch: Patch) -> None:
    patch(Checkpoints, "decide_reconcile", lambda *arguments: ([], ()))


def reconciliations_count_however_late(patch: Patch) -> None:
    handle = Cluster.handle

    def late(self: Cluster, command: Command, now: Instant) -> Decision:
        if isinstance(command, ReconcileCheckpoints):
            command = replace(command, revision=self.checkpoints.revision)
        return handle(self, command, now)

    patch(Cluster, "handle", late)


def what_found_no_space_is_answered_all_the_same(patch: Patch) -> None:
    def careless(self: SimCoordinator, answers: list[Callable[[], None]]) -> None:
        self._unwritten = None
        self._answer(answers)

    patch(SimCoordinator, "_commit_failed", careless)


def a_report_that_is_said_again_counts_again(patch: Patch) -> None:
    patch(Incidents, "_known", lambda *arguments, **named: set())
    patch(Incidents, "_belongs", lambda *arguments: False)


def what_an_agent_says_late_is_not_taken(patch: Patch) -> None:
    known = Incidents._known
    patch(Incidents, "_known", lambda self, job, *, seen=False: known(self, job))


def snapshots_forget_the_incidents(patch: Patch) -> None:
    patch(Incidents, "compact", lambda self: [])


def recoveries_close_nothing(patch: Patch) -> None:
    decide = Incidents.decide_recovery

    def careless(self: Incidents, *arguments: Any) -> list[Event]:
        return [event for event in decide(self, *arguments) if not isinstance(event, IncidentClosed)]

    patch(Incidents, "decide_recovery", careless)


def whoever_is_lost_is_blamed(patch: Patch) -> None:
    patch(incidents, "first_failing", lambda failures: min(failures, key=lambda f: f.exit_code is not None))


MISTAKES = [
    checkpoints_that_exist_are_forgotten,
    what_came_while_a_snapshot_was_drawn_is_taken_to_be_in_it,
    a_report_that_is_said_again_counts_again,
    what_an_agent_says_late_is_not_taken,
    snapshots_forget_the_incidents,
    recoveries_close_nothing,
    whoever_is_lost_is_blamed,
    what_found_no_space_is_answered_all_the_same,
    no_incarnation_is_checked,
    no_generation_is_checked,
    barriers_open_one_short,
    retries_count_again,
    losses_do_not_end_barriers,
    newcomers_take_the_place_of_others,
    answers_do_not_wait_for_the_disk,
    snapshots_forget_the_counters,
    progress_is_not_taken_from_checkpoints,
    a_late_upload_counts_as_the_newest,
    no_generation_of_the_run_is_checked,
    registrations_that_are_over_come_back,
    who_was_taken_for_dead_is_called_superseded,
    what_does_not_exist_any_more_stays_in_the_registry,
    reconciliations_count_however_late,
]
SHOWN_BY: dict[Callable[[Patch], None], int] = {registrations_that_are_over_come_back: 287}
"""What the first seeds do not show: one that does."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_simulator_would_notice(
    mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch.setattr)
    with pytest.raises(SimulationFailed) as failure:
        run_all(SHOWN_BY.get(mistake, 0), RUNS)
    assert isinstance(failure.value.__cause__, Violation)
    assert f"python -m tests.sim --seed {failure.value.seed} --story" in str(failure.value)
