"""An error that comes back without a new step ends a run; bad luck does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.restarts import QUICK_S, RepeatedErrors, WorkerError, root_cause

TYPO = WorkerError(type="NameError", message="name 'modle' is not defined", where=("a.py:3", "a.py:9"))
LOST_PEER = WorkerError(
    type="RuntimeError",
    message="[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4455",
    where=("a.py:40",),
)


def outcome(*errors: WorkerError | None, lasted_s: float = 1.0) -> list[bool]:
    """After each failure: whether the run is given up."""
    repeated = RepeatedErrors()
    return [repeated.failed(error, lasted_s=lasted_s) is not None for error in errors]


def test_the_same_error_at_the_same_place_is_given_up_the_second_time() -> None:
    assert outcome(TYPO, TYPO) == [False, True]
    reason = RepeatedErrors(TYPO, True).failed(TYPO, lasted_s=1.0)
    assert reason is not None
    assert "NameError: name 'modle' is not defined (a.py:9)" in reason


def test_numbers_in_a_message_do_not_make_it_another_error() -> None:
    one, other = (
        replace(TYPO, message=f"object at {place}, process {number}")
        for place, number in (("0x7f", 812), ("0x8e", 47))
    )
    assert outcome(one, other) == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        replace(TYPO, type="TypeError"),
        replace(TYPO, message="name 'optimiser' is not defined"),
        replace(TYPO, where=("a.py:3", "a.py:10")),
        replace(TYPO, where=("a.py:4", "a.py:9")),
    ],
)
def test_another_error_or_another_place_is_no_repetition(other: WorkerError) -> None:
    assert outcome(TYPO, other, TYPO) == [False, False, False]


def test_a_new_step_is_progress_and_a_step_made_again_is_none() -> None:
    at = [replace(TYPO, step=step) for step in (100, 105, 105)]
    assert outcome(*at) == [False, False, True]
    assert outcome(replace(TYPO, step=105), replace(TYPO, step=103)) == [False, True]
    assert outcome(TYPO, replace(TYPO, step=1)) == [False, False]
    assert outcome(replace(TYPO, step=7), TYPO) == [False, True]


def test_without_any_steps_only_short_attempts_count() -> None:
    assert outcome(TYPO, TYPO, TYPO, lasted_s=QUICK_S) == [False, False, False]
    assert outcome(replace(TYPO, step=5), replace(TYPO, step=5), lasted_s=10 * QUICK_S) == [False, True]


def test_killed_workers_and_lost_peers_neither_count_nor_hide_a_repetition() -> None:
    assert outcome(LOST_PEER, LOST_PEER, LOST_PEER, None, None) == [False] * 5
    assert outcome(TYPO, None, LOST_PEER, TYPO) == [False, False, False, True]


def test_the_first_error_of_an_attempt_that_is_not_about_others_is_to_blame() -> None:
    late = replace(TYPO, at_s=2.0)
    assert root_cause([replace(LOST_PEER, at_s=1.0), late, replace(TYPO, type="E", at_s=3.0)]) == late
    assert root_cause([LOST_PEER]) == LOST_PEER
    assert root_cause([]) is None


def test_an_error_survives_the_way_to_the_agent() -> None:
    error = replace(TYPO, step=4, traceback="Traceback …", at_s=1.5)
    assert WorkerError.from_dict(error.to_dict()) == error
    with pytest.raises(KeyError):
        WorkerError.from_dict({"type": "E"})


def test_where_others_continue_their_steps_do_not_excuse_an_error_that_comes_back() -> None:
    repeated = RepeatedErrors()
    found = [
        repeated.failed(replace(TYPO, step=step), lasted_s=1.0, others_continue=True)
        for step in (100, 110, 120)
    ]
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert "came back 2 times in a row" in found[2]
