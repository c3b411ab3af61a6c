"""Who belongs to the fleet, under which incarnation, and who may still speak.

Guarantees:

* A registration is an **incarnation**, numbered once and never again; a newer one of the same id fences the
  older. A retried registration is the same incarnation.
* Every change of a job's member set is a **generation**. Numbers grow over the whole coordinator, so two jobs
  never share one and a restart never repeats one.
* `admit` refuses any call of a stale incarnation or generation, whatever it asks. The refusal's `cause` says whether the
  caller was superseded, and should stop, or may register again. A registration that arrives late supersedes no worker, and brings
  none back that has left.
* A **run** has one live fleet: its generations only grow, and another run cannot take the name of a job that is live.

Liveness is soft: `Pulse` holds a worker's last heartbeat, on the monotonic clock, and is not journaled.
Deciding that silence means failure happens here; a dropped connection is noticed by the shells, and observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from strata.core import checks
from strata.core.fleet.run_registry import RunRegistry
from strata.core.messages import (
    CountersRestored,
    DeregisterWorker,
    Event,
    Heartbeat,
    HeartbeatsFolded,
    Instant,
    InvalidArgument,
    JobId,
    NameInUse,
    Overloaded,
    RegisterWorker,
    Report,
    Stale,
    StragglersMarked,
    UnknownWorker,
    WorkerConnected,
    WorkerDisconnected,
    WorkerFailed,
    WorkerForgotten,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
    WorkerSpec,
)

EMPTY_JOBS_KEPT = 100
REGISTRATIONS_KEPT = 8
DEPARTED_KEPT = 2_000
"""Of so many workers that have left it is known how they had registered."""
RECONNECT_S = 5.0
"""How long a worker without a stream counts as live after its last heartbeat: those of a live job are back by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipLimits:
    """How patient the coordinator is, and how many it will know."""

    heartbeat_timeout_s: float = 30.0
    disconnect_grace_s: float = 0.5
    """How long a worker whose stream dropped may take to come back."""
    forget_failed_after_s: float = 3600.0
    max_workers: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    spec: WorkerSpec
    registration_id: str
    incarnation: int
    generation: int
    """The one its registration started."""
    seat: int
    """Order of joining within the coordinator: ranks follow it."""
    joined_at_s: float
    state: Literal["active", "failed"]
    reason: str
    changed_at_s: float
    former: tuple[str, ...] = ()
    """Earlier registrations of this worker."""
    origin: int = 0
    """The first incarnation by its registration: one that had failed may have been repeated by a retry."""

    @property
    def present(self) -> bool:
        return self.state == "active"


@dataclass(slots=True, kw_only=True)
class Pulse:
    """When a present worker's last heartbeat came, whether its stream is open, and since when it is not (if it was)."""

    last_heartbeat_mono_s: float
    last_heartbeat_wall_s: float
    connected: bool = False
    disconnected_mono_s: float | None = None


