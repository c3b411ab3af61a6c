"""Agents that speak for their workers, through the same disasters: see `machines`.

`STRATA_SIM_SEED=17` runs one seed, `STRATA_SIM_RUNS=5000` more of them; `python -m tests.sim --machines --seed 17 --story` tells
everything that happened in one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strata.core.fleet.multiplexer import (
    Action,
    Arrivals,
    Beats,
    Detach,
    Multiplexer,
    StreamOpened,
    WorkerArrived,
)
from strata.core.messages import ArriveAtBarrier, Instant
from tests.sim.machines import simulate_machines
from tests.sim.oracle import Violation
from tests.sim.scenario import SimulationFailed

RUNS = int(os.environ.get("STRATA_SIM_RUNS", "120"))
PER_TEST = 40
ONE_SEED = os.environ.get("STRATA_SIM_SEED")


def batches() -> list[range]:
    if ONE_SEED is not None:
        return [range(int(ONE_SEED), int(ONE_SEED) + 1)]
    return [range(first, min(first + PER_TEST, RUNS)) for first in range(0, RUNS, PER_TEST)]


@pytest.mark.parametrize("seeds", batches(), ids=lambda seeds: f"seeds-{seeds.start}-{seeds.stop - 1}")
def test_agents_speak_for_their_workers_and_for_nobody_else(seeds: range) -> None:
    runs = [simulate_machines(seed) for seed in seeds]
    if len(seeds) < PER_TEST:
        return
    assert sum(fleet.cuts for _, fleet in runs) > 20
    assert sum(fleet.agents_killed for _, fleet in runs) > 5
    assert sum(fleet.largest > 1 for _, fleet in runs) > 5, "nobody arrived together"
    assert sum(result.releases for result, _ in runs) > 300
    assert sum(result.breaks for result, _ in runs) > 50
    assert sum(result.stale for result, _ in runs) > 50


def run_all(runs: int) -> None:
    for seed in range(runs):
        simulate_machines(seed)


def test_one_seed_is_one_story() -> None:
    assert simulate_machines(7)[0] == simulate_machines(7)[0]


# --- would it notice? ---------------------------------------------------------------------------------------

Patch = Callable[[Any, str, Any], None]


def silent_workers_are_beaten_for(patch: Patch) -> None:
    fold = Multiplexer._fold

    def everybody(self: Multiplexer, now_s: float) -> list[Action]:
        return [
            replace(action, members=tuple(self._members)) if isinstance(action, Beats) else action
            for action in fold(self, now_s)
        ]

    patch(Multiplexer, "_fold", everybody)


def who_waits_does_not_arrive_again(patch: Patch) -> None:
    opened = Multiplexer._stream_opened

    def forgetful(self: Multiplexer, stimulus: StreamOpened, now_s: float) -> list[Action]:
        actions = opened(self, stimulus, now_s)
        return [action for action in actions if not isinstance(action, Arrivals)]

    patch(Multiplexer, "_stream_opened", forgetful)


def losses_are_kept_secret(patch: Patch) -> None:
    drop = Multiplexer._drop

    def secretive(self: Multiplexer, connection: int, now_s: float) -> list[Action]:
        return [action for action in drop(self, connection, now_s) if not isinstance(action, Detach)]

    patch(Multiplexer, "_drop", secretive)


def generations_are_folded_together(patch: Patch) -> None:
    arrive = Multiplexer._arrive

    def careless(self: Multiplexer, arrived: WorkerArrived, now_s: float) -> list[Action]:
        meeting = replace(arrived.meeting, generation=0)
        return arrive(self, replace(arrived, meeting=meeting), now_s)

    patch(Multiplexer, "_arrive", careless)


def workers_arrive_as_each_other(patch: Patch) -> None:
    send = Multiplexer._send_calls

    def mixed_up(self: Multiplexer, meetings: Any) -> list[Action]:
        actions: list[Action] = []
        for action in send(self, meetings):
            if isinstance(action, Arrivals):
                members, calls = zip(*action.calls, strict=True)
                action = replace(action, calls=tuple(zip(members[1:] + members[:1], calls, strict=True)))
            actions.append(action)
        return actions

    patch(Multiplexer, "_send_calls", mixed_up)


def incarnations_are_not_checked_where_many_arrive(patch: Patch) -> None:
    from strata.core.cluster import Cluster

    ticket = Cluster._ticket

    def careless(self: Cluster, command: ArriveAtBarrier, now: Instant, fact: Any) -> Any:
        return ticket(self, replace(command, incarnation=0, generation=0), now, fact)

    patch(Cluster, "_ticket", careless)


MISTAKES = [
    silent_workers_are_beaten_for,
    who_waits_does_not_arrive_again,
    losses_are_kept_secret,
    generations_are_folded_together,
    workers_arrive_as_each_other,
    incarnations_are_not_checked_where_many_arrive,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_simulator_would_notice(
    mistake: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch.setattr)
    with pytest.raises(SimulationFailed) as failure:
        run_all(RUNS)
    assert isinstance(failure.value.__cause__, Violation)
