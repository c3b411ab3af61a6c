"""An error that comes back without a new step ends a run; bad luck does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.faults.failures import SIGKILL, Failure, WorkerError, root_cause
from strata.core.faults.restarts import QUICK_S, Policy, PolicyError, Restarts

TYPO = WorkerError(type="NameError", message="name 'modle' is not defined", where=("a.py:3", "a.py:9"))
LOST_PEER = WorkerError(
    type="RuntimeError",
    message="[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4455",
    where=("a.py:40",),
)


SIGSEGV = 11


def outcome(
    *errors: WorkerError | None, lasted_s: float = 1.0, policy: str = "", every_s: float = 0.0
) -> list[bool]:
    """After each failure: whether the run is given up. One without an error was killed."""
    ends = [Failure(rank=0, exit_code=1, error=error) if error else KILLED for error in errors]
    return verdicts(*ends, lasted_s=lasted_s, policy=policy, every_s=every_s)


def verdicts(*failures: Failure, lasted_s: float = 1.0, policy: str = "", every_s: float = 0.0) -> list[bool]:
    restarts = Restarts(Policy.parse(policy))
    found = [
        restarts.failed(failure, lasted_s=lasted_s, now_s=number * every_s)
        for number, failure in enumerate(failures)
    ]
    return [verdict.decision == "stop" for verdict in found]


KILLED, CRASHED = Failure(rank=0, exit_code=-SIGKILL), Failure(rank=0, exit_code=-SIGSEGV)


def test_the_same_error_at_the_same_place_is_given_up_the_second_time() -> None:
    assert outcome(TYPO, TYPO) == [False, True]
    restarts = Restarts()
    for _ in range(2):
        verdict = restarts.failed(Failure(exit_code=1, error=TYPO), lasted_s=1.0, now_s=0.0)
    assert "NameError: name 'modle' is not defined (a.py:9)" in verdict.reason


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
    restarts = Restarts()
    found = [
        restarts.failed(
            Failure(exit_code=1, error=replace(TYPO, step=step)),
            lasted_s=1.0,
            now_s=0.0,
            others_continue=True,
        )
        for step in (100, 110, 120)
    ]
    assert [verdict.decision for verdict in found] == ["restart", "restart", "stop"]
    assert "came back 2 times in a row" in found[2].reason


def test_a_crash_without_words_is_given_up_the_third_time_and_a_kill_from_outside_never() -> None:
    assert verdicts(CRASHED, CRASHED, CRASHED) == [False, False, True]
    assert verdicts(CRASHED, CRASHED, KILLED, CRASHED) == [False, False, False, True]
    assert verdicts(*[CRASHED] * 5, lasted_s=QUICK_S) == [False] * 5
    assert verdicts(*[KILLED] * 20) == [False] * 20
    assert verdicts(*[replace(KILLED, oom_killed=True)] * 3) == [False, False, True]


def test_the_policy_of_a_run_decides() -> None:
    assert outcome(TYPO, policy="user_error=stop") == [True]
    assert outcome(TYPO, TYPO, TYPO, policy="user_error=continue") == [False, False, True]
    assert outcome(*[TYPO] * 5, policy="user_error=continue, same_fingerprint=5") == [False] * 4 + [True]
    assert verdicts(CRASHED, policy="same_fingerprint=1") == [True]
    broken = Failure(exit_code=1, error=replace(TYPO, type="RuntimeError", message="CUDA error: unknown"))
    assert verdicts(broken, policy="gpu=stop") == [True]
    assert verdicts(Failure(exit_code=-15), Failure(exit_code=75), policy="preemption=stop") == [True, True]
    assert verdicts(Failure(exit_code=-15), Failure(exit_code=75)) == [False, False]


def test_restarts_are_bounded_by_the_hour_whatever_the_reason() -> None:
    assert verdicts(*[KILLED] * 4, policy="max_restarts_per_hour=3", every_s=60) == [False] * 3 + [True]
    assert verdicts(*[KILLED] * 8, policy="max_restarts_per_hour=3", every_s=1_250) == [False] * 8


@pytest.mark.parametrize(
    "text", ["stop", "user_error=never", "same_fingerprint=0", "max_restarts_per_hour=-1", "retries=3"]
)
def test_a_policy_that_cannot_be_read_says_what_may_be_written(text: str) -> None:
    with pytest.raises(PolicyError, match=r"choose from same_fingerprint|may be stop or|at least"):
        Policy.parse(text)
