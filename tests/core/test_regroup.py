"""Who leaves, who is replaced and who meets when a worker is lost."""

from __future__ import annotations

import pytest

from strata.core.regroup import (
    GRACE_S,
    START_S,
    Continue,
    Leave,
    Limits,
    Meet,
    Phase,
    Regroup,
    Release,
    Replace,
    Restart,
)

LIMITS = Limits(max_in_process=3, timeout_s=10.0)


def training(workers: int = 3, *, sharded: bool = False) -> Regroup:
    regroup = Regroup(workers)
    for number in range(workers):
        regroup.arrived(number, now_s=0.0, waits=False, limits=LIMITS)
        regroup.shards(number, is_sharded=sharded)
    return regroup


def leave(regroup: Regroup, now_s: float) -> None:
    instruction = regroup.decide(now_s)
    assert isinstance(instruction, Leave)
    regroup.asked(instruction.workers, now_s=now_s)


def replace(regroup: Regroup, now_s: float) -> int:
    instruction = regroup.decide(now_s)
    assert isinstance(instruction, Replace)
    regroup.replaced(instruction.worker, now_s=now_s)
    return instruction.worker


def lose(regroup: Regroup, number: int, now_s: float) -> None:
    """A worker is killed; the others leave."""
    regroup.ended(number, f"worker {number} was killed", now_s=now_s)
    assert replace(regroup, now_s) == number
    leave(regroup, now_s)
    for other, worker in regroup.workers.items():
        if worker.phase is Phase.INSIDE:
            regroup.left(other, now_s=now_s, error="connection closed by peer")


def test_nothing_is_done_while_nothing_happens() -> None:
    assert training().decide(5.0) == Continue(until_s=None)


def test_survivors_meet_at_once_and_the_replacement_joins_when_it_is_ready() -> None:
    regroup = training()
    lose(regroup, 1, 1.0)
    meet = regroup.decide(1.1)
    assert meet == Meet(workers=(0, 2), reason="worker 1 was killed")
    regroup.met((0, 2), now_s=1.1)
    assert isinstance(regroup.decide(1.2), Continue)
    regroup.arrived(1, now_s=1.5, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(1.6), Continue)  # They have not made a step yet.
    regroup.stepped(8)
    leave(regroup, 2.0)
    for number in (0, 2):
        regroup.left(number, now_s=2.1)
    assert regroup.decide(2.1) == Meet(workers=(0, 1, 2), reason="a replacement joins")


def test_a_replacement_that_is_ready_early_joins_after_the_survivors_first_step() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    replace(regroup, 1.0)
    leave(regroup, 1.0)
    regroup.arrived(1, now_s=1.1, waits=True, limits=LIMITS)
    for number in (0, 2):
        regroup.left(number, now_s=1.2)
    assert regroup.decide(1.2) == Meet(workers=(0, 2), reason="killed")


def test_a_broken_collective_is_enough_to_begin() -> None:
    """The agent may see the end of a process later than its peers do."""
    regroup = training()
    regroup.left(0, now_s=1.0, error="connection closed by peer")
    assert regroup.decide(1.0) == Leave(workers=(1, 2), reason="connection closed by peer")


