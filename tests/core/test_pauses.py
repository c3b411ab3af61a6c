"""How long to wait between attempts is arithmetic."""

from __future__ import annotations

from strata.core.pauses import pause_after_s


def test_pauses_double_with_every_failure_up_to_the_longest() -> None:
    assert [pause_after_s(n, first_s=0.5, longest_s=3.0) for n in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_has_a_pause() -> None:
    assert pause_after_s(10**9, first_s=0.5, longest_s=3.0) == 3.0
