"""Machines that are about to go: active → draining → drained, each with a deadline and a reason.

A machine is drained by a person, or because its cloud has announced that it will be taken away. Its agents are asked to save and leave
before the deadline; each says what became of its run (a **handover**). The machine is drained when all that were there have said so, or
when the deadline has passed, whichever comes first: no run may count on it after that. It takes part in nothing until the drain is
cancelled. What a run has really lost is known when the others have continued: their recovery completes the handover.

Journaled: a restart of the coordinator changes nothing. Pure: time arrives as `now`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from strata.core import checks
from strata.core.messages import (
    CancelDrain,
    DrainHost,
    Event,
    HandoverRecorded,
    HostDrained,
    HostDrainStarted,
    HostUndrained,
    Instant,
    JobId,
    Overloaded,
    RecoveryRecorded,
    Refused,
    ReportHandover,
    Unknown,
)
from strata.core.text import counted

KEPT = 10_000
HANDOVERS_KEPT = 100
"""Of one machine."""
REASON_LIMIT = 1_000
MAX_WITHIN_S = 7 * 86_400.0
RECOVERY_S = 900.0
"""So long after a machine was shut down, what a run of it recovers from is taken to be that."""

State = Literal["draining", "drained"]


class Draining(Refused):
    """A machine that is drained wants to take part."""

    code = "draining"

    def __init__(self, known: HostDrainStarted, state: State) -> None:
        super().__init__(
            f"The machine '{known.host}' is {state}: {known.reason}.",
            hint=f"To use it again: strata drain {known.host} --cancel",
        )
        self.host = known.host


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverView:
    """The outcome for one run of a draining machine."""

    run: str
    saved_step: int | None
    """The newest step that is safe; null where that is not known."""
    lost_steps: int | None
    """Null: not known, or not yet."""
    where: str
    """What holds the state: durable, memory, or nothing."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainView:
    """One machine that is draining or drained. Times are Unix seconds."""

    host: str
    state: State
    reason: str
    by: str
    since: float
    deadline: float
    ended: float | None
    agents: int
    """Those that took part when it was asked to go."""
    outcome: str
    handovers: tuple[HandoverView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    asked: HostDrainStarted
    ended: HostDrained | None = None
    left: frozenset[str] = frozenset()
    """Agents that have said what became of their run."""
    handovers: tuple[HandoverRecorded, ...] = field(default=())

    @property
    def state(self) -> State:
        return "draining" if self.ended is None else "drained"

    def of(self, job: JobId) -> HandoverRecorded | None:
        return next((one for one in self.handovers if one.job_id == job), None)


class Drains:
    def __init__(self) -> None:
        self.hosts: dict[str, Drain] = {}
        """In the order in which they were asked."""
        self._due_s: dict[str, float] = {}
        """By the monotonic clock, when the deadline of each has come."""

    def shown(self) -> list[DrainView]:
        return [_view(drain) for drain in self.hosts.values()]

    def admit(self, host: str) -> None:
        """Raises `Draining` for a machine that is draining or drained."""
        if (known := self.hosts.get(host)) is not None:
            raise Draining(known.asked, known.state)

    def left_s(self, host: str, now: Instant) -> float | None:
        """How long the agents of a machine have to leave; None for one that is not asked to."""
        known = self.hosts.get(host)
        return None if known is None else max(0.0, self._due_s[host] - now.mono_s)

    def resume_clock(self, now: Instant) -> None:
        """After a restart the monotonic clock is another one."""
        for host, drain in self.hosts.items():
            self._due_s[host] = now.mono_s + drain.asked.deadline_s - now.wall_s

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_drain(self, command: DrainHost, jobs: Iterable[JobId], now: Instant) -> list[Event]:
        """Of two notices the earlier deadline counts; a machine that is drained stays as it is."""
        checks.name("host", command.host)
        checks.text("reason", command.reason, limit=REASON_LIMIT)
        checks.text("by", command.by, limit=checks.NAME_LIMIT)
        checks.between("within_s", command.within_s, 0.0, MAX_WITHIN_S)
        checks.between("agents", command.agents, 0, checks.SAMPLES_LIMIT)
        known = self.hosts.get(command.host)
        deadline_s = now.wall_s + command.within_s
        if known is not None and (
            known.ended is not None or self._due_s[command.host] <= now.mono_s + command.within_s
        ):
            return []
        if known is None and len(self.hosts) >= KEPT:
            raise Overloaded(f"{KEPT:,} machines are drained already.", hint="strata drain NODE --cancel")
        asked = HostDrainStarted(
            host=command.host,
            by=command.by,
            deadline_s=deadline_s,
            agents=max(command.agents, known.asked.agents if known is not None else 0),
            jobs=tuple(sorted({*jobs, *(known.asked.jobs if known is not None else ())})),
            reason=command.reason.rstrip(".") or "no reason was given",
            at_s=now.wall_s,
        )
        if asked.agents:
            return [asked]
        return [
            asked,
            HostDrained(host=command.host, reason="none of its agents is in a run", at_s=now.wall_s),
        ]

    def decide_cancel(self, command: CancelDrain, now: Instant) -> HostUndrained:
        checks.name("host", command.host)
        if command.host not in self.hosts:
            known = ", ".join(list(self.hosts)[:10]) or "none"
            raise Unknown("drained machine", command.host, hint=f"Drained machines: {known}.")
        return HostUndrained(host=command.host, reason=f"cancelled by {command.by}", at_s=now.wall_s)

    def decide_handover(self, command: ReportHandover, job: JobId, now: Instant) -> list[Event]:
        """An agent leaves, and says what became of its run. Also one whose machine was not asked to go."""
        checks.name("host", command.host)
        checks.text("reason", command.reason, limit=REASON_LIMIT)
        checks.name("node", command.node)
        checks.text("where", command.where, limit=64)
        for name, value in (("saved_step", command.saved_step), ("lost_steps", command.lost_steps)):
            if value is not None:
                checks.between(name, value, 0, checks.SAMPLES_LIMIT)
        recorded = HandoverRecorded(
            host=command.host,
            job_id=job,
            node=command.node,
            saved_step=command.saved_step,
            lost_steps=command.lost_steps,
            where=command.where,
            reason=command.reason or "its agent left without a reason",
            at_s=now.wall_s,
        )
        known = self.hosts.get(command.host)
        if known is not None and (before := known.of(job)) is not None and before.lost_steps is not None:
            # The others were faster: what they have said of it is what it was.
            recorded = replace(before, node=command.node, at_s=now.wall_s)
        events: list[Event] = [recorded]
        if (
            known is not None
            and known.ended is None
            and len(known.left | {command.node}) >= known.asked.agents
        ):
            who = counted(known.asked.agents, "agent")
            events.append(
                HostDrained(
                    host=command.host,
                    reason=f"{who} left before the deadline",
                    at_s=now.wall_s,
                )
            )
        return events

    def decide_recovery(
        self, recovery: RecoveryRecorded, hosts: Collection[str], now: Instant
    ) -> list[Event]:
        """The others have continued, on `hosts`: now it is known what a run has lost by it. A machine that is among them still takes
        part: that recovery was from something before, and its report is late."""
        return [
            HandoverRecorded(
                host=host,
                job_id=recovery.job_id,
                node="",
                saved_step=recovery.resumed_step,
                lost_steps=recovery.lost_steps,
                where=recovery.tier,
                reason=f"the run continued at step {recovery.resumed_step:,}"
                + (f" from {recovery.tier}" if recovery.tier else "")
                + f" with {counted(recovery.world_after, 'worker')}; {counted(recovery.lost_steps, 'step')} lost",
                at_s=now.wall_s,
            )
            for host, drain in self.hosts.items()
            if self._concerns(drain, recovery, now.mono_s - self._due_s[host]) and host not in hosts
        ]

    @staticmethod
    def _concerns(drain: Drain, recovery: RecoveryRecorded, late_s: float) -> bool:
        known = drain.of(recovery.job_id)
        if known is not None and known.lost_steps is not None:
            return False
        is_of_it = known is not None or recovery.job_id in drain.asked.jobs
        return is_of_it and late_s < RECOVERY_S

    def decide_tick(self, now: Instant) -> list[Event]:
        return [
            HostDrained(
                host=host,
                reason=f"the deadline has passed; {len(drain.left)} of {counted(drain.asked.agents, 'agent')} had left",
                at_s=now.wall_s,
            )
            for host, drain in self.hosts.items()
            if drain.ended is None and now.mono_s >= self._due_s[host]
        ]

    # --- applying -------------------------------------------------------------------------------------------

    def apply(
        self, event: HostDrainStarted | HandoverRecorded | HostDrained | HostUndrained, now: Instant
    ) -> None:
        known = self.hosts.get(event.host)
        if isinstance(event, HostDrainStarted):
            self._due_s[event.host] = now.mono_s + event.deadline_s - now.wall_s
            left = frozenset(event.left)
            self.hosts[event.host] = (
                Drain(asked=event, left=left)
                if known is None
                else replace(known, asked=event, left=known.left | left, ended=None)
            )
        elif isinstance(event, HostUndrained):
            self.hosts.pop(event.host, None)
            self._due_s.pop(event.host, None)
        elif known is None:
            pass  # An agent that left by itself: it is in the history of events.
        elif isinstance(event, HostDrained):
            self.hosts[event.host] = replace(known, ended=event)
        else:
            others = tuple(one for one in known.handovers if one.job_id != event.job_id)
            self.hosts[event.host] = replace(
                known,
                left=known.left | ({event.node} if event.node else set()),
                handovers=(*others, event)[-HANDOVERS_KEPT:],
            )

    def compact(self) -> Iterator[Event]:
        return _history(list(self.hosts.values()))


def _history(drains: Sequence[Drain]) -> Iterator[Event]:
    for drain in drains:
        yield replace(drain.asked, left=tuple(sorted(drain.left)))
        yield from drain.handovers
        if drain.ended is not None:
            yield drain.ended


def _view(drain: Drain) -> DrainView:
    return DrainView(
        host=drain.asked.host,
        state=drain.state,
        reason=drain.asked.reason,
        by=drain.asked.by,
        since=drain.asked.at_s,
        deadline=drain.asked.deadline_s,
        ended=drain.ended.at_s if drain.ended is not None else None,
        agents=drain.asked.agents,
        outcome=drain.ended.reason if drain.ended is not None else "",
        handovers=tuple(
            HandoverView(
                run=one.job_id,
                saved_step=one.saved_step,
                lost_steps=one.lost_steps,
                where=one.where,
                reason=one.reason,
            )
            for one in drain.handovers
        ),
    )
