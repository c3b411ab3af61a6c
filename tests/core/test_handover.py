"""How a machine leaves: earlier deadlines win, what fits into the time is saved, and what was lost is said plainly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.jobs.handover import Handover, Notice, Outcome, Where, choose_save, summarize


def notice(deadline_s: float) -> Notice:
    return Notice(source="AWS", reason="spot", deadline_s=deadline_s)


def outcome(
    *,
    step: int = 100,
    saved: int | None = 100,
    where: Where = "durable",
    others: bool = True,
    in_time: bool = True,
) -> Outcome:
    return Outcome(step=step, saved_step=saved, where=where, others_stay=others, in_time=in_time)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=6))
def test_the_earliest_deadline_counts_in_whatever_order_they_come(deadlines: list[float]) -> None:
    handover = Handover()
    assert handover.kill_in_s(0.0) is None
    for deadline_s in deadlines:
        before = handover.notice
        assert handover.take(notice(deadline_s)) == (before is None or deadline_s < before.deadline_s)
    assert handover.notice is not None
    assert handover.notice.deadline_s == min(deadlines)
    handover.left()
    assert not handover.take(notice(-1.0))


@given(st.floats(0, 1e6))
def test_workers_end_before_the_agent_and_the_agent_before_the_machine(within_s: float) -> None:
    handover = Handover()
    handover.take(notice(within_s))
    ask_s, kill_s = handover.ask_in_s(0.0), handover.kill_in_s(0.0)
    assert ask_s is not None
    assert kill_s is not None
    assert 0 <= ask_s <= kill_s <= within_s
    assert ask_s >= within_s * 0.8 - 1e-9 or within_s - ask_s <= 4.0 + 1e-6


@pytest.mark.parametrize(
    ("left_s", "durable_s", "expected"),
    [
        (90, 10, "durable"),
        (15, 10, "memory"),
        (16, 10, "durable"),
        (1, None, "memory"),
        (30, None, "durable"),
    ],
)
def test_a_durable_checkpoint_is_written_where_it_is_likely_to_be_done(
    left_s: float, durable_s: float | None, expected: str
) -> None:
    chosen = choose_save(
        left_s=left_s, durable_s=durable_s, has_destinations=True, others_stay=True, is_sharded=False
    )
    assert chosen == expected


def test_memory_is_enough_only_where_somebody_stays_who_has_all_of_it() -> None:
    def choose(*, others_stay: bool, is_sharded: bool, has_destinations: bool = True) -> str:
        return choose_save(
            left_s=0.1,
            durable_s=50.0,
            has_destinations=has_destinations,
            others_stay=others_stay,
            is_sharded=is_sharded,
        )

    assert choose(others_stay=True, is_sharded=False) == "memory"
    assert choose(others_stay=False, is_sharded=False) == "durable"
    assert choose(others_stay=True, is_sharded=True) == "durable"
    assert choose(others_stay=False, is_sharded=False, has_destinations=False) == "memory"


@pytest.mark.parametrize(
    ("outcomes", "lost", "said"),
    [
        ([outcome()], 0, "step 100 is durable: 0 steps lost"),
        ([outcome(where="memory")], None, "in the memory of the remaining machines"),
        ([outcome(saved=60, in_time=False)], None, "the newest save is step 60 (durable)"),
        ([outcome(saved=60, in_time=False, others=False)], 40, "step 60 is durable: 40 steps lost"),
        ([outcome(saved=None, where="nothing", in_time=False, others=False)], 100, "100 steps lost"),
        ([outcome(saved=None, where="nothing", in_time=False)], None, "continue from their own copies"),
        ([outcome(where="memory", others=False)], None, "memory of this machine, and lost with it"),
        ([outcome(saved=80, where="memory"), outcome(saved=80)], 0, "step 80 is durable"),
    ],
)
def test_what_was_lost_is_said_plainly(outcomes: list[Outcome], lost: int | None, said: str) -> None:
    summary = summarize(outcomes, workers=len(outcomes))
    assert summary.lost_steps == lost
    assert said in summary.reason


def test_a_machine_that_stood_by_has_lost_nothing_and_a_foreign_script_says_nothing() -> None:
    assert summarize([], workers=0).lost_steps == 0
    assert summarize([], workers=2).lost_steps is None
