"""How much of the journal one client may write, and how many calls a connection may make: bursts are fine, a flood is refused, or waits.

A client has a budget of events and one of bytes, which fill up again at a steady rate. A command is looked at while
both are above zero, and what it made durable is taken off afterwards: an idle client's next command is never too large, and
one that was refused costs nothing. The disk is bounded by compaction, whatever is written; this bounds the work.

A rendezvous of 1,000 agents rewrites a state of some 110 KB with every one that joins, 60 MB in a minute; 20,000 workers
register at once. The first fits four times, the second three times.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.messages import Overloaded, shorten

EVENTS_PER_S, EVENTS_AT_ONCE = 2_000.0, 60_000.0
BYTES_PER_S, BYTES_AT_ONCE = 8e6, 256e6
CLIENTS_REMEMBERED = 10_000


@dataclass(slots=True)
class Budget:
    events: float
    bytes: float
    at_s: float

    def fill(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self.at_s)
        self.events = min(EVENTS_AT_ONCE, self.events + elapsed_s * EVENTS_PER_S)
        self.bytes = min(BYTES_AT_ONCE, self.bytes + elapsed_s * BYTES_PER_S)
        self.at_s = now_s

    @property
    def is_untouched(self) -> bool:
        return self.events >= EVENTS_AT_ONCE and self.bytes >= BYTES_AT_ONCE


class Quotas:
    def __init__(self) -> None:
        self._budgets: dict[str, Budget] = {}
        """Of whoever has written something lately, in the order of their last write."""

    def check(self, client: str, now_s: float) -> None:
        """Refuse whoever has used its budget up."""
        budget = self._budgets.get(client)
        if budget is None:
            return
        budget.fill(now_s)
        if budget.events > 0 and budget.bytes > 0:
            return
        wait_s = max(-budget.events / EVENTS_PER_S, -budget.bytes / BYTES_PER_S)
        raise Overloaded(
            f"'{shorten(client)}' writes more than its share of the journal: {BYTES_PER_S / 1e6:g} MB and "
            f"{EVENTS_PER_S:,.0f} events a second, {BYTES_AT_ONCE / 1e6:g} MB and {EVENTS_AT_ONCE:,.0f} events at once.",
            hint=f"Wait {max(1, round(wait_s + 0.5))} s, and write less often. Soft values do not count.",
        )

    def charge(self, client: str, *, events: int, size_bytes: int, now_s: float) -> None:
        budget = self._budgets.pop(client, None) or Budget(EVENTS_AT_ONCE, BYTES_AT_ONCE, now_s)
        budget.fill(now_s)
        budget.events -= events
        budget.bytes -= size_bytes
        self._budgets[client] = budget
        for other in list(self._budgets)[: max(1, len(self._budgets) - CLIENTS_REMEMBERED)]:
            # Looked at one or two at a time: those that wrote long ago have a full budget, like any stranger.
            self._budgets[other].fill(now_s)
            if self._budgets[other].is_untouched or len(self._budgets) > CLIENTS_REMEMBERED:
                del self._budgets[other]


CALLS_PER_S, CALLS_AT_ONCE = 2_000.0, 1_000.0
"""Of one connection: as many as a session may send messages, and more than anybody makes who waits for the answers."""


class Pace:
    """Unary calls of a connection beyond its share wait their turn: a client that floods is slowed down, and nobody else by it."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}
        """By connection, in the order of their last calls: when its next call is due, if all came at the steady rate."""

    def delay_s(self, connection: str, now_s: float) -> float:
        """How long a call that came now has to wait; mostly not at all."""
        due_s = max(self._next_s.pop(connection, now_s), now_s)
        self._next_s[connection] = due_s + 1 / CALLS_PER_S
        oldest = next(iter(self._next_s))
        if self._next_s[oldest] < now_s or len(self._next_s) > CLIENTS_REMEMBERED:
            del self._next_s[oldest]
        return max(0.0, due_s - now_s - CALLS_AT_ONCE / CALLS_PER_S)
