"""Named values: swapped against the version that was seen, and dropped by the clock that nobody can set."""

from __future__ import annotations

from itertools import count
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from strata.coordinator.journal import codec
from strata.core.fleet.values import DROP_AFTER_S, RESERVED_AT_ONCE
from strata.core.messages import (
    Instant,
    Overloaded,
    Swapped,
    SwapValue,
    Tick,
    ValueDropped,
    ValueSwapped,
    VersionsReserved,
)
from tests.core.builders import WALL_OFFSET_S, Fleet


def swap(fleet: Fleet, key: str, *, expected: int = 0, body: bytes = b"body", soft: bool = False) -> Swapped:
    command = SwapValue(key=key, body=body, expected_version=expected, soft=soft)
    return cast(Swapped, fleet.do(command).reply)


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
    assert list(fleet.cluster.values.durable) == ["left alone", "in use"]
    (dropped,) = fleet.tick(2).events
    assert isinstance(dropped, ValueDropped)
    assert list(fleet.cluster.values.durable) == ["in use"]
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
        assert again.cluster.values.durable == fleet.cluster.values.durable
        assert not again.tick(DROP_AFTER_S - 1).events
        assert again.tick(2).events
        assert not again.replayed().cluster.values.durable, "the drop itself is in the journal"


# --- soft values ----------------------------------------------------------------------------------------------


def test_a_soft_swap_counts_and_fences_and_a_restart_forgets_it() -> None:
    fleet = Fleet()
    first = swap(fleet, "k", body=b"durable")
    second = swap(fleet, "k", expected=first.version, body=b"soft", soft=True)
    assert (second.made, second.body) == (True, b"soft")
    assert second.version > first.version
    assert not swap(fleet, "k", expected=first.version, body=b"late").made
    for again in (fleet.replayed(), fleet.compacted()):
        for seen in (first, second):
            lost = swap(again, "k", expected=seen.version, body=b"late")
            assert (lost.made, lost.body) == (False, b"durable")
            assert lost.version > second.version, "a version is given out once, also over a restart"
        assert swap(again, "k", expected=lost.version, body=b"on").made


@pytest.mark.parametrize("compacted", [False, True])
def test_a_version_from_before_two_restarts_is_not_given_out_again(compacted: bool) -> None:
    """Whoever read the first version must not swap: the value was replaced, softly, before the first restart."""
    fleet = Fleet()
    first = swap(fleet, "b").version
    assert swap(fleet, "b", expected=first, soft=True).made
    fleet = fleet.compacted() if compacted else fleet.replayed()
    assert swap(fleet, "a").made
    fleet = fleet.compacted() if compacted else fleet.replayed()
    assert not swap(fleet, "b", expected=first).made


def test_a_value_that_was_only_ever_soft_is_absent_after_a_restart() -> None:
    fleet = Fleet()
    soft = swap(fleet, "k", soft=True)
    again = fleet.replayed()
    assert swap(again, "k", expected=soft.version).version == 0
    assert swap(again, "k").version > soft.version


def test_a_durable_swap_replaces_a_soft_one_for_good() -> None:
    fleet = Fleet()
    soft = swap(fleet, "k", soft=True)
    swap(fleet, "k", expected=soft.version, body=b"durable")
    assert fleet.replayed().cluster.values.get("k").body == b"durable"  # type: ignore[union-attr]


def test_a_soft_value_that_is_refreshed_is_not_dropped() -> None:
    fleet = Fleet()
    version = swap(fleet, "k").version
    fleet.tick(DROP_AFTER_S - 1)
    swap(fleet, "k", expected=version, soft=True)
    assert not fleet.tick(DROP_AFTER_S - 1).events
    assert fleet.tick(2).events
    assert fleet.cluster.values.get("k") is None


def test_soft_swaps_leave_one_small_entry_in_a_million() -> None:
    version = RESERVED_AT_ONCE - 1_000  # So that they go over the end of what is reserved.
    fleet = Fleet(
        snapshot=[ValueSwapped(key="k", body=b"", version=version, reason="it was there", at_s=0.0)]
    )
    before = len(fleet.journal)
    for _ in range(10_000):
        version = swap(fleet, "k", expected=version, body=bytes(12_000), soft=True).version
    written = fleet.journal[before:]
    assert [type(event) for event in written] == [VersionsReserved]
    assert sum(len(codec.encode(event)) for event in written) < 100


