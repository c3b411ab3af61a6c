"""Recovery without a restart, simulated: kills, errors, hangs and stops at any moment, on one machine and on several, with spares
and machines that stand by."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from strata.core.jobs.regroup import Phase, Regroup, Replace
from tests.sim.regroup import Fleet, Violation

RUNS = int(os.environ.get("STRATA_SIM_JOB_RUNS", "300"))
SEARCH = 40
"""So many seeds at most until a planted mistake is found."""


@pytest.mark.parametrize(("machines", "workers"), [(1, 3), (1, 8), (3, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_train_together_in_the_end(machines: int, workers: int, sharded: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(RUNS // 3):
        fleet = Fleet(seed, machines=machines, workers=workers, sharded=sharded)
        fleet.run()
        counts += fleet.counts
    assert counts["kill"]
    assert counts["Replace"]
    assert counts["Meet"] > counts["Restart"]


@pytest.mark.parametrize(("machines", "workers", "spares"), [(1, 3, 1), (1, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_spares_take_the_places_of_the_lost_and_disturb_nobody(
    machines: int, workers: int, spares: int, sharded: bool
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(RUNS // 6):
        fleet = Fleet(seed, machines=machines, workers=workers, sharded=sharded, spares=spares)
        fleet.run()
        counts += fleet.counts
    assert counts["Take"]
    assert counts["kill_spare"]
    assert counts["Meet"] > counts["Restart"]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("sharded", [False, True])
def test_machines_that_stand_by_take_the_places_of_lost_ones(spares: int, sharded: bool) -> None:
    counts: Counter[str] = Counter()
    for seed in range(RUNS // 6):
        fleet = Fleet(seed, machines=2, workers=2, sharded=sharded, spares=spares, standing_by=1)
        fleet.run()
        counts += fleet.counts
    assert counts["machine"]
    assert counts["kill_spare"]


# --- mistakes that the simulator must notice -----------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
MISTAKES: dict[str, Plant] = {}


def mistake(name: str) -> Callable[[Plant], Plant]:
    def declare(plant: Plant) -> Plant:
        MISTAKES[name] = plant
        return plant

    return declare


@mistake("the end of a spare ends the generation")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Regroup.ended

    def begins(self: Regroup, number: int, reason: str, *, now_s: float) -> None:
        is_spare = number in self.spares
        ended(self, number, reason, now_s=now_s)
        if is_spare:
            self.others_wait()

    monkeypatch.setattr(Regroup, "ended", begins)


@mistake("a spare that has ended is still taken")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Regroup.ended

    def stays(self: Regroup, number: int, reason: str, *, now_s: float) -> None:
        if number not in self.spares:
            ended(self, number, reason, now_s=now_s)

    monkeypatch.setattr(Regroup, "ended", stays)


@mistake("one spare takes two places")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Regroup.taken

    def again(self: Regroup, number: int, spare: int, *, now_s: float) -> None:
        waiting = self._spares[spare]
        taken(self, number, spare, now_s=now_s)
        self._spares[spare] = waiting

    monkeypatch.setattr(Regroup, "taken", again)


@mistake("a spare stands by, and a new process is started")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    def new(self: Regroup, number: int, reason: str, now_s: float) -> Replace:
        return Replace(worker=number, reason=reason)

    monkeypatch.setattr(Regroup, "_replacement", new)


@mistake("a spare that was taken is not followed by another")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Regroup, "_wants_spare", lambda self: self._next_spare == len(self.workers))


@mistake("a spare that is taken while it starts counts as ready")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Regroup.taken

    def ready(self: Regroup, number: int, spare: int, *, now_s: float) -> None:
        taken(self, number, spare, now_s=now_s)
        self._move(number, Phase.READY, now_s)

    monkeypatch.setattr(Regroup, "taken", ready)


@mistake("more spares are started than were asked for")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Regroup.spare_started

    def forgotten(self: Regroup, spare: int, *, now_s: float) -> None:
        started(self, spare, now_s=now_s)
        self._wanted_spares = max(self._wanted_spares, len(self._spares) + 1)

    monkeypatch.setattr(Regroup, "spare_started", forgotten)


@mistake("spares stay when the function has returned everywhere")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    restarted = Regroup.restarted

    def keeps(self: Regroup, *, now_s: float) -> None:
        spares = dict(self._spares)
        restarted(self, now_s=now_s)
        self._spares = spares

    monkeypatch.setattr(Regroup, "restarted", keeps)


@mistake("a worker of a machine that stands by is not replaced")
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Regroup.ended

    def ignored(self: Regroup, number: int, *more: Any, **options: Any) -> None:
        if not self._stands_by:
            ended(self, number, *more, **options)

    monkeypatch.setattr(Regroup, "ended", ignored)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    for seed in range(SEARCH):
        try:
            Fleet(seed, machines=2, workers=2, spares=1, standing_by=1, sharded=bool(seed % 2)).run()
        except Violation:
            return
    pytest.fail(f"{SEARCH} simulations did not notice: {name}")
