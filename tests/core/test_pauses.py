"""How long to wait is arithmetic: between attempts, and for a rate that is kept."""

from __future__ import annotations

import pytest

from strata.core.pauses import Pace, pause_after_s


def test_pauses_double_with_every_failure_up_to_the_longest() -> None:
    assert [pause_after_s(n, first_s=0.5, longest_s=3.0) for n in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_has_a_pause() -> None:
    assert pause_after_s(10**9, first_s=0.5, longest_s=3.0) == 3.0


def test_a_flood_comes_at_the_steady_rate_after_its_burst() -> None:
    pace = Pace(0.5)
    assert [pace.take(0.25, 10.0) for _ in range(4)] == [0.0, 0.0, 0.25, 0.5]
    assert pace.take(0.25, 10.5) == pytest.approx(0.25), "half a second of it has passed"


def test_what_keeps_to_the_rate_never_waits() -> None:
    pace = Pace()
    assert not any(pace.take(0.25, number / 4) for number in range(100))


def test_one_piece_larger_than_a_burst_needs_as_long_a_silence() -> None:
    pace = Pace(0.5)
    assert pace.take(8.0, 10.0) == 0.0
    assert pace.take(8.0, 12.0) == 6.0
    assert pace.take(8.0, 26.0) == 0.0


def test_silence_is_worth_no_more_than_a_burst() -> None:
    pace = Pace(0.5)
    pace.take(0.5, 10.0)
    assert not pace.is_unused(10.4)
    assert pace.is_unused(10.5)
    assert [pace.take(0.25, 1000.0) for _ in range(3)] == [0.0, 0.0, 0.25]
