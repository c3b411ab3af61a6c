"""The checker finds what is planted, accepts what can be explained, and agrees with trying every order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.chaos.linearizability import UNKNOWN, Latest, Model, Operation, Register, check, check_key


def op(
    called_s: float,
    answered_s: float | None,
    *action: Hashable,
    result: Hashable = None,
    client: str = "c",
    key: str = "k",
) -> Operation:
    return Operation(
        client=client, key=key, action=action, result=result, called_s=called_s, answered_s=answered_s
    )


def swap(called_s: float, answered_s: float, new: str, expected: str | None, made: bool = True) -> Operation:
    return op(called_s, answered_s, "swap", new, expected, result=(made, new))


def test_what_happens_one_after_the_other_is_linearizable() -> None:
    history = [
        op(0, 1, "read"),
        swap(2, 3, "a", None),
        op(4, 5, "read", result="a"),
        op(6, 7, "swap", "b", "x", result=(False, "a")),
        swap(8, 9, "b", "a"),
    ]
    assert check(history, Register()) == []


def test_concurrent_operations_may_have_happened_in_either_order() -> None:
    for seen in (None, "a"):
        assert check([swap(0, 10, "a", None), op(1, 9, "read", result=seen)], Register()) == []


PLANTED: dict[str, list[Operation]] = {
    "a stale read": [swap(0, 1, "a", None), swap(2, 3, "b", "a"), op(4, 5, "read", result="a")],
    "an acknowledged write that is lost": [swap(0, 1, "a", None), op(2, 3, "read", result=None)],
    "a value that nobody wrote": [swap(0, 1, "a", None), op(2, 3, "read", result="z")],
    "two that both replaced the same value": [
        swap(0, 1, "a", None),
        swap(2, 5, "b", "a"),
        swap(3, 6, "c", "a"),
    ],
    "a write that is seen, and then not any more": [
        swap(0, 10, "a", None),
        op(1, 2, "read", result="a"),
        op(3, 4, "read", result=None),
    ],
    "a refusal with a value that was there before": [
        swap(0, 1, "a", None),
        swap(2, 3, "b", "a"),
        op(4, 5, "swap", "c", "x", result=(False, "a")),
    ],
    "a refusal that took effect": [
        swap(0, 1, "a", None),
        op(2, 3, "swap", "b", "x", result=(False, "a")),
        op(4, 5, "read", result="b"),
    ],
    "a write without an answer that takes effect before it was asked for": [
        op(0, 1, "read", result="a"),
        op(2, None, "swap", "a", None, result=UNKNOWN),
    ],
    "a write without an answer that takes effect twice": [
        op(0, None, "swap", "a", None, result=UNKNOWN),
        op(1, 2, "read", result="a"),
        swap(3, 4, "b", "a"),
        op(5, 6, "read", result="a"),
    ],
    "two leaders, each with a value of its own": [
        swap(0, 1, "a", None),
        swap(2, 3, "b", "a"),
        op(4, 5, "read", result="b"),
        op(6, 7, "read", result="a"),
        op(8, 9, "read", result="b"),
    ],
}


@pytest.mark.parametrize("what", PLANTED)
def test_planted_violations_are_found(what: str) -> None:
    assert check(PLANTED[what], Register()), what


def test_an_operation_without_an_answer_may_have_taken_effect_or_not() -> None:
    lost = op(0, None, "swap", "a", None, result=UNKNOWN)
    for seen in (None, "a"):
        assert check([lost, op(5, 6, "read", result=seen)], Register()) == []
    late = [lost, op(1, 2, "read", result=None), op(3, 4, "read", result="a")]
    assert check(late, Register()) == [], "it may take effect long after its client gave up"


def test_a_refusal_without_a_reason_is_no_violation_and_a_success_without_one_is() -> None:
    refused = op(2, 3, "swap", "b", "a", result=(False, "a"))
    assert check([swap(0, 1, "a", None), refused, op(4, 5, "read", result="a")], Register()) == []
    assert check([swap(0, 1, "a", None), refused, op(4, 5, "read", result="b")], Register())


def test_keys_are_independent_and_the_violation_says_which_and_why() -> None:
    fine = [op(0, 1, "swap", "a", None, result=(True, "a"), key="fine")]
    violations = check([*PLANTED["a stale read"], *fine], Register())
    assert [violation.key for violation in violations] == ["k"]
    text = str(violations[0])
    assert "the history of 'k' is not linearizable" in text
    assert "after c at 2.000 to 3.000: swap('b', 'a') = (True, 'b')" in text
    assert "not c at 4.000 to 5.000: read() = 'a'" in text


def test_the_latest_save_of_a_job() -> None:
    saved = [op(0, 1, "save", 5, result=True), op(2, 3, "save", 4, result=True)]
    assert check([*saved, op(4, 5, "latest", result=5)], Latest()) == []
    assert check([*saved, op(4, 5, "latest", result=4)], Latest())
    assert check([*saved, op(4, 5, "latest", result=None)], Latest())
    unsure = op(1.5, None, "save", 9, result=UNKNOWN)
    assert check([*saved, unsure, op(4, 5, "latest", result=9), op(6, 7, "latest", result=9)], Latest()) == []
    assert check([*saved, unsure, op(4, 5, "latest", result=9), op(6, 7, "latest", result=5)], Latest())


def explained_by_trying(history: Sequence[Operation], model: Model) -> bool:
    """Every choice of unanswered operations, in every order."""
    answered = [each for each in history if each.answered_s is not None]
    unanswered = [each for each in history if each.answered_s is None]
    for count in range(len(unanswered) + 1):
        for effective in itertools.combinations(unanswered, count):
            for order in itertools.permutations([*answered, *effective]):
                if _agrees(order, model):
                    return True
    return False


def _agrees(order: Sequence[Operation], model: Model) -> bool:
    state = model.initial
    for number, each in enumerate(order):
        if any(
            later.answered_s is not None and later.answered_s < each.called_s for later in order[number + 1 :]
        ):
            return False
        possible, state = model.step(
            state, each.action, each.result if each.answered_s is not None else UNKNOWN
        )
        if not possible:
            return False
    return True


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    history = []
    for number in range(draw(st.integers(1, 5))):
        called_s = draw(st.integers(0, 12))
        answered_s = draw(st.none() | st.integers(called_s, 14))
        values = st.sampled_from([None, "0", "1", "2", "3", "4"])
        if draw(st.booleans()):
            action: tuple[Hashable, ...] = ("read",)
            result: Hashable = draw(values)
            answered_s = called_s + 1 if answered_s is None else answered_s
        else:
            action = ("swap", str(number), draw(values))
            made = draw(st.booleans())
            result = (made, str(number) if made else draw(values))
        history.append(op(called_s, answered_s, *action, result=result))
    return history


@settings(max_examples=400, deadline=None)
@given(histories())
def test_it_agrees_with_trying_every_order(history: list[Operation]) -> None:
    found = check_key("k", history, Register())
    assert (found is None) == explained_by_trying(history, Register())


def test_a_long_history_of_many_clients_is_checked_and_one_wrong_answer_found() -> None:
    """Of a register that is right, at random moments within each operation; as long as what an hour leaves."""
    chance = random.Random(1)
    state: str | None = None
    history = []
    moments = sorted((chance.uniform(0, 500), number) for number in range(10_000))
    for at_s, number in moments:
        called_s, answered_s = at_s - chance.uniform(0, 0.4), at_s + chance.uniform(0, 0.4)
        if chance.random() < 0.5:
            history.append(op(called_s, answered_s, "read", result=state))
            continue
        expected = state if chance.random() < 0.7 else "other"
        made = expected == state
        unanswered = chance.random() < 0.1
        state = str(number) if made else state
        result: Hashable = UNKNOWN if unanswered else (made, state)
        history.append(
            op(called_s, None if unanswered else answered_s, "swap", str(number), expected, result=result)
        )
    assert check(history, Register()) == []
    reads = [number for number, each in enumerate(history) if each.action == ("read",)]
    wrong = reads[len(reads) // 2]
    early = history[reads[3]].result
    assert history[wrong].result != early
    history[wrong] = op(history[wrong].called_s, history[wrong].answered_s, "read", result=early)
    assert check(history, Register())
