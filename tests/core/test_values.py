"""Named values: swapped against the version that was seen, and dropped by the clock that nobody can set."""

from __future__ import annotations

from typing import cast

import pytest

from strata.core.messages import Instant, Swapped, SwapValue, Tick, ValueDropped
from strata.core.values import DROP_AFTER_S
from tests.core.builders import WALL_OFFSET_S, Fleet


def swap(fleet: Fleet, key: str, *, expected: int = 0) -> Swapped:
    return cast(Swapped, fleet.do(SwapValue(key=key, body=b"body", expected_version=expected)).reply)


def test_a_swap_needs_the_version_that_stands_there() -> None:
    fleet = Fleet()
    first = swap(fleet, "k")
    assert (first.made, swap(fleet, "k").made) == (True, False)
    assert swap(fleet, "k", expected=first.version).made


def test_only_values_that_nobody_touches_for_a_day_are_dropped() -> None:
    fleet = Fleet()
    swap(fleet, "left alone")
    version = swap(fleet, "in use").version
    fleet.tick(DROP_AFTER_S - 1)
    swap(fleet, "in use", expected=version)
    assert list(fleet.cluster.values.values) == ["left alone", "in use"]
    (dropped,) = fleet.tick(2).events
    assert isinstance(dropped, ValueDropped)
    assert list(fleet.cluster.values.values) == ["in use"]
    assert swap(fleet, "left alone").version > version + 1, "a version number is given out once"


@pytest.mark.parametrize("years", [-30, 30])
def test_a_wall_clock_that_is_set_drops_nothing_and_keeps_nothing(years: int) -> None:
    fleet = Fleet()
    swap(fleet, "k")
    wall_s = WALL_OFFSET_S + years * 365 * 86_400.0
    soon = Instant(mono_s=fleet.now_s + 1, wall_s=wall_s)
    assert not fleet.cluster.handle(Tick(), soon).events
    later = Instant(mono_s=fleet.now_s + DROP_AFTER_S + 1, wall_s=wall_s)
    assert fleet.cluster.handle(Tick(), later).events


def test_after_a_restart_every_value_has_a_day_of_its_own() -> None:
    fleet = Fleet()
    swap(fleet, "k")
    fleet.tick(DROP_AFTER_S - 1)
    for again in (fleet.replayed(), fleet.compacted()):
        assert again.cluster.values.values == fleet.cluster.values.values
        assert not again.tick(DROP_AFTER_S - 1).events
        assert again.tick(2).events
        assert not again.replayed().cluster.values.values, "the drop itself is in the journal"
