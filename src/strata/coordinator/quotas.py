"""How much of the journal one client may write, and how many calls a connection may make: bursts are fine, a flood is refused, or waits.

A client has a budget of events and one of bytes, which fill up again at a steady rate. A command is looked at while
both are above zero, and what it made durable is taken off afterwards: an idle client's next command is never too large, and
one that was refused costs nothing. The disk is bounded by compaction, whatever is written; this bounds the work.

A rendezvous of 1,000 agents rewrites a state of some 110 KB with every one that joins, 60 MB in a minute; 20,000 workers
register at once. The first fits four times, the second three times.
"""

from __future__ import annotations

from strata.core.messages import Overloaded, shorten
from strata.core.pauses import Pace

EVENTS_PER_S, EVENTS_AT_ONCE = 2_000.0, 60_000.0
BYTES_PER_S, BYTES_AT_ONCE = 8e6, 256e6
CLIENTS_REMEMBERED = 10_000


class Quotas:
    def __init__(self) -> None:
        self._budgets: dict[str, tuple[Pace, Pace]] = {}
        """Events and bytes of the clients that have written something lately, in the order of their last write."""

    def check(self, client: str, now_s: float) -> None:
        """Refuse a client that has used its budget up."""
        budget = self._budgets.get(client)
        if budget is None:
            return
        by_events, by_bytes = budget
        wait_s = max(by_events.take(0.0, now_s), by_bytes.take(0.0, now_s))
        if not wait_s:
            return
        raise Overloaded(
            f"'{shorten(client)}' writes more than its share of the journal: {BYTES_PER_S / 1e6:g} MB and "
            f"{EVENTS_PER_S:,.0f} events a second, {BYTES_AT_ONCE / 1e6:g} MB and {EVENTS_AT_ONCE:,.0f} events at once.",
            hint=f"Wait {max(1, round(wait_s + 0.5))} s, and write less often. Soft values do not count.",
        )

    def charge(self, client: str, *, events: int, size_bytes: int, now_s: float) -> None:
        budget = self._budgets.pop(client, None)
        if budget is None:
            budget = (Pace(EVENTS_AT_ONCE / EVENTS_PER_S), Pace(BYTES_AT_ONCE / BYTES_PER_S))
        by_events, by_bytes = self._budgets[client] = budget
        by_events.take(events / EVENTS_PER_S, now_s)
        by_bytes.take(size_bytes / BYTES_PER_S, now_s)
        for other in list(self._budgets)[: max(1, len(self._budgets) - CLIENTS_REMEMBERED)]:
            # Looked at one or two at a time: those that wrote long ago have a full budget, like any stranger.
            by_events, by_bytes = self._budgets[other]
            is_unused = by_events.is_unused(now_s) and by_bytes.is_unused(now_s)
            if is_unused or len(self._budgets) > CLIENTS_REMEMBERED:
                del self._budgets[other]


CALLS_PER_S, CALLS_AT_ONCE = 2_000.0, 1_000.0
"""Of one connection: as many as a session may send messages, and more than any client makes that waits for the answers."""


class CallQuotas:
    """Unary calls of a connection beyond its share wait their turn: a client that floods is slowed down, and no other by it."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        """By connection, in the order of their last calls."""

    def delay_s(self, connection: str, now_s: float) -> float:
        """How long a call that came now has to wait; mostly not at all."""
        burst_s = (CALLS_AT_ONCE + 1) / CALLS_PER_S  # And this one, which does not wait for itself.
        pace = self._paces.pop(connection, None) or Pace(burst_s)
        self._paces[connection] = pace
        delay_s = pace.take(1 / CALLS_PER_S, now_s)
        oldest = next(iter(self._paces))
        if self._paces[oldest].is_unused(now_s) or len(self._paces) > CLIENTS_REMEMBERED:
            del self._paces[oldest]
        return delay_s