class SoftAndDurable(RuleBasedStateMachine):
    """Swaps of both kinds and restarts, against what must hold whatever their order."""

    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.bodies = map(str, count())
        self.given: dict[tuple[str, int], bytes] = {}
        """What every version that was given out stood for."""
        self.over: set[tuple[str, int]] = set()
        """Versions that a later swap has replaced."""
        self.durable: dict[str, bytes] = {}

    @rule(target=tokens, key=st.sampled_from("ab"))
    def look(self, key: str) -> tuple[str, int]:
        value = self.fleet.cluster.values.get(key)
        return key, value.version if value is not None else 0

    @rule(target=tokens, token=tokens, soft=st.booleans())
    def swap(self, token: tuple[str, int], soft: bool) -> tuple[str, int]:
        key, expected = token
        body = next(self.bodies).encode()
        stood = self.fleet.cluster.values.get(key)
        answer = swap(self.fleet, key, expected=expected, body=body, soft=soft)
        assert answer.made == (expected == (stood.version if stood is not None else 0))
        if not answer.made:
            return token
        assert token not in self.over or not expected, "a swap that expected an older version was made"
        assert answer.version > max((version for _, version in self.given), default=0)
        self.over.add(token)
        if not soft:
            self.durable[key] = body
        return key, answer.version

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        self.fleet = self.fleet.compacted() if from_snapshot else self.fleet.replayed()
        found = {key: value.body for key, value in self.fleet.cluster.values.durable.items()}
        assert found == self.durable
        assert not self.fleet.cluster.values.soft

    @invariant()
    def a_version_stands_for_one_value(self) -> None:
        for key in "ab":
            value = self.fleet.cluster.values.get(key)
            if value is not None:
                assert self.given.setdefault((key, value.version), value.body) == value.body


SoftAndDurable.TestCase.settings = settings(stateful_step_count=30)
TestSoftAndDurable = SoftAndDurable.TestCase


# --- shares -------------------------------------------------------------------------------------------------


def test_one_job_keeps_only_so_much_and_leaves_the_rest_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.core.fleet.values.OWNER_BYTES", 1_000)
    monkeypatch.setattr("strata.core.fleet.values.MAX_BYTES", 1_600)
    fleet = Fleet()
    big = swap(fleet, "job/greedy/a", body=b"x" * 900)
    with pytest.raises(Overloaded, match="by job 'greedy' would be larger"):
        swap(fleet, "job/greedy/b", body=b"x" * 100, soft=True)
    with pytest.raises(Overloaded, match="would be larger"):
        swap(fleet, "job/greedy/a", expected=big.version, body=b"x" * 1_100)
    assert swap(fleet, "job/modest/b", body=b"x" * 400).made
    with pytest.raises(Overloaded, match="The values that are kept would be larger"):
        swap(fleet, "shared", body=b"x" * 400)
    small = swap(fleet, "job/greedy/a", expected=big.version, body=b"x")
    assert small.made, "what is no larger may always take its place"
    assert swap(fleet, "job/greedy/b", body=b"x" * 500).made


def test_one_job_keeps_only_so_many_values_and_dropped_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata.core.fleet.values.OWNER_VALUES", 3)
    fleet = Fleet()
    for number in range(3):
        swap(fleet, f"job/greedy/{number}", soft=number == 1)
    with pytest.raises(Overloaded, match="3 values are kept by job 'greedy'"):
        swap(fleet, "job/greedy/3")
    assert swap(fleet, "job/modest/0").made
    fleet.tick(DROP_AFTER_S + 1)
    assert swap(fleet, "job/greedy/3").made


def test_a_restart_counts_what_the_journal_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.core.fleet.values.OWNER_BYTES", 1_000)
    fleet = Fleet()
    for number in range(9):
        swap(fleet, f"k{number}", body=b"x" * 90)
    again = Fleet()
    for event in fleet.cluster.compact():
        again.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
    with pytest.raises(Overloaded, match="belong to no job"):
        swap(again, "k10", body=b"x" * 200)
