"""Pauses between attempts grow, are cut by chance, and end."""

from __future__ import annotations

import random
import time

import pytest

from strata.backoff import Backoff


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


@pytest.mark.usefixtures("uncut")
def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0)
    assert [backoff.pause_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_pause_is_cut_by_chance_but_never_below_half() -> None:
    pauses = [Backoff(first_s=1.0, longest_s=8.0).pause_s() for _ in range(100)]
    assert len(set(pauses)) > 50
    assert all(pause is not None and 0.5 <= pause <= 1.0 for pause in pauses)


@pytest.mark.usefixtures("uncut")
def test_after_success_the_next_attempt_is_due_at_once() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3.0)
    for _ in range(3):
        backoff.pause_s()
    backoff.worked()
    assert [backoff.pause_s() for _ in range(3)] == [0.0, 0.5, 1.0]


def test_retries_are_counted() -> None:
    backoff = Backoff(first_s=0.1, longest_s=0.1, retries=2)
    assert [backoff.pause_s() is None for _ in range(4)] == [False, False, True, True]


def test_no_pause_ends_after_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    backoff = Backoff(first_s=1.0, longest_s=1.0, budget_s=2.0)
    assert backoff.pause_s() is not None
    now_s = 101.9
    assert backoff.pause_s() is None
