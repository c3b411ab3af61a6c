"""Named barriers that release everyone who is expected, or none.

A barrier is keyed by job, name and step, and runs in rounds. It expects a number of distinct workers, or
everyone: all who are members when it opens, and any newcomer from the moment it comes. Each round ends exactly
once: **released** when all of them have arrived, **broken** when it times out or when one it needs is lost
(failed, left, or replaced by a newer incarnation). The reason names who is missing and how long they have been
silent. An arrival that names its generation binds the barrier to it: any change of the members breaks it then,
since those who have yet to come belong to another.

A retried arrival (same `call_id`) counts once, and one that comes back after the end learns the outcome, also
when the next round is open already; a new `call_id` from someone who was in the last round opens the next. A
call without an id counts as a retry only of a release that the same incarnation was part of.

Arrivals are soft and outcomes are hard: after a restart of the coordinator every worker that waits arrives again.
Pure: time arrives as `now`. Knows membership, not sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from strata.core import checks
from strata.core.fleet.membership import Member, Membership
from strata.core.messages import (
    ArriveAtBarrier,
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    Event,
    Instant,
    InvalidArgument,
    JobId,
    Overloaded,
    WorkerId,
)

BarrierKey = tuple[JobId, str, int]
BarrierOutcome = BarrierReleased | BarrierBroken
NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierLimits:
    timeout_s: float = 1800.0
    """How long a barrier waits when its callers name no time."""
    max_open: int = 10_000
    max_open_per_worker: int = 100
    """So that one worker cannot use up the capacity of all."""
    ended_kept: int = 2_000
    arrivals_kept: int = 200_000
    """Over all outcomes that are kept: large barriers are remembered for fewer of them."""


@dataclass(slots=True, kw_only=True)
class OpenBarrier:
    key: BarrierKey
    round: int
    generation: int
    """The one it is bound to; 0: none, joins do not matter."""
    expected: int
    last_seat: int | None
    """For a barrier of everyone: the newest seat when it opened. Who sat down later is awaited once it comes."""
    opened: Instant
    deadline_mono_s: float
    arrived: dict[WorkerId, str] = field(default_factory=dict)
    """In order of arrival, with the call each came by."""

    def awaits(self, member: Member) -> bool:
        return self.last_seat is None or member.seat <= self.last_seat


class Barriers:
    def __init__(self, limits: BarrierLimits) -> None:
        self.limits = limits
        self.open: dict[BarrierKey, OpenBarrier] = {}
        self.ended: OrderedDict[tuple[BarrierKey, int], BarrierOutcome] = OrderedDict()
        """Every round that is remembered, in the order in which they ended."""
        self._last: dict[BarrierKey, BarrierOutcome] = {}
        self._calls: dict[tuple[BarrierKey, WorkerId, str], BarrierOutcome] = {}
        """The round that each call was part of."""

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_arrival(
        self, command: ArriveAtBarrier, member: Member, membership: Membership, now: Instant
    ) -> tuple[list[Event], BarrierTicket]:
        checks.name("barrier_id", command.barrier_id)
        checks.between("step", command.step, 0, checks.SAMPLES_LIMIT)
        checks.between("expected_participants", command.expected, 0, 1_000_000)
        checks.between("timeout_ms", command.timeout_s * 1000, 0, 7 * 86_400_000)
        checks.text("call_id", command.call_id, limit=checks.NAME_LIMIT)
        job, worker = member.spec.job_id, command.worker_id
        key = (job, command.barrier_id, command.step)
        known = self._outcome_for(key, command, member)
        if known is not None:
            return [], known
        barrier = self.open.get(key) or self._opened(key, command, membership, now)
        fresh = worker not in barrier.arrived
        expected = barrier.expected + (1 if fresh and not barrier.awaits(member) else 0)
        if command.expected and command.expected != expected:
            raise InvalidArgument(
                "expected_participants",
                f"is {command.expected}, but barrier '{command.barrier_id}' at step {command.step} was opened "
                f"for {expected}.",
                hint="Pass the same number from every worker, or give the barrier another name.",
            )
        order = len(barrier.arrived) if fresh else list(barrier.arrived).index(worker)
        ticket = BarrierTicket(
            job_id=job,
            barrier_id=command.barrier_id,
            step=command.step,
            round=barrier.round,
            order=order,
            outcome=None,
        )
        if not fresh and barrier.arrived[worker] == command.call_id:
            return [], ticket  # A retried call must not count twice.
        arrival = BarrierArrived(
            job_id=job,
            barrier_id=command.barrier_id,
            step=command.step,
            round=barrier.round,
            generation=command.generation or barrier.generation,
            worker_id=worker,
            call_id=command.call_id,
            expected=expected,
            last_seat=barrier.last_seat,
            deadline_mono_s=_deadline(barrier, command, now),
            opened=barrier.opened,
            reason=f"'{worker}' is number {order + 1} of {expected}",
            at_s=now.wall_s,
        )
        if order + 1 < expected or not fresh:
            return [arrival], ticket
        return [arrival, _release(barrier, arrival, membership.job_generations[job], now)], ticket

    def decide_change(
        self, job: JobId, reason: str, membership: Membership, now: Instant, *, lost: Member | None = None
    ) -> Iterator[BarrierBroken]:
        """Barriers that end because the members of a job have changed, which has been applied already.

        `lost` is the member that has failed, left or been replaced, if one has.
        """
        for barrier in [b for key, b in self.open.items() if key[0] == job]:
            if lost is not None and (barrier.generation or _needs(barrier, lost, membership)):
                worker = lost.spec.worker_id
                why = f"'{worker}' was lost ({reason})"
                yield self._break(barrier, membership, now, why, lost=worker)
            elif barrier.generation:
                why = f"generation {barrier.generation} is over ({reason})"
                yield self._break(barrier, membership, now, why)

    def decide_tick(self, membership: Membership, now: Instant) -> Iterator[BarrierBroken]:
        for barrier in [b for b in self.open.values() if now.mono_s >= b.deadline_mono_s]:
            waited_s = now.mono_s - barrier.opened.mono_s
            yield self._break(barrier, membership, now, f"it timed out after {waited_s:.1f} s")

    def _outcome_for(self, key: BarrierKey, command: ArriveAtBarrier, member: Member) -> BarrierTicket | None:
        """The end of the round this call belongs to, if that round is over."""
        outcome = self._calls.get((key, command.worker_id, command.call_id))
        if outcome is None:
            return None
        if not command.call_id:
            same_incarnation = member.generation <= outcome.generation
            if key in self.open or isinstance(outcome, BarrierBroken) or not same_incarnation:
                return None
        order = outcome.arrived.index(command.worker_id)
        return BarrierTicket(
            job_id=key[0], barrier_id=key[1], step=key[2], round=outcome.round, order=order, outcome=outcome
        )

    def _opened(
        self, key: BarrierKey, command: ArriveAtBarrier, membership: Membership, now: Instant
    ) -> OpenBarrier:
        if len(self.open) >= self.limits.max_open:
            raise Overloaded(
                f"{len(self.open):,} barriers are open already, which is the limit.",
                hint="Let some finish first, or use fewer barrier names.",
            )
        most = self.limits.max_open_per_worker
        if len(self.open) >= most and sum(command.worker_id in b.arrived for b in self.open.values()) >= most:
            raise Overloaded(
                f"Worker '{command.worker_id}' has arrived at {most:,} barriers that are still open, which is "
                f"the limit.",
                hint="Let some finish first, or use fewer barrier names.",
            )
        last = self._last.get(key)
        return OpenBarrier(
            key=key,
            round=last.round + 1 if last is not None else 0,
            generation=command.generation,
            expected=command.expected or len(membership.roster(key[0])),
            last_seat=None if command.expected else membership.incarnation,
            opened=now,
            deadline_mono_s=now.mono_s + (command.timeout_s or self.limits.timeout_s),
        )

    def _break(
        self,
        barrier: OpenBarrier,
        membership: Membership,
        now: Instant,
        why: str,
        lost: WorkerId | None = None,
    ) -> BarrierBroken:
        job, name, step = barrier.key
        arrived = {worker: call for worker, call in barrier.arrived.items() if worker != lost}
        missing = [worker for worker in missing_members(barrier, membership) if worker != lost]
        if lost is not None:
            missing.insert(0, lost)
        return BarrierBroken(
            job_id=job,
            barrier_id=name,
            step=step,
            round=barrier.round,
            generation=membership.job_generations[job],
            arrived=tuple(arrived),
            call_ids=tuple(arrived.values()),
            missing=tuple(missing),
            expected=barrier.expected,
            opened_at_s=barrier.opened.wall_s,
            reason=f"{len(arrived)} of {barrier.expected} arrived and {why}; "
            f"missing: {_describe(missing, membership, now)}",
            at_s=now.wall_s,
        )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: BarrierArrived | BarrierOutcome) -> None:
        key = (event.job_id, event.barrier_id, event.step)
        if isinstance(event, BarrierArrived):
            barrier = self.open.get(key)
            if barrier is None:
                barrier = self.open[key] = OpenBarrier(
                    key=key,
                    round=event.round,
                    generation=event.generation,
                    expected=event.expected,
                    last_seat=event.last_seat,
                    opened=event.opened,
                    deadline_mono_s=event.deadline_mono_s,
                )
            barrier.generation = event.generation
            barrier.expected = event.expected
            barrier.deadline_mono_s = event.deadline_mono_s
            barrier.arrived[event.worker_id] = event.call_id
            return
        self.open.pop(key, None)
        self.ended[key, event.round] = event
        self._last[key] = event
        for call in _calls_of(key, event):
            self._calls[call] = event
        while len(self.ended) > self.limits.ended_kept or (
            len(self._calls) > self.limits.arrivals_kept and len(self.ended) > 1
        ):
            self._forget_oldest()

    def forget(self, count: int) -> None:
        """The oldest so many that have ended."""
        for _ in range(min(count, len(self.ended))):
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (key, _), oldest = self.ended.popitem(last=False)
        if self._last[key] is oldest:
            del self._last[key]
        for call in _calls_of(key, oldest):
            if self._calls.get(call) is oldest:
                del self._calls[call]

    def compact(self) -> Iterator[Event]:
        return iter(list(self.ended.values()))


def _calls_of(key: BarrierKey, outcome: BarrierOutcome) -> Iterator[tuple[BarrierKey, WorkerId, str]]:
    return ((key, worker, call) for worker, call in zip(outcome.arrived, outcome.call_ids, strict=True))


def _deadline(barrier: OpenBarrier, command: ArriveAtBarrier, now: Instant) -> float:
    """The most impatient caller decides."""
    if not command.timeout_s:
        return barrier.deadline_mono_s
    return min(barrier.deadline_mono_s, now.mono_s + command.timeout_s)


def _needs(barrier: OpenBarrier, lost: Member, membership: Membership) -> bool:
    worker, present = lost.spec.worker_id, membership.roster(lost.spec.job_id)
    if worker in barrier.arrived:
        return True
    if barrier.last_seat is None:
        return len(present) < barrier.expected
    return worker not in present and barrier.awaits(lost)


def _release(barrier: OpenBarrier, last: BarrierArrived, generation: int, now: Instant) -> BarrierReleased:
    waited_s = now.mono_s - barrier.opened.mono_s
    return BarrierReleased(
        job_id=last.job_id,
        barrier_id=last.barrier_id,
        step=last.step,
        round=last.round,
        generation=generation,
        arrived=(*barrier.arrived, last.worker_id),
        call_ids=(*barrier.arrived.values(), last.call_id),
        opened_at_s=barrier.opened.wall_s,
        waited_s=waited_s,
        reason=f"all {last.expected} arrived within {waited_s * 1000:.1f} ms",
        at_s=now.wall_s,
    )


def missing_members(barrier: OpenBarrier, membership: Membership) -> list[WorkerId]:
    """Who has not come: members of the job that are awaited, and those lost since the barrier opened."""
    job, opened_mono_s = barrier.key[0], barrier.opened.mono_s
    return [
        worker_id
        for worker_id, member in membership.members.items()
        if member.spec.job_id == job
        and worker_id not in barrier.arrived
        and barrier.awaits(member)
        and (member.present or membership.failed_mono_s[worker_id] > opened_mono_s)
    ]


def _describe(missing: list[WorkerId], membership: Membership, now: Instant) -> str:
    if not missing:
        return "workers that never registered"
    words = []
    for worker_id in missing[:NAMED_AT_MOST]:
        member = membership.members.get(worker_id)
        if member is None:
            words.append(f"{worker_id} (left)")
        elif member.present:
            silent_s = now.mono_s - membership.pulses[worker_id].last_heartbeat_mono_s
            words.append(f"{worker_id} (last heartbeat {silent_s:.1f} s ago)")
        else:
            words.append(f"{worker_id} (failed: {member.reason})")
    more = len(missing) - NAMED_AT_MOST
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
