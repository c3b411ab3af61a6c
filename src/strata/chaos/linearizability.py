"""Whether what clients saw of a key could have come from one copy of it that does one operation at a time.

A history holds each operation with when it was called, when it was answered and what the answer was. It is linearizable if all operations
can be put in one order that agrees with their times, in which every answer is what a `Model` of the key says. An operation whose outcome
is unknown may have taken effect at any time after it was called, or never.

The search is Wing and Gong's, with Lowe's memory of what was tried: operations that are concurrent are tried in every order,
and no set of operations that leads to the same state twice. Keys are independent of each other, so each is searched alone.
Pure: nothing here reads a clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

UNKNOWN = "unknown"
"""The result of an operation that was not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    client: str
    key: str
    action: tuple[Hashable, ...]
    """What was asked: a name, and its arguments."""
    result: Hashable
    called_s: float
    answered_s: float | None
    """None where the outcome is unknown."""

    def __str__(self) -> str:
        name, *arguments = self.action
        asked = f"{name}({', '.join(map(repr, arguments))})"
        if self.answered_s is None:
            return f"{self.client} at {self.called_s:.3f}: {asked} was not answered"
        return f"{self.client} at {self.called_s:.3f} to {self.answered_s:.3f}: {asked} = {self.result!r}"


class Model(Protocol):
    """One copy of a key. States are hashable."""

    @property
    def initial(self) -> Hashable: ...

    def step(self, state: Hashable, action: tuple[Hashable, ...], result: Hashable) -> tuple[bool, Hashable]:
        """Whether the action can have this result in this state, and the state after it. For an `UNKNOWN` result: whether it
        would change anything, and the state if it did."""
        ...

    def written(self, action: tuple[Hashable, ...]) -> Hashable:
        """What an action leaves behind if it takes effect, as answers would show it. One that was not answered and whose traces
        no answer shows need not have happened: every later answer would show them, or none."""
        ...


@dataclass(frozen=True, slots=True)
class Register:
    """A value that is read, and replaced by a client that knows the one before: `read` has the value, or None; `swap(new, expected)`
    has whether it was made and the value afterwards. Each value is written once, so that it stands for its version. A swap may be
    refused though no other client was faster: a coordinator that starts again gives values new versions."""

    initial: Hashable = None

    def step(self, state: Hashable, action: tuple[Hashable, ...], result: Hashable) -> tuple[bool, Hashable]:
        if action[0] == "read":
            return result == state, state
        _, new, expected = action
        if result == (False, state):
            return True, state
        is_possible = state == expected and result in (UNKNOWN, (True, new))
        return is_possible, new

    def written(self, action: tuple[Hashable, ...]) -> Hashable:
        return action[1]