class Reports(Mapping[WorkerId, Report]):
    """What each worker said last about itself.

    One that came unread is read, and checked, when it is looked at; one that is replaced before costs nothing, and one
    that makes no sense is not taken.
    """

    def __init__(self) -> None:
        self._read: dict[WorkerId, Report] = {}
        self._unread: dict[WorkerId, Callable[[], Report]] = {}

    def put(self, worker_id: WorkerId, report: Report) -> None:
        self._unread.pop(worker_id, None)
        self._read[worker_id] = report

    def put_unread(self, worker_id: WorkerId, report: Callable[[], Report]) -> None:
        self._unread[worker_id] = report

    def forget(self, worker_id: WorkerId) -> None:
        self._unread.pop(worker_id, None)
        self._read.pop(worker_id, None)

    def __getitem__(self, worker_id: WorkerId) -> Report:
        unread = self._unread.pop(worker_id, None)
        if unread is not None:
            with suppress(InvalidArgument):
                report = unread()
                checks.report(report)
                self._read[worker_id] = report
        return self._read[worker_id]

    def __iter__(self) -> Iterator[WorkerId]:
        for worker_id in list(self._unread):
            with suppress(KeyError):
                self[worker_id]
        return iter(self._read)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Membership:
    def __init__(self, limits: MembershipLimits) -> None:
        self.limits = limits
        self.members: dict[WorkerId, Member] = {}
        """In the order of their seats."""
        self.pulses: dict[WorkerId, Pulse] = {}
        self.reports = Reports()
        self.slow: dict[WorkerId, str] = {}
        """Why, for every worker that the others of its job wait for."""
        self.failed_mono_s: dict[WorkerId, float] = {}
        """Since when each failed member is known to be."""
        self.departed: dict[WorkerId, tuple[str, ...]] = {}
        """Registrations of workers that have left or were forgotten; last who went last."""
        self.generation = 0
        self.incarnation = 0
        self.job_generations: dict[JobId, int] = {}
        self.job_changes: dict[JobId, int] = {}
        """How often the members of each job have changed: its generations, counted by themselves."""
        self.runs = RunRegistry()
        self._rosters: dict[JobId, dict[WorkerId, int]] = {}

    # --- questions ------------------------------------------------------------------------------------------

    def roster(self, job: JobId) -> dict[WorkerId, int]:
        """Present members of a job with their ranks, in rank order."""
        roster = self._rosters.get(job)
        if roster is None:
            present = (m.spec.worker_id for m in self.members.values() if m.present and m.spec.job_id == job)
            roster = {worker_id: rank for rank, worker_id in enumerate(present)}
            self._rosters[job] = roster
        return roster

    def jobs(self) -> list[JobId]:
        return list(self.job_generations)

    def admit(self, worker_id: WorkerId, *, incarnation: int, generation: int = 0) -> Member:
        """The member this call may act as, or a refusal. Zero means "whatever is current"."""
        member = self.members.get(worker_id)
        if member is None:
            raise UnknownWorker(worker_id)
        if incarnation > self.incarnation:
            raise Stale(
                f"Incarnation {checks.number(incarnation)} of worker '{worker_id}' is not known here.",
                cause="unknown",
                hint="The coordinator has lost its state. Register again.",
            )
        if incarnation and incarnation != member.incarnation:
            raise Stale(
                f"Incarnation {checks.number(incarnation)} of worker '{worker_id}' is over; incarnation {member.incarnation} "
                f"replaced it.",
                cause="superseded" if incarnation < member.origin else "failed",
                hint="Stop this process, or register again.",
            )
        if not member.present:
            raise Stale(
                f"Worker '{worker_id}' was declared failed: {member.reason}.",
                cause="failed",
                hint="Register again.",
            )
        current = self.job_generations[member.spec.job_id]
        if generation and generation != current:
            raise Stale(
                f"Generation {checks.number(generation)} of job '{member.spec.job_id}' is over; the current one is {current}.",
                cause="generation",
                hint="Join the current generation: re-read rank, world size and shards, then retry.",
            )
        return member

    # --- decisions ------------------------------------------------------------------------------------------

    def must_be_new(self, command: RegisterWorker) -> None:
        """A registration that is over cannot be made again by a call that arrives late: it would fence its own process, or bring
        back a worker that has left, for the others to wait for."""
        worker_id, registration_id = command.spec.worker_id, command.registration_id
        known = self.members.get(worker_id)
        former = known.former if known is not None else self.departed.get(worker_id, ())
        if not registration_id or registration_id not in former:
            return
        if known is None and registration_id == former[-1]:
            raise Stale(
                f"This registration of worker '{worker_id}' is over: the worker has left.",
                cause="unknown",
                hint="Register again with a new registration id.",
            )
        by = f"incarnation {known.incarnation}" if known is not None else "one that has left since"
        raise Stale(
            f"This registration of worker '{worker_id}' was superseded by {by}.",
            cause="superseded",
            hint="Stop this process, or register again with a new registration id.",
        )

    def decide_register(self, command: RegisterWorker, now: Instant) -> WorkerJoined | Member:
        """A join, or the member itself when this call is a retry of the one that made it."""
        spec = command.spec
        checks.worker(spec)
        checks.text("registration_id", command.registration_id, limit=checks.NAME_LIMIT)
        known = self.members.get(spec.worker_id)
        retried = known is not None and known.registration_id == command.registration_id != ""
        if known is not None and known.present and retried and known.spec == spec:
            return known
        self.runs.admit(spec.job_id, spec.run_id, spec.run_generation)
        self._must_be_free(spec, now)
        if known is None and len(self.members) >= self.limits.max_workers:
            raise Overloaded(
                f"{len(self.members):,} workers are known already, which is the limit.",
                hint="Raise max_workers, or deregister workers that have left.",
            )
        superseded = known.incarnation if known is not None and known.present else 0
        return WorkerJoined(
            spec=spec,
            registration_id=command.registration_id,
            incarnation=self.incarnation + 1,
            generation=self.generation + 1,
            superseded=superseded,
            reason=_join_reason(spec.worker_id, known, superseded),
            at_s=now.wall_s,
            former=self._former(command),
            origin=_origin(known, command) or self.incarnation + 1,
        )

    def _former(self, command: RegisterWorker) -> tuple[str, ...]:
        """The earlier registrations of the worker that makes this one."""
        known = self.members.get(command.spec.worker_id)
        former = _registrations(known) if known is not None else self.departed.get(command.spec.worker_id, ())
        return tuple(each for each in former if each != command.registration_id)

    def _must_be_free(self, spec: WorkerSpec, now: Instant) -> None:
        """Neither the job's name nor the worker's is one of another live run."""
        others = [self.members[spec.worker_id]] if spec.worker_id in self.members else []
        if self.runs.are_others_in(spec.job_id, spec.run_id):
            others += [self.members[worker_id] for worker_id in self.roster(spec.job_id)]
        for other in others:
            if spec.run_id and other.spec.run_id not in ("", spec.run_id) and self._is_live(other, now):
                holder = f"'{other.spec.worker_id}' on host '{other.spec.hostname}'"
                raise NameInUse(job=spec.job_id, run_id=other.spec.run_id, holder=holder)

    def _is_live(self, member: Member, now: Instant) -> bool:
        pulse = self.pulses.get(member.spec.worker_id)
        if pulse is None or pulse.disconnected_mono_s is not None:
            return False
        return pulse.connected or now.mono_s - pulse.last_heartbeat_mono_s < RECONNECT_S

    def decide_leave(self, command: DeregisterWorker, now: Instant) -> WorkerLeft:
        member = self.admit(command.worker_id, incarnation=command.incarnation)
        checks.text("reason", command.reason)
        return self._left(member, command.reason or "deregistered", now)

    def decide_move(self, command: RegisterWorker, now: Instant) -> WorkerLeft | None:
        """A present member that registers for another job leaves the one it was in."""
        known = self.members.get(command.spec.worker_id)
        job = command.spec.job_id
        if known is None or not known.present or known.spec.job_id == job:
            return None
        return self._left(known, f"registered for job '{job}'", now)

    def _left(self, member: Member, reason: str, now: Instant) -> WorkerLeft:
        return WorkerLeft(
            worker_id=member.spec.worker_id,
            job_id=member.spec.job_id,
            incarnation=member.incarnation,
            generation=self.generation + 1,
            reason=reason,
            at_s=now.wall_s,
        )

    def decide_tick(self, now: Instant) -> Iterator[WorkerFailed | WorkerForgotten]:
        """Failures and forgettings that are due. The caller applies each before it takes the next."""
        alive_since_s = now.mono_s - self.limits.heartbeat_timeout_s
        suspects = [  # Nearly all are well, ten times a second.
            (worker_id, pulse)
            for worker_id, pulse in self.pulses.items()
            if pulse.disconnected_mono_s is not None or pulse.last_heartbeat_mono_s <= alive_since_s
        ]
        for worker_id, pulse in suspects:
            reason = self._overdue(pulse, now)
            if reason:
                yield WorkerFailed(
                    worker_id=worker_id,
                    job_id=self.members[worker_id].spec.job_id,
                    incarnation=self.members[worker_id].incarnation,
                    generation=self.generation + 1,
                    reason=reason,
                    at_s=now.wall_s,
                )
        limit_s = self.limits.forget_failed_after_s
        crowded = len(self.members) - self.limits.max_workers * 9 // 10
        for number, (worker_id, failed_mono_s) in enumerate(list(self.failed_mono_s.items())):
            if now.mono_s - failed_mono_s > limit_s:
                reason = f"failed more than {limit_s:.0f} s ago and did not rejoin"
            elif number < crowded:
                reason = "failed; removed to make space for others"
            else:
                continue
            yield WorkerForgotten(worker_id=worker_id, reason=reason, at_s=now.wall_s)

    def _overdue(self, pulse: Pulse, now: Instant) -> str:
        if pulse.disconnected_mono_s is not None:
            lost_s = now.mono_s - pulse.disconnected_mono_s
            if lost_s >= self.limits.disconnect_grace_s:
                return f"connection lost {lost_s:.1f} s ago, not reconnected"
        silent_s = now.mono_s - pulse.last_heartbeat_mono_s
        if silent_s >= self.limits.heartbeat_timeout_s:
            return f"no heartbeat for {silent_s:.1f} s (heartbeat_timeout is {self.limits.heartbeat_timeout_s:g} s)"
        return ""

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(
        self,
        event: WorkerJoined | WorkerFailed | WorkerLeft | WorkerForgotten | CountersRestored,
        now: Instant,
    ) -> None:
        match event:
            case WorkerJoined():
                self._joined(event, now)
            case WorkerFailed():
                member = self.members[event.worker_id]
                self.members[event.worker_id] = replace(
                    member, state="failed", reason=event.reason, changed_at_s=event.at_s
                )
                self.runs.left(member.spec)
                self.pulses.pop(event.worker_id, None)
                self.failed_mono_s[event.worker_id] = now.mono_s
                self._rosters.pop(member.spec.job_id, None)
                self._changed(member.spec.job_id, event.generation)
            case WorkerLeft():
                member = self._departed(event.worker_id)
                self._rosters.pop(member.spec.job_id, None)
                self._changed(member.spec.job_id, event.generation)
            case WorkerForgotten():
                self._departed(event.worker_id)
            case CountersRestored():
                self.generation = event.generation
                self.incarnation = event.incarnation
                self.job_generations = dict(event.jobs)
                if event.changes:
                    self.job_changes = dict(event.changes)
                self.runs.restore(event.runs)
                self.departed = dict(event.departed)

    def _departed(self, worker_id: WorkerId) -> Member:
        member = self._removed(worker_id)
        if registrations := _registrations(member):
            self.departed[worker_id] = registrations
            if len(self.departed) > DEPARTED_KEPT:
                del self.departed[next(iter(self.departed))]
        return member

    def _removed(self, worker_id: WorkerId) -> Member:
        self.pulses.pop(worker_id, None)
        self.reports.forget(worker_id)
        self.failed_mono_s.pop(worker_id, None)
        member = self.members.pop(worker_id)
        if member.present:
            self.runs.left(member.spec)
        return member

    def _joined(self, event: WorkerJoined, now: Instant) -> None:
        worker_id = event.spec.worker_id
        self.departed.pop(worker_id, None)
        if event.superseded:  # In place: it keeps its seat.
            seat = self.members[worker_id].seat
            self.runs.left(self.members[worker_id].spec)
        else:
            seat = event.incarnation
            if worker_id in self.members:  # It had failed, and comes back as the last.
                self._removed(worker_id)
        self.members[worker_id] = Member(
            spec=event.spec,
            registration_id=event.registration_id,
            incarnation=event.incarnation,
            generation=event.generation,
            seat=seat,
            joined_at_s=event.at_s,
            state="active",
            reason=event.reason,
            changed_at_s=event.at_s,
            former=event.former,
            origin=event.origin or event.incarnation,
        )
        if (roster := self._rosters.get(event.spec.job_id)) is not None and worker_id not in roster:
            roster[worker_id] = len(roster)  # Newcomers sit down last: no other rank changes.
        self.runs.joined(event.spec)
        self.pulses[worker_id] = Pulse(last_heartbeat_mono_s=now.mono_s, last_heartbeat_wall_s=event.at_s)
        self.reports.forget(worker_id)
        self.incarnation = max(self.incarnation, event.incarnation)
        self._changed(event.spec.job_id, event.generation)

    def _changed(self, job: JobId, generation: int) -> None:
        self.generation = max(self.generation, generation)
        self.job_generations[job] = max(self.job_generations.get(job, 0), generation)
        self.job_changes[job] = self.job_changes.get(job, 0) + 1

    def forget_empty_jobs(self) -> list[JobId]:
        """Jobs that no worker is in any more are remembered for a while; returns those that no longer are."""
        if len(self.job_generations) <= EMPTY_JOBS_KEPT:
            return []
        jobs = {member.spec.job_id for member in self.members.values()}
        empty = [job for job in self.job_generations if job not in jobs]
        empty.sort(key=self.job_generations.__getitem__)
        forgotten = empty[:-EMPTY_JOBS_KEPT]
        for job in forgotten:
            del self.job_generations[job]
            self.job_changes.pop(job, None)
            self._rosters.pop(job, None)
        return forgotten

    # --- observations ---------------------------------------------------------------------------------------

    def take_heartbeat(self, beat: Heartbeat, now: Instant) -> None:
        self.admit(beat.worker_id, incarnation=beat.incarnation)
        checks.report(beat.report)
        self._seen(beat.worker_id, now)
        self.reports.put(beat.worker_id, beat.report)

    def take_heartbeats(self, folded: HeartbeatsFolded, now: Instant) -> None:
        """A worker that says something odd about itself is alive all the same: see `Reports`."""
        for worker_id, incarnation, report in folded.beats:
            member = self.members.get(worker_id)
            if member is None or member.incarnation != incarnation or member.state != "active":
                continue
            pulse = self.pulses[worker_id]
            pulse.last_heartbeat_mono_s = now.mono_s
            pulse.last_heartbeat_wall_s = now.wall_s
            if report is not None:
                self.reports.put_unread(worker_id, report)

    def take_connection(self, opened: WorkerConnected, now: Instant) -> None:
        self.admit(opened.worker_id, incarnation=opened.incarnation)
        pulse = self._seen(opened.worker_id, now)
        pulse.connected = True
        pulse.disconnected_mono_s = None

    def take_disconnection(self, ended: WorkerDisconnected, now: Instant) -> None:
        """Suspect from now on, unless it is a stream of an incarnation that is over."""
        member = self.members.get(ended.worker_id)
        if member is not None and member.present and member.incarnation == ended.incarnation:
            pulse = self.pulses[ended.worker_id]
            pulse.connected = False
            pulse.disconnected_mono_s = now.mono_s

    def mark_stragglers(self, marked: StragglersMarked) -> None:
        self.slow = dict(marked.reasons)

    def _seen(self, worker_id: WorkerId, now: Instant) -> Pulse:
        pulse = self.pulses[worker_id]
        pulse.last_heartbeat_mono_s = now.mono_s
        pulse.last_heartbeat_wall_s = now.wall_s
        return pulse

    def resume_clock(self, now: Instant) -> None:
        """After a replay: everyone gets a full time-out to come back, since the silence was ours."""
        for pulse in self.pulses.values():
            pulse.last_heartbeat_mono_s = now.mono_s
            pulse.disconnected_mono_s = None
        self.failed_mono_s = dict.fromkeys(self.failed_mono_s, now.mono_s)

    def credit_stall(self, stall_s: float, now: Instant) -> None:
        """For so long the coordinator may have read no messages: that silence is counted against no worker."""
        for pulse in self.pulses.values():
            pulse.last_heartbeat_mono_s = min(now.mono_s, pulse.last_heartbeat_mono_s + stall_s)
            if pulse.disconnected_mono_s is not None:
                pulse.disconnected_mono_s = min(now.mono_s, pulse.disconnected_mono_s + stall_s)

    # --- compaction -----------------------------------------------------------------------------------------

    def compact(self) -> Iterator[Event]:
        """A shorter history that leads to this state, but for the counters."""
        return _history(list(self.members.values()))


