"""The journal of a fleet of 1,000 workers stays small, however long it lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.core.cluster import Cluster
from tests.core.builders import instant
from tests.sim import month
from tests.sim.month import DAY, HOUR, LIMITS, Fleet

GIGABYTE = 10**9


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def replayed(fleet: Fleet) -> Cluster:
    again = Cluster(LIMITS)
    for event in fleet.journal.load():
        again.apply(event, instant(0.0))
    return again


def test_an_hour_of_a_fleet_is_what_its_journal_says(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tasks that report every few seconds, and compaction all the time."""
    monkeypatch.setattr("strata.coordinator.engine.SNAPSHOT_EVERY", 1_000)
    monkeypatch.setattr(month, "LOST_A_DAY", 5 * 24)
    fleet._progress_s = 5.0
    sizes = fleet.run(HOUR)
    assert sizes.compactions >= 5
    assert sizes.objects["workers"] == 1_000
    assert sizes.objects["recoveries"] >= 1
    assert sizes.journal_bytes < GIGABYTE / 10
    assert replayed(fleet).compact() == fleet.cluster.compact()


def test_what_is_old_is_forgotten_and_the_rest_is_not(fleet: Fleet) -> None:
    """Half an hour, a pause of forty days in which nobody did anything, and another half hour."""
    fleet.run(HOUR // 2)
    before = set(fleet.cluster.checkpoints.records)
    fleet._jobs.clear()
    fleet.minute += 40 * DAY
    fleet.run(2)
    usable = {record.checkpoint_id for record in fleet.cluster.checkpoints.shown()}
    assert usable == {c for c in before if c in usable}
    assert usable  # Checkpoints that exist are no older for having been saved long ago.
    assert len(fleet.cluster.barriers.ended) <= 100
    assert not fleet.cluster.values.durable.keys() & {f"rendezvous/pretraining-{n:05}" for n in range(10)}
    assert replayed(fleet).compact() == fleet.cluster.compact()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_month_of_a_fleet_stays_under_a_gigabyte(fleet: Fleet) -> None:
    sizes = fleet.run(30 * DAY)
    assert sizes.journal_bytes < GIGABYTE
    assert sizes.objects["tasks"] <= 10_000
    assert replayed(fleet).compact() == fleet.cluster.compact()
