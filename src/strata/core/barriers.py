"""Named barriers that release everyone who is expected, or nobody.

A barrier is keyed by job, name and step, and runs in rounds. Each round ends exactly once: **released** when
enough distinct present members have arrived, **broken** when it times out or when a loss leaves too few members
to fill it. The reason names who is missing and how long they have been silent. A retried arrival (same
`call_id`) counts once, and one that comes back after the end learns the outcome; a new `call_id` from someone
who was in the last round opens the next.

Arrivals are soft and outcomes are hard: after a restart of the coordinator whoever waits arrives again.
Pure: time arrives as `now`. Knows membership, not sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from strata.core import checks
from strata.core.membership import Member, Membership
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
    WorkerFailed,
    WorkerId,
    WorkerLeft,
)

BarrierKey = tuple[JobId, str, int]
BarrierOutcome = BarrierReleased | BarrierBroken
NAMED_AT_MOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierLimits:
    timeout_s: float = 1800.0
    """How long a barrier waits when its callers name no time."""
    max_open: int = 10_000
    ended_kept: int = 2_000
    arrivals_kept: int = 200_000
    """Over all ended barriers together: what bounds the memory when each has thousands of members."""


@dataclass(slots=True, kw_only=True)
class OpenBarrier:
    key: BarrierKey
    round: int
    generation: int
    expected: int
    opened: Instant
    deadline_mono_s: float
    arrived: dict[WorkerId, str] = field(default_factory=dict)
    """In order of arrival, with the call each came by."""


class Barriers:
    def __init__(self, limits: BarrierLimits) -> None:
        self.limits = limits
        self.open: dict[BarrierKey, OpenBarrier] = {}
        self.ended: OrderedDict[BarrierKey, BarrierOutcome] = OrderedDict()
        self._arrivals_kept = 0

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_arrival(
        self, command: ArriveAtBarrier, member: Member, membership: Membership, now: Instant
    ) -> tuple[list[Event], BarrierTicket]:
        checks.name("barrier_id", command.barrier_id)
        checks.between("step", command.step, 0, checks.SAMPLES_LIMIT)
        checks.between("expected_participants", command.expected, 0, 1_000_000)
        checks.between("timeout_ms", command.timeout_s * 1000, 0, 7 * 86_400_000)
        job = member.spec.job_id
        key = (job, command.barrier_id, command.step)
        barrier = self.open.get(key)
        if barrier is None:
            known = self._outcome_for(key, command)
            if known is not None:
                return [], known
            barrier = self._opened(key, command, membership, now)
        if command.expected and command.expected != barrier.expected:
            raise InvalidArgument(
                "expected_participants",
                f"is {command.expected}, but barrier '{command.barrier_id}' at step {command.step} was opened "
                f"for {barrier.expected}.",
                hint="Pass the same number from every worker, or give the barrier another name.",
            )
        worker = member.spec.worker_id  # The one string for all barriers, not this call's copy.
        if worker in barrier.arrived and barrier.arrived[worker] == command.call_id:
            order = list(barrier.arrived).index(worker)  # A retried call must not count twice.
            return [], self._ticket(barrier, order)
        order = len(barrier.arrived) if worker not in barrier.arrived else list(barrier.arrived).index(worker)
        arrival = BarrierArrived(
            job_id=job,
            barrier_id=command.barrier_id,
            step=command.step,
            round=barrier.round,
            generation=barrier.generation,
            worker_id=worker,
            call_id=command.call_id,
            expected=barrier.expected,
            deadline_mono_s=self._deadline(barrier, command, now),
            opened=barrier.opened,
            reason=f"'{worker}' is number {order + 1} of {barrier.expected}",
            at_s=now.wall_s,
        )
        events: list[Event] = [arrival]
        if order + 1 >= barrier.expected and worker not in barrier.arrived:
            events.append(self._release(barrier, arrival, now))
        return events, self._ticket(barrier, order)

    def decide_loss(
        self, loss: WorkerFailed | WorkerLeft, membership: Membership, now: Instant
    ) -> Iterator[BarrierBroken]:
        """Barriers that too few members are left to fill. The loss has been applied already."""
        present = membership.roster(loss.job_id)
        for barrier in [b for key, b in self.open.items() if key[0] == loss.job_id]:
            if len(present) < barrier.expected:
                why = f"'{loss.worker_id}' was lost ({loss.reason})"
                yield self._break(barrier, membership, now, why, lost=loss.worker_id)

    def decide_tick(self, membership: Membership, now: Instant) -> Iterator[BarrierBroken]:
        for barrier in [b for b in self.open.values() if now.mono_s >= b.deadline_mono_s]:
            waited_s = now.mono_s - barrier.opened.mono_s
            yield self._break(barrier, membership, now, f"it timed out after {waited_s:.1f} s")

    def _outcome_for(self, key: BarrierKey, command: ArriveAtBarrier) -> BarrierTicket | None:
        """The end of the round this call belongs to, if that round is over."""
        outcome = self.ended.get(key)
        if outcome is None or command.worker_id not in outcome.arrived:
            return None
        order = outcome.arrived.index(command.worker_id)
        if command.call_id and outcome.call_ids[order] != command.call_id:
            return None
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
        last = self.ended.get(key)
        return OpenBarrier(
            key=key,
            round=last.round + 1 if last else 0,
            generation=membership.job_generations[key[0]],
            expected=command.expected or len(membership.roster(key[0])),
            opened=now,
            deadline_mono_s=now.mono_s + (command.timeout_s or self.limits.timeout_s),
        )

    def _deadline(self, barrier: OpenBarrier, command: ArriveAtBarrier, now: Instant) -> float:
        """The most impatient caller decides."""
        if not command.timeout_s:
            return barrier.deadline_mono_s
        return min(barrier.deadline_mono_s, now.mono_s + command.timeout_s)

    def _ticket(self, barrier: OpenBarrier, order: int) -> BarrierTicket:
        job, name, step = barrier.key
        return BarrierTicket(
            job_id=job, barrier_id=name, step=step, round=barrier.round, order=order, outcome=None
        )

    def _release(self, barrier: OpenBarrier, last: BarrierArrived, now: Instant) -> BarrierReleased:
        job, name, step = barrier.key
        waited_s = now.mono_s - barrier.opened.mono_s
        return BarrierReleased(
            job_id=job,
            barrier_id=name,
            step=step,
            round=barrier.round,
            generation=barrier.generation,
            arrived=(*barrier.arrived, last.worker_id),
            call_ids=(*barrier.arrived.values(), last.call_id),
            opened_at_s=barrier.opened.wall_s,
            waited_s=waited_s,
            reason=f"all {barrier.expected} arrived within {waited_s * 1000:.1f} ms",
            at_s=now.wall_s,
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
        missing = missing_members(barrier, membership)
        if lost is not None:
            missing = (lost, *(worker for worker in missing if worker != lost))
        return BarrierBroken(
            job_id=job,
            barrier_id=name,
            step=step,
            round=barrier.round,
            generation=barrier.generation,
            arrived=tuple(barrier.arrived),
            call_ids=tuple(barrier.arrived.values()),
            missing=missing,
            expected=barrier.expected,
            opened_at_s=barrier.opened.wall_s,
            reason=f"{len(barrier.arrived)} of {barrier.expected} arrived and {why}; "
            f"missing: {_describe(missing, membership, now)}",
            at_s=now.wall_s,
        )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: BarrierArrived | BarrierOutcome) -> None:
        key = (event.job_id, event.barrier_id, event.step)
        if isinstance(event, BarrierArrived):
            barrier = self.open.get(key)
            if barrier is None:
                barrier = OpenBarrier(
                    key=key,
                    round=event.round,
                    generation=event.generation,
                    expected=event.expected,
                    opened=event.opened,
                    deadline_mono_s=event.deadline_mono_s,
                )
                self.open[key] = barrier
            barrier.deadline_mono_s = event.deadline_mono_s
            barrier.arrived[event.worker_id] = event.call_id
            return
        self.open.pop(key, None)
        if key in self.ended:
            self._forget(key)
        self.ended[key] = event
        self._arrivals_kept += len(event.arrived)
        while len(self.ended) > 1 and (
            len(self.ended) > self.limits.ended_kept or self._arrivals_kept > self.limits.arrivals_kept
        ):
            self._forget(next(iter(self.ended)))

    def _forget(self, key: BarrierKey) -> None:
        self._arrivals_kept -= len(self.ended.pop(key).arrived)

    def withdraw(self, worker_id: WorkerId, job: JobId) -> None:
        """A lost worker no longer counts as arrived anywhere."""
        for key, barrier in list(self.open.items()):
            if key[0] == job and barrier.arrived.pop(worker_id, None) is not None and not barrier.arrived:
                del self.open[key]

    def compact(self) -> list[Event]:
        return list(self.ended.values())


def missing_members(barrier: OpenBarrier, membership: Membership) -> tuple[WorkerId, ...]:
    """Who has not come: present members of the job, and those lost since the barrier opened."""
    job = barrier.key[0]
    return tuple(
        worker_id
        for worker_id, member in membership.members.items()
        if member.spec.job_id == job
        and worker_id not in barrier.arrived
        and (member.present or member.changed_at_s >= barrier.opened.wall_s)
    )


def _describe(missing: tuple[WorkerId, ...], membership: Membership, now: Instant) -> str:
    if not missing:
        return "workers that never registered"
    words = []
    for worker_id in missing[:NAMED_AT_MOST]:
        member = membership.members.get(worker_id)
        if member is None:
            words.append(f"{worker_id} (left)")
        elif member.present:
            silent_s = now.mono_s - membership.pulses[worker_id].heard_mono_s
            words.append(f"{worker_id} (last heard {silent_s:.1f} s ago)")
        else:
            words.append(f"{worker_id} (failed: {member.reason})")
    more = len(missing) - NAMED_AT_MOST
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
