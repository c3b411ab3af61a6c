"""What ranks decide about requests is the same on each of them, is never taken back, and survives every rollback."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.data.mixture import Definition, MixtureError, MixturePlan, Source
from strata.core.data.mixture_changes import Board, Request, decide, unsettled

BOARD = Board(
    run="r",
    definition=Definition(
        sources=(Source(name="a", size=9), Source(name="b", size=9)), weights={"a": 1, "b": 1}
    ),
    global_batch_size=4,
)


def plan(*changes: Request) -> MixturePlan:
    return MixturePlan(
        definition=BOARD.definition, changes=tuple(each.change for each in changes), global_batch_size=4
    )


def test_a_step_that_has_not_started_can_be_changed() -> None:
    board, request = BOARD.asked({"a": 0.25}, 10)
    decided = decide(board.requests, plan(), next_step=10)
    assert decided.changes == (request.change,)
    assert [each.status for each in decided.requests] == ["adopted"]
    assert not unsettled(board.decided(decided.requests).requests, plan(request))


def test_a_step_that_has_started_is_refused_with_the_first_possible_one() -> None:
    board, _ = BOARD.asked({"a": 0.25}, 9)
    decided = decide(board.requests, plan(), next_step=10, lead=3)
    assert not decided.changes
    assert decided.requests[0].status == "refused"
    assert decided.requests[0].reason == "step 9 has already started; the first possible step is 13"
    later = decide(board.decided(decided.requests).requests, plan(), next_step=2)
    assert not later.changes  # Also where training was rolled back to before it.
    assert not later.requests


def test_a_rollback_to_before_an_adopted_change_adopts_it_again() -> None:
    board, request = BOARD.asked({"a": 0.25}, 10)
    board = board.decided(decide(board.requests, plan(), next_step=7).requests)
    again = decide(board.requests, plan(), next_step=0)
    assert (again.changes, again.requests) == ((request.change,), ())


def test_a_lost_report_is_made_again() -> None:
    board, request = BOARD.asked({"a": 0.25}, 10)
    known = decide(board.requests, plan(request), next_step=40)
    assert not known.changes
    assert [each.status for each in known.requests] == ["adopted"]


def test_a_change_that_was_missed_is_said_to_be() -> None:
    _, request = BOARD.asked({"a": 0.25}, 10)
    missed = decide([replace(request, status="adopted")], plan(), next_step=11)
    assert "rolled back" in missed.requests[0].reason


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["a", "b"]), st.floats(0, 1)), max_size=6),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_ranks_that_meet_anywhere_end_with_the_same_changes(
    asked: list[tuple[int, str, float]], meetings: list[int]
) -> None:
    """Whether training rolls back between two meetings or not: an adopted change stays adopted."""
    board = BOARD
    adopted: list[int] = []
    for step, (from_step, name, share) in zip(meetings, asked, strict=False):
        board, _ = board.asked({name: share}, from_step)
        known = [each for each in board.requests if each.status == "adopted" and each.from_step <= step]
        board = board.decided(decide(board.requests, plan(*known), next_step=step).requests)
        now = [each.number for each in board.requests if each.status == "adopted"]
        assert set(adopted) <= set(now)
        adopted = now
    assert Board.from_bytes(board.to_bytes()) == board


def test_what_can_never_be_adopted_is_refused_at_once() -> None:
    for weights in ({"c": 0.5}, {"a": 1.5}, {}, {"a": -1.0}, {"a": 0.0, "b": 0.0}):
        with pytest.raises(MixtureError):
            BOARD.asked(weights, 5)
    with pytest.raises(MixtureError):
        Board.from_bytes(b"[]")