@dataclass(frozen=True, slots=True)
class Latest:
    """The furthest step of a job that was saved: `save(step)` is acknowledged, `latest` has the step, or None."""

    initial: Hashable = None

    def step(self, state: Hashable, action: tuple[Hashable, ...], result: Hashable) -> tuple[bool, Hashable]:
        if action[0] == "latest":
            return result == state, state
        saved = action[1]
        assert isinstance(saved, int)
        after = saved if not isinstance(state, int) or saved > state else state
        return (after != state or result != UNKNOWN), after

    def written(self, action: tuple[Hashable, ...]) -> Hashable:
        return action[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    key: str
    explained: tuple[Operation, ...]
    """The longest beginning that can be put in order, in that order."""
    unexplained: tuple[Operation, ...]
    """Those of which none can come next."""

    def __str__(self) -> str:
        last = "".join(f"\n  after {operation}" for operation in self.explained[-3:])
        # What was answered says most; of what was not there may be much.
        foremost = sorted(self.unexplained, key=lambda each: each.answered_s is None)
        stuck = "".join(f"\n  not {operation}" for operation in foremost[:5])
        return f"the history of '{self.key}' is not linearizable:{last}{stuck}"


def check(operations: Iterable[Operation], model: Model) -> list[Violation]:
    """The keys whose history is not linearizable; empty if all are."""
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    found = (check_key(key, history, model) for key, history in sorted(by_key.items()))
    return [violation for violation in found if violation is not None]


def check_key(key: str, operations: Sequence[Operation], model: Model) -> Violation | None:
    history = _History(_that_matter(operations, model))
    state = model.initial
    done = _Done()
    order: list[tuple[_Entry, Hashable, _Done, bool]] = []
    """Operations in the order that is being tried, each with what there was before it, and whether another could come instead."""
    tried: set[tuple[_Done, Hashable]] = set()
    best: list[Operation] = []
    stuck: list[Operation] = []
    entry = history.first
    while history.answers_left:
        assert entry is not None
        if entry.is_call:
            operation = entry.operation
            result = operation.result if operation.answered_s is not None else UNKNOWN
            possible, after = model.step(state, operation.action, result)
            following = done.with_one(entry) if possible else done
            if possible and (following, after) not in tried:
                tried.add((following, after))
                # What changes nothing may as well come now: any order with it later is one with it here.
                order.append((entry, state, done, after != state or operation.answered_s is None))
                state, done = after, following
                history.take_out(entry)
                entry = history.first
                continue
            entry = entry.following
            continue
        # An answer whose call is not in the order: none of the calls before it could come next.
        if len(order) > len(best) or not stuck:
            best = [each.operation for each, *_ in order]
            stuck = history.calls_before(entry)
        is_choice = False
        while not is_choice:
            if not order:
                return Violation(key=key, explained=tuple(best), unexplained=tuple(stuck))
            entry, state, done, is_choice = order.pop()
            history.put_back(entry)
        entry = entry.following
    return None


def _that_matter(operations: Sequence[Operation], model: Model) -> list[Operation]:
    """Without those that were not answered and of which no client has seen anything."""
    seen: set[Hashable] = set()
    for each in operations:
        seen.update(each.action[2:])  # What it expected to be there.
        if each.answered_s is not None:
            seen.update(each.result if isinstance(each.result, tuple) else (each.result,))
    return [each for each in operations if each.answered_s is not None or model.written(each.action) in seen]


@dataclass(frozen=True, slots=True)
class _Done:
    """A set of operations, small however long the history: of those with an answer, all before `first` and those in `window` after it."""

    first: int = 0
    window: int = 0
    unanswered: int = 0

    def with_one(self, entry: _Entry) -> _Done:
        if entry.answer is None:
            return replace(self, unanswered=self.unanswered | 1 << entry.number)
        first, window = self.first, self.window | 1 << (entry.number - self.first)
        while window & 1:
            first, window = first + 1, window >> 1
        return replace(self, first=first, window=window)


@dataclass(slots=True)
class _Entry:
    """A call or an answer, in a list by time."""

    operation: Operation
    is_call: bool
    number: int
    """Among those with an answer, or those without, by the time of the call."""
    answer: _Entry | None = None
    before: _Entry | None = None
    following: _Entry | None = None


@dataclass(slots=True)
class _History:
    operations: Sequence[Operation]
    answers_left: int = 0
    _head: _Entry = field(init=False)

    def __post_init__(self) -> None:
        timeline: list[tuple[float, int, int, _Entry]] = []
        unanswered = 0
        for place, operation in enumerate(sorted(self.operations, key=lambda each: each.called_s)):
            if operation.answered_s is None:
                call = _Entry(operation, True, unanswered)
                unanswered += 1
            else:
                call = _Entry(operation, True, self.answers_left)
                call.answer = _Entry(operation, False, self.answers_left)
                timeline.append((operation.answered_s, 1, place, call.answer))
                self.answers_left += 1
            # Of two events at one moment the call comes first: that only makes more of them concurrent.
            timeline.append((operation.called_s, 0, place, call))
        placeholder = Operation(client="", key="", action=("",), result=None, called_s=0.0, answered_s=None)
        self._head = last = _Entry(placeholder, True, 0)
        for *_, entry in sorted(timeline, key=lambda each: each[:3]):
            last.following, entry.before = entry, last
            last = entry

    @property
    def first(self) -> _Entry | None:
        return self._head.following

    def take_out(self, call: _Entry) -> None:
        _unlink(call)
        if call.answer is not None:
            _unlink(call.answer)
            self.answers_left -= 1

    def put_back(self, call: _Entry) -> None:
        if call.answer is not None:
            _link(call.answer)
            self.answers_left += 1
        _link(call)

    def calls_before(self, answer: _Entry) -> list[Operation]:
        found = []
        entry = self.first
        while entry is not None and entry is not answer:
            found.append(entry.operation)
            entry = entry.following
        return found


def _unlink(entry: _Entry) -> None:
    assert entry.before is not None
    entry.before.following = entry.following
    if entry.following is not None:
        entry.following.before = entry.before


def _link(entry: _Entry) -> None:
    assert entry.before is not None
    entry.before.following = entry
    if entry.following is not None:
        entry.following.before = entry
