"""Every second of a process is charged to exactly one part."""

from __future__ import annotations

import itertools
import time

import pytest

from strata.agent.trace import Footprint, process_start_mono_s
from strata.core.telemetry.goodput import LIFE_METRIC, METRIC_NAMES
from strata.training.metrics import account as account_module
from strata.training.metrics.account import TimeAccount

PAUSE_S = 0.05
ROUNDING_S = 1e-6


def spend(account: TimeAccount, part: str) -> None:
    account.enter(part)
    time.sleep(PAUSE_S)


def parts(account: TimeAccount) -> dict[str, float]:
    totals = account.totals()
    return {part: totals[name] for part, name in METRIC_NAMES.items()}


def test_parts_add_up_to_the_time_since_the_process_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_module, "_accounts_created", itertools.count())
    account, began_s = TimeAccount(None), time.monotonic() - process_start_mono_s()
    for step in range(3):
        account.enter_step(step)
        time.sleep(PAUSE_S)
        account.made_step()
        spend(account, "checkpoint")
        spend(account, "waiting")
    least_s = time.monotonic() - process_start_mono_s()
    found = parts(account)
    most_s = time.monotonic() - process_start_mono_s()
    assert least_s - ROUNDING_S <= sum(found.values()) <= most_s + ROUNDING_S
    assert found["recovery"] == 0.0
    assert found["training"] >= 3 * PAUSE_S
    assert found["checkpoint"] >= 3 * PAUSE_S
    assert found["waiting"] >= began_s + 3 * PAUSE_S - ROUNDING_S, "starting is waiting"


def test_waiting_for_others_is_not_training() -> None:
    account = TimeAccount(None)
    account.enter_step(0)
    before = parts(account)
    time.sleep(PAUSE_S)
    account.waited(PAUSE_S / 2)
    after = parts(account)
    assert after["waiting"] - before["waiting"] == pytest.approx(PAUSE_S / 2, abs=0.001)
    asked_s = time.monotonic()
    account.waited(1e9)
    left_s = parts(account)["training"]
    assert 0 <= left_s <= time.monotonic() - asked_s, "no more than there was"


def test_recovery_lasts_until_lost_steps_are_trained_again() -> None:
    lost_at_mono_s = time.monotonic() - 1000.0
    before = Footprint(mono_s=lost_at_mono_s, born_mono_s=0.0, step=7, world_size=2)
    account = TimeAccount(before)
    for step in (5, 6, 7, 8):
        account.enter_step(step)
        time.sleep(PAUSE_S)
        account.made_step()
    found, since_s = parts(account), time.monotonic() - lost_at_mono_s
    assert found["recovery"] + ROUNDING_S >= 1000 + 2 * PAUSE_S, "since the last step"
    assert found["recovery"] <= since_s - 2 * PAUSE_S + ROUNDING_S
    assert found["training"] >= 2 * PAUSE_S
    assert found["waiting"] == 0.0


def test_restart_that_lost_nothing_recovers_with_its_first_step() -> None:
    account = TimeAccount(Footprint(mono_s=time.monotonic(), born_mono_s=0.0, step=3, world_size=1))
    account.enter_step(3)
    time.sleep(PAUSE_S)
    account.made_step()
    account.enter_step(4)
    recovered_s = parts(account)["recovery"]
    assert recovered_s >= PAUSE_S
    time.sleep(PAUSE_S)
    assert parts(account)["recovery"] == recovered_s


def test_a_later_account_of_the_same_process_starts_when_it_is_created() -> None:
    first = TimeAccount(None)
    time.sleep(PAUSE_S)
    began_s = time.monotonic()
    second = TimeAccount(None)
    so_far_s = sum(parts(second).values())
    assert so_far_s <= time.monotonic() - began_s + ROUNDING_S
    assert first.totals()[LIFE_METRIC] < second.totals()[LIFE_METRIC], "and is another one"