def test_survivors_do_not_wait_long_for_one_that_is_busy_and_it_joins_later() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    replace(regroup, 1.0)
    leave(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    assert regroup.decide(1.5) == Continue(until_s=1.0 + GRACE_S)
    assert regroup.decide(1.0 + GRACE_S) == Meet(workers=(0,), reason="killed")
    regroup.met((0,), now_s=2.0)
    regroup.left(2, now_s=5.0)
    assert isinstance(regroup.decide(5.0), Leave)


def test_a_worker_that_does_not_leave_in_time_is_replaced() -> None:
    regroup = training(2)
    regroup.others_wait()
    leave(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    regroup.met((0,), now_s=2.0)
    assert isinstance(regroup.decide(10.9), Continue)
    assert regroup.decide(11.0) == Replace(worker=1, reason="it did not leave within 10 s")


def test_an_error_of_its_own_ends_a_worker_and_the_others_continue_without_it() -> None:
    regroup = training(2)
    regroup.left(0, now_s=1.0, error="ValueError", is_own=True)
    leave(regroup, 1.0)
    regroup.left(1, now_s=1.0, error="connection closed by peer")
    assert regroup.decide(1.1) == Meet(workers=(1,), reason="ValueError")
    regroup.ended(0, "rank 0 failed", now_s=1.2)
    assert isinstance(regroup.decide(1.2), Replace)


def test_sharded_state_needs_every_rank() -> None:
    regroup = training(sharded=True)
    lose(regroup, 1, 1.0)
    assert isinstance(regroup.decide(3.0), Continue)
    regroup.arrived(1, now_s=4.0, waits=True, limits=LIMITS)
    assert regroup.decide(4.0) == Meet(workers=(0, 1, 2), reason="worker 1 was killed")


def test_a_replacement_that_never_comes_ends_the_wait_of_sharded_state() -> None:
    regroup = training(sharded=True)
    lose(regroup, 1, 1.0)
    assert isinstance(regroup.decide(1.0 + START_S), Restart)


def test_replacements_of_several_join_together() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    regroup.ended(2, "killed", now_s=1.0)
    assert {replace(regroup, 1.0), replace(regroup, 1.0)} == {1, 2}
    leave(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    regroup.met((0,), now_s=1.0)
    regroup.stepped(8)
    regroup.arrived(1, now_s=1.5, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(1.6), Continue)
    regroup.arrived(2, now_s=1.7, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(1.7), Leave)


def test_all_workers_lost_is_a_restart() -> None:
    regroup = training(2)
    regroup.ended(0, "killed", now_s=1.0)
    regroup.ended(1, "killed", now_s=1.0)
    assert isinstance(regroup.decide(1.0), Restart)


def test_recoveries_that_lead_nowhere_end_in_a_restart() -> None:
    regroup = training(2)
    for attempt in range(4):
        assert not isinstance(regroup.decide(float(attempt)), Restart)
        regroup.others_wait()
        if attempt == 3:
            break
        leave(regroup, float(attempt))
        for number in (0, 1):
            regroup.left(number, now_s=float(attempt))
        regroup.met((0, 1), now_s=float(attempt))
    assert isinstance(regroup.decide(9.0), Restart)


@pytest.mark.parametrize("step", [5, 6])
def test_only_a_new_step_counts_as_progress(step: int) -> None:
    regroup = training(2)
    regroup.stepped(5)
    for attempt in range(4):
        regroup.others_wait()
        if attempt == 3:
            break
        leave(regroup, 1.0)
        for number in (0, 1):
            regroup.left(number, now_s=1.0)
        regroup.met((0, 1), now_s=1.0)
        regroup.stepped(step)
    assert isinstance(regroup.decide(9.0), Restart) == (step == 5)


def test_workers_are_released_when_all_have_finished_and_not_before() -> None:
    regroup = training(2)
    regroup.finished(0, now_s=1.0)
    assert isinstance(regroup.decide(1.0), Continue)
    regroup.finished(1, now_s=2.0)
    assert regroup.decide(2.0) == Release()


def test_who_has_finished_enters_again_when_another_is_lost() -> None:
    regroup = training(2)
    regroup.finished(0, now_s=1.0)
    regroup.ended(1, "killed", now_s=1.0)
    replace(regroup, 1.0)
    assert regroup.decide(1.0) == Meet(workers=(0,), reason="killed")


def test_a_worker_that_ends_as_asked_is_not_recovered_from() -> None:
    regroup = training(2)
    regroup.withdrew(0, now_s=1.0)
    assert not regroup.is_active


def test_one_worker_rescues_each_step_and_whoever_is_further_too() -> None:
    regroup = training()
    asked = [regroup.may_rescue(number, step) for number, step in ((0, 7), (1, 7), (2, 8), (1, 7))]
    assert asked == [True, False, True, False]
    regroup.others_wait()
    regroup.met((0, 1, 2), now_s=1.0)
    assert regroup.may_rescue(0, 7)


def test_who_saves_its_state_is_waited_for_longer_than_who_is_only_busy() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    replace(regroup, 1.0)
    leave(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    assert regroup.may_rescue(2, 7)
    assert isinstance(regroup.decide(5.0), Continue)
    regroup.left(2, now_s=5.0)
    assert isinstance(regroup.decide(5.0), Meet)


def test_a_replacement_does_not_begin_before_a_survivor() -> None:
    regroup = training(2)
    regroup.ended(1, "killed", now_s=1.0)
    replace(regroup, 1.0)
    leave(regroup, 1.0)
    regroup.arrived(1, now_s=1.5, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(1.0 + 2 * GRACE_S), Continue)
    assert isinstance(regroup.decide(1.0 + LIMITS.timeout_s), Replace)