def _history(members: Sequence[Member]) -> Iterator[Event]:
    for member in members:
        joined = WorkerJoined(
            spec=member.spec,
            registration_id=member.registration_id,
            incarnation=member.seat,
            generation=member.generation,
            superseded=0,
            reason=member.reason,
            at_s=member.joined_at_s,
            former=member.former,
            origin=member.origin,
        )
        yield joined
        if member.incarnation != member.seat:  # It came back in place: same seat, newer incarnation.
            yield replace(joined, incarnation=member.incarnation, superseded=member.seat)
        if not member.present:
            yield WorkerFailed(
                worker_id=member.spec.worker_id,
                job_id=member.spec.job_id,
                incarnation=member.incarnation,
                generation=member.generation,
                reason=member.reason,
                at_s=member.changed_at_s,
            )


def _registrations(member: Member) -> tuple[str, ...]:
    """All of its worker that are remembered, last the present one."""
    own = (member.registration_id,) if member.registration_id else ()
    return (*member.former, *own)[-REGISTRATIONS_KEPT:]


def _origin(known: Member | None, command: RegisterWorker) -> int:
    again = known is not None and known.registration_id == command.registration_id != ""
    return known.origin if known is not None and again else 0


def _join_reason(worker_id: WorkerId, known: Member | None, superseded: int) -> str:
    if superseded:
        return f"'{worker_id}' registered again; incarnation {superseded} is fenced"
    if known is not None:
        return f"'{worker_id}' rejoined after a failure"
    return f"'{worker_id}' is new"
