"""Who leaves, who is replaced and who meets when a worker is lost."""

from __future__ import annotations

import pytest

from strata.core.jobs.regroup import (
    BROKEN,
    EXIT_S,
    GRACE_S,
    JOINS,
    SETTLE_S,
    SPARE_LOSSES,
    START_S,
    STEADY_S,
    Continue,
    Leave,
    Limits,
    Meet,
    Phase,
    Regroup,
    Release,
    Replace,
    Restart,
    StartSpare,
    Take,
)

LIMITS = Limits(max_in_process=3, timeout_s=10.0)


def training(workers: int = 3, *, sharded: bool = False, spares: int = 0) -> Regroup:
    regroup = Regroup(workers, spares=spares)
    for number in range(workers):
        regroup.arrived(number, now_s=0.0, waits=False, limits=LIMITS)
        regroup.attached(number, is_sharded=sharded)
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
    leave(regroup, now_s)
    assert replace(regroup, now_s) == number
    for other, worker in regroup.workers.items():
        if worker.phase is Phase.INSIDE:
            regroup.left(other, now_s=now_s, error="connection closed by peer")


def test_nothing_is_done_while_nothing_happens() -> None:
    assert training().decide(50.0) == Continue(until_s=None)


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


def test_the_reason_is_what_became_of_the_lost_one_and_not_who_noticed_it_first() -> None:
    regroup = training()
    regroup.left(0, now_s=1.0, error=f"{BROKEN} on rank 0: connection closed by peer")
    regroup.ended(1, "rank 1 was killed", now_s=1.01)
    leave(regroup, 1.01)
    replace(regroup, 1.01)
    regroup.left(2, now_s=1.02)
    assert regroup.decide(1.02) == Meet(workers=(0, 2), reason="rank 1 was killed")


def test_a_replacement_that_is_ready_early_joins_after_the_survivors_first_step() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    replace(regroup, 1.0)
    regroup.arrived(1, now_s=1.1, waits=True, limits=LIMITS)
    for number in (0, 2):
        regroup.left(number, now_s=1.2)
    assert regroup.decide(1.2) == Meet(workers=(0, 2), reason="killed")


def test_a_broken_collective_is_enough_to_begin() -> None:
    """The agent may see the end of a process later than its peers do."""
    regroup = training()
    regroup.left(0, now_s=1.0, error="connection closed by peer")
    assert regroup.decide(1.0) == Leave(workers=(1, 2), reason="connection closed by peer")


def test_an_ended_connection_is_enough_not_to_wait_for_the_end_of_its_process() -> None:
    """A process that holds a device has ended half a second after its connections have."""
    regroup = training()
    regroup.dropped(1, "rank 1 has ended", now_s=1.0)
    leave(regroup, 1.0)
    for number in (0, 2):
        regroup.left(number, now_s=1.1, error="connection closed by peer")
    assert regroup.decide(1.1) == Meet(workers=(0, 2), reason="rank 1 has ended")
    regroup.met((0, 2), now_s=1.1)
    regroup.ended(1, "rank 1 was killed by SIGKILL", now_s=1.5)
    assert replace(regroup, 1.5) == 1
    assert not regroup.is_over


def test_why_a_connection_ended_is_said_where_it_is_known_in_time() -> None:
    regroup = training()
    regroup.dropped(1, "rank 1 has ended", now_s=1.0)
    regroup.ended(1, "rank 1 was killed by SIGKILL", now_s=1.0)
    assert regroup.decide(1.0) == Leave(workers=(0, 2), reason="rank 1 was killed by SIGKILL")


def test_workers_that_all_ended_are_restarted_once_it_is_known_how() -> None:
    regroup = training(2)
    for number in (0, 1):
        regroup.dropped(number, f"rank {number} has ended", now_s=1.0)
    assert regroup.decide(1.0) == Continue(until_s=1.0 + EXIT_S)
    regroup.ended(0, "rank 0 was killed by SIGKILL", now_s=1.1)
    assert regroup.decide(1.1) == Restart(
        reason="no worker of this machine is left: rank 0 was killed by SIGKILL"
    )


