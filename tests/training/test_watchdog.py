"""What counts as making no progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from strata.training.watchdog import Watchdog
from tests.support import eventually

TIMEOUT_S = 0.8


class Clock:
    """Continues only when asked to, after the test has looked."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.looks = 0

    def monotonic(self) -> float:
        if threading.current_thread().name == "strata-watchdog":
            self.looks += 1
        return self.now_s

    def look_twice(self) -> None:
        wanted = self.looks + 2
        eventually(lambda: self.looks >= wanted, within_s=60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("strata.training.watchdog.time", clock)
    return clock


@pytest.fixture
def watchdog(clock: Clock) -> Iterator[Watchdog]:
    watchdog = Watchdog(timeout_s=TIMEOUT_S, policy="warn", name="rank 0")
    yield watchdog
    watchdog.close()


def test_a_loop_that_makes_no_step_is_reported_once(
    watchdog: Watchdog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        watchdog.alive("the backward pass")
        for _ in range(20):
            clock.now_s += TIMEOUT_S / 5
            clock.look_twice()
    (told,) = caplog.messages
    assert "rank 0 has completed no step for" in told
    assert "while the backward pass" in told
    assert "test_a_loop_that_makes_no_step_is_reported_once" in told, "with its stack"


def test_time_in_which_the_whole_process_was_suspended_is_not_counted(
    watchdog: Watchdog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Paused, or on a machine that slept: nobody could have made a step."""
    with caplog.at_level(logging.ERROR):
        clock.look_twice()
        clock.now_s += 3_600.0
        clock.look_twice()
        watchdog.alive("the next step")
        clock.look_twice()
    assert caplog.messages == []
