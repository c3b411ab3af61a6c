"""A connection makes as many calls as it likes, up to its share; beyond it they wait, and only they."""

from __future__ import annotations

import pytest

from strata.coordinator import quotas
from strata.coordinator.quotas import CALLS_AT_ONCE, CALLS_PER_S, CallQuotas


def test_a_burst_does_not_wait_and_a_flood_comes_at_the_steady_rate() -> None:
    calls = CallQuotas()
    waited_s = [calls.delay_s("flood", 0.0) for _ in range(int(CALLS_AT_ONCE + 2 * CALLS_PER_S))]
    assert not any(waited_s[: int(CALLS_AT_ONCE)])
    assert waited_s[-1] == pytest.approx(2.0, abs=0.01), "two seconds' worth more than a burst"
    assert calls.delay_s("other", 0.0) == 0.0


def test_who_waits_for_answers_never_waits_here() -> None:
    calls = CallQuotas()
    assert not any(calls.delay_s("steady", number / CALLS_PER_S) for number in range(20_000))


def test_what_was_used_up_comes_back() -> None:
    calls = CallQuotas()
    for _ in range(int(2 * CALLS_AT_ONCE)):
        calls.delay_s("flood", 0.0)
    assert calls.delay_s("flood", 0.0) > 0
    assert calls.delay_s("flood", 10.0) == 0.0


def test_connections_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "CLIENTS_REMEMBERED", 100)
    calls = CallQuotas()
    for number in range(1_000):
        calls.delay_s(f"connection-{number}", 0.0)
    assert len(calls._paces) <= 100
    for number in range(1_000):
        calls.delay_s("one", 10.0 + number)
    assert len(calls._paces) == 1