def test_a_worker_whose_connection_ended_and_whose_process_does_not_is_not_waited_for() -> None:
    regroup = training(1)
    regroup.dropped(0, "rank 0 has ended", now_s=1.0)
    assert regroup.decide(1.0 + EXIT_S) == Restart(
        reason="no worker of this machine is left: rank 0 has ended"
    )


def test_a_generation_with_one_that_ended_while_all_met_is_over_at_once() -> None:
    regroup = training(2)
    regroup.others_wait()
    leave(regroup, 1.0)
    for number in (0, 1):
        regroup.left(number, now_s=1.0)
    regroup.dropped(1, "rank 1 has ended", now_s=1.1)
    regroup.met((0, 1), now_s=1.2)
    assert regroup.decide(1.2) == Leave(workers=(0,), reason="worker 1 ended during the rendezvous")


def test_without_a_job_no_first_step_is_reported_and_a_replacement_waits_only_for_a_grace() -> None:
    for has_job in (False, True):
        regroup = Regroup(2)
        for number in range(2):
            regroup.arrived(number, now_s=0.0, waits=False, limits=LIMITS)
            if has_job:
                regroup.attached(number, is_sharded=False)
        lose(regroup, 1, 1.0)
        regroup.met((0,), now_s=1.0)
        regroup.arrived(1, now_s=1.1, waits=True, limits=LIMITS)
        assert isinstance(regroup.decide(1.0 + GRACE_S), Continue if has_job else Leave)
        assert isinstance(regroup.decide(1.0 + SETTLE_S), Leave)


