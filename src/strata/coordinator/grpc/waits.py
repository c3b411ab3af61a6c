"""Callers that wait for a barrier to end: each is notified exactly once, or has left.

A caller that stops waiting closes its wait, so nothing is kept for callers that have left, and one worker can hold only
so many. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from strata.core.messages import (
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    JobId,
    Overloaded,
    Reply,
    WorkerId,
)

WAITS_PER_WORKER = 64

Outcome = BarrierReleased | BarrierBroken
Round = tuple[JobId, str, int, int]
K = TypeVar("K")


class Wait:
    """One caller. `begin` goes along with its arrival; `close` when it is no longer there to be notified."""

    __slots__ = ("_deliver", "_order", "_over", "_round", "_waits", "_worker_id", "owner")

    def __init__(
        self, waits: Waits, worker_id: WorkerId, deliver: Callable[[Outcome, int], None], owner: object
    ) -> None:
        self.owner = owner
        self._waits = waits
        self._worker_id = worker_id
        self._deliver = deliver
        self._round: Round | None = None
        self._order = 0
        self._over = False

    def begin(self, reply: Reply) -> None:
        """The arrival was accepted: wait for the end of its round, which may have come already."""
        ticket = cast(BarrierTicket, reply)
        if self._over:
            return
        self._order = ticket.order
        if ticket.outcome is not None:
            self.end(ticket.outcome)
            return
        self._round = (ticket.job_id, ticket.barrier_id, ticket.step, ticket.round)
        self._waits.by_round.setdefault(self._round, set()).add(self)

    def end(self, outcome: Outcome) -> None:
        self.close()
        self._deliver(outcome, self._order)

    def close(self) -> None:
        self._over = True
        _discard(self._waits.by_worker, self._worker_id, self)
        if self._round is not None:
            _discard(self._waits.by_round, self._round, self)


class Waits:
    def __init__(self) -> None:
        self.by_round: dict[Round, set[Wait]] = {}
        self.by_worker: dict[WorkerId, set[Wait]] = {}

    def open(
        self,
        worker_id: WorkerId,
        deliver: Callable[[Outcome, int], None],
        *,
        owner: object = None,
        at_most: int = WAITS_PER_WORKER,
    ) -> Wait:
        """`deliver(outcome, order)` is called once the caller's round has ended, unless it closes before."""
        waits = self.by_worker.setdefault(worker_id, set())
        if len(waits) >= at_most:
            raise Overloaded(
                f"This worker has {len(waits)} calls waiting at barriers, which is the limit.",
                hint="Wait for some of them to end first.",
            )
        wait = Wait(self, worker_id, deliver, owner)
        waits.add(wait)
        return wait

    def close_all(self, worker_id: WorkerId, *, owner: object) -> None:
        for wait in [w for w in self.by_worker.get(worker_id, ()) if w.owner is owner]:
            wait.close()

    def ended(self, outcome: Outcome) -> None:
        key = (outcome.job_id, outcome.barrier_id, outcome.step, outcome.round)
        for wait in list(self.by_round.get(key, ())):
            wait.end(outcome)


def _discard(index: dict[K, set[Wait]], key: K, wait: Wait) -> None:
    found = index.get(key)
    if found is not None:
        found.discard(wait)
        if not found:
            del index[key]
