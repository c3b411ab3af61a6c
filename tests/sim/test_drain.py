"""Machines that go, simulated: whoever crashes, is late or vanishes, deadlines hold and what was lost is known."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection

import pytest

from strata.core.fleet.drains import Drains
from strata.core.messages import Event, Instant, RecoveryRecorded
from tests.sim.drain import Fleet, Violation

RUNS = int(os.environ.get("STRATA_SIM_JOB_RUNS", "300"))


def run_all(runs: int) -> None:
    for seed in range(runs):
        Fleet(seed).run()


def test_deadlines_hold_and_nothing_is_forgotten() -> None:
    counts: Counter[str] = Counter()
    for seed in range(RUNS // 3):
        fleet = Fleet(seed)
        fleet.run()
        counts += fleet.counts
    assert min(counts[kind] for kind in ("drain", "left", "crash", "vanish", "cancel", "refused")) > 0


def test_a_deadline_that_a_restart_forgets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(self: Drains, now: Instant) -> None:
        self._due_s = dict.fromkeys(self.hosts, now.mono_s + 10_000.0)

    monkeypatch.setattr(Drains, "resume_clock", forgets)
    with pytest.raises(Violation, match="after its deadline"):
        run_all(40)


def test_a_recovery_before_the_drain_that_counts_as_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Drains.decide_recovery

    def careless(
        self: Drains, recovery: RecoveryRecorded, hosts: Collection[str], now: Instant
    ) -> list[Event]:
        return decide(self, recovery, (), now)

    monkeypatch.setattr(Drains, "decide_recovery", careless)
    with pytest.raises(Violation, match="took part in the recovery"):
        run_all(40)


def test_a_machine_that_is_let_in_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drains, "admit", lambda self, host: None)
    with pytest.raises(Violation, match="is let in"):
        run_all(40)