def test_survivors_do_not_wait_long_for_one_that_is_busy_and_it_joins_later() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    replace(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    assert regroup.decide(1.5) == Continue(until_s=1.0 + GRACE_S)
    assert regroup.decide(1.0 + GRACE_S) == Meet(workers=(0,), reason="killed")
    regroup.met((0,), now_s=2.0)
    regroup.stepped(10)
    regroup.left(2, now_s=5.0)
    assert regroup.decide(5.0) == Continue(until_s=5.0 + GRACE_S)  # The replacement is about to join as well.
    assert regroup.decide(5.0 + GRACE_S) == Leave(workers=(0,), reason=JOINS)


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
    regroup.met((1,), now_s=1.1)
    regroup.ended(0, "rank 0 failed", now_s=1.2)
    assert isinstance(regroup.decide(1.2), Replace)
    regroup.replaced(0, now_s=1.2)
    assert not regroup.is_over  # The others are not disturbed a second time.


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
    leave(regroup, 1.0)
    assert {replace(regroup, 1.0), replace(regroup, 1.0)} == {1, 2}
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
    assert regroup.decide(1.0) == Meet(workers=(0,), reason="killed")
    regroup.met((0,), now_s=1.0)
    assert replace(regroup, 1.0) == 1


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


def left_behind() -> Regroup:
    """Worker 2 does not leave, and the others continue without it."""
    regroup = training()
    regroup.left(0, now_s=1.0, error="timed out")
    leave(regroup, 1.0)
    regroup.left(1, now_s=1.0)
    regroup.met((0, 1), now_s=1.0 + GRACE_S)
    return regroup


def test_who_comes_late_from_a_generation_before_saves_nothing() -> None:
    regroup = left_behind()
    assert not regroup.may_rescue(2, 10)
    regroup.left(1, now_s=3.0, error="connection closed by peer")
    assert regroup.may_rescue(0, 10)


@pytest.mark.parametrize("end", ["dropped", "ended"])
def test_end_of_one_that_was_left_behind_does_not_disturb_the_others(end: str) -> None:
    regroup = left_behind()
    getattr(regroup, end)(2, "worker 2 was killed", now_s=3.0)
    assert not regroup.is_over
    regroup.ended(2, "worker 2 was killed", now_s=3.0)
    assert not regroup.is_over
    assert replace(regroup, 3.0) == 2


def test_one_that_was_left_behind_and_leaves_later_joins_like_a_replacement() -> None:
    regroup = left_behind()
    regroup.stepped(10)
    regroup.left(2, now_s=5.0, error="connection closed by peer")
    assert regroup.decide(5.0) == Leave(workers=(0, 1), reason=JOINS)


def test_who_saves_its_state_is_waited_for_longer_than_who_is_only_busy() -> None:
    regroup = training()
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    replace(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    assert regroup.may_rescue(2, 7)
    assert isinstance(regroup.decide(5.0), Continue)
    regroup.left(2, now_s=5.0)
    assert isinstance(regroup.decide(5.0), Meet)


def test_a_replacement_does_not_begin_before_a_survivor() -> None:
    regroup = training(2)
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    replace(regroup, 1.0)
    regroup.arrived(1, now_s=1.5, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(1.0 + 2 * GRACE_S), Continue)
    assert isinstance(regroup.decide(1.0 + LIMITS.timeout_s), Replace)


# --- spares ----------------------------------------------------------------------------------------------------------


def with_spares(workers: int = 3, *, sharded: bool = False, spares: int = 1) -> Regroup:
    """All train, and the spares wait."""
    regroup = training(workers, sharded=sharded, spares=spares)
    regroup.stepped(1)
    for _ in range(spares):
        regroup.arrived(start_spare(regroup, 0.0), now_s=0.0, waits=True, limits=LIMITS)
    return regroup


def start_spare(regroup: Regroup, now_s: float) -> int:
    instruction = regroup.decide(now_s)
    assert isinstance(instruction, StartSpare)
    regroup.spare_started(instruction.spare, now_s=now_s)
    return instruction.spare


def take(regroup: Regroup, now_s: float) -> Take:
    instruction = regroup.decide(now_s)
    assert isinstance(instruction, Take), instruction
    regroup.taken(instruction.worker, instruction.spare, now_s=now_s)
    return instruction


def test_spares_are_started_when_all_train_and_no_sooner() -> None:
    regroup = training(2, spares=1)
    assert regroup.decide(0.0) == Continue(until_s=SETTLE_S)
    regroup.stepped(1)
    assert start_spare(regroup, 1.0) == 2
    assert isinstance(regroup.decide(1.0), Continue)


def test_spares_are_started_where_nobody_reports_steps() -> None:
    regroup = training(2, spares=1)
    assert isinstance(regroup.decide(SETTLE_S), StartSpare)


def test_a_spare_takes_the_lost_ones_place_and_sharded_ranks_meet_at_once() -> None:
    regroup = with_spares(sharded=True)
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    assert take(regroup, 1.0) == Take(worker=1, spare=3, reason="killed")
    for number in (0, 2):
        regroup.left(number, now_s=1.1)
    assert regroup.decide(1.1) == Meet(workers=(0, 1, 2), reason="killed")


def test_a_spare_joins_replicated_ranks_after_their_first_step() -> None:
    regroup = with_spares()
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    for number in (0, 2):
        regroup.left(number, now_s=1.1)
    assert regroup.decide(1.1) == Meet(workers=(0, 2), reason="killed")
    regroup.met((0, 2), now_s=1.1)
    take(regroup, 1.1)
    assert isinstance(regroup.decide(1.1), Continue)
    regroup.stepped(2)
    leave(regroup, 1.2)
    for number in (0, 2):
        regroup.left(number, now_s=1.3)
    assert regroup.decide(1.3) == Meet(workers=(0, 1, 2), reason="a replacement joins")
    regroup.met((0, 1, 2), now_s=1.3)
    assert isinstance(regroup.decide(1.3), Continue)
    regroup.stepped(3)
    assert start_spare(regroup, 1.4) == 4


def test_two_are_lost_and_one_spare_stands_by() -> None:
    regroup = with_spares(sharded=True)
    regroup.ended(0, "killed", now_s=1.0)
    regroup.ended(1, "killed", now_s=1.0)
    leave(regroup, 1.0)
    assert take(regroup, 1.0).worker == 0
    assert replace(regroup, 1.0) == 1
    regroup.left(2, now_s=1.0)
    assert isinstance(regroup.decide(1.5), Continue)
    regroup.arrived(1, now_s=2.0, waits=True, limits=LIMITS)
    assert isinstance(regroup.decide(2.0), Meet)


def test_a_machine_without_survivors_continues_with_its_spare() -> None:
    regroup = with_spares(1)
    regroup.dropped(0, "a connection ended", now_s=0.9)
    assert isinstance(regroup.decide(0.9), Continue)
    regroup.ended(0, "killed", now_s=1.0)
    take(regroup, 1.0)
    assert regroup.decide(1.0) == Meet(workers=(0,), reason="killed")


def test_a_spare_that_is_still_starting_is_taken_where_somebody_survives() -> None:
    regroup = training(2, spares=1)
    regroup.stepped(1)
    start_spare(regroup, 0.0)
    regroup.ended(0, "killed", now_s=1.0)
    leave(regroup, 1.0)
    assert take(regroup, 1.0).spare == 2
    assert regroup.workers[0].phase is Phase.STARTING
    regroup.ended(1, "killed", now_s=1.0)
    assert isinstance(regroup.decide(1.0), Restart)


def test_the_end_of_a_spare_disturbs_nobody_and_another_is_started() -> None:
    regroup = with_spares()
    regroup.dropped(3, "a connection ended", now_s=1.0)
    regroup.ended(3, "killed", now_s=1.0)
    assert not regroup.is_over
    assert start_spare(regroup, 1.0) == 4


def test_spares_that_end_in_a_row_are_given_up() -> None:
    regroup = with_spares()
    for number in range(3, 2 + SPARE_LOSSES):
        regroup.ended(number, "killed", now_s=1.0)
        assert start_spare(regroup, 1.0) == number + 1
    regroup.ended(2 + SPARE_LOSSES, "killed", now_s=1.0)
    assert regroup.has_given_up_spares
    assert isinstance(regroup.decide(1.0), Continue)


def test_a_spare_that_stood_by_for_long_ends_the_row() -> None:
    regroup = with_spares()
    for number in range(3, 3 + 2 * SPARE_LOSSES):
        at_s = STEADY_S * (number - 2)
        regroup.ended(number, "killed", now_s=at_s)
        assert start_spare(regroup, at_s) == number + 1
        regroup.arrived(number + 1, now_s=at_s, waits=True, limits=LIMITS)


def test_a_worker_that_does_not_leave_is_replaced_by_the_spare() -> None:
    regroup = with_spares(2)
    regroup.others_wait()
    leave(regroup, 1.0)
    regroup.left(0, now_s=1.0)
    regroup.met((0,), now_s=2.0)
    assert take(regroup, 11.0).worker == 1


def test_messages_of_a_spare_that_has_ended_change_nothing() -> None:
    regroup = with_spares(2)
    regroup.ended(2, "killed", now_s=1.0)
    regroup.arrived(2, now_s=1.0, waits=True, limits=LIMITS)
    regroup.withdrew(2, now_s=1.0)
    assert regroup.is_active
    assert not regroup.spares


def test_a_machine_that_stands_by_waits_until_it_is_let_in() -> None:
    regroup = Regroup(2)
    regroup.stand_by(now_s=0.0)
    ready = []
    for number in (0, 1):
        ready.append(regroup.is_ready)
        regroup.arrived(number, now_s=1.0, waits=True, limits=LIMITS)
    assert [*ready, regroup.is_ready] == [False, False, True]
    assert regroup.decide(100.0) == Continue()
    regroup.ended(1, "killed", now_s=101.0)
    assert replace(regroup, 101.0) == 1
    regroup.arrived(1, now_s=102.0, waits=True, limits=LIMITS)
    regroup.met((0, 1), now_s=103.0)
    assert regroup.is_active
    assert regroup.decide(103.0) == Continue(until_s=103.0 + GRACE_S)


def test_a_machine_whose_workers_end_while_they_stand_by_starts_them_when_it_is_let_in() -> None:
    regroup = Regroup(1)
    regroup.stand_by(now_s=0.0)
    for _ in range(SPARE_LOSSES - 1):
        regroup.ended(0, "killed", now_s=1.0)
        replace(regroup, 1.0)
    regroup.ended(0, "killed", now_s=1.0)
    assert isinstance(regroup.decide(1.0), Restart)
