"""Incidents: each failure of a run as one record, from the first evidence to what it cost.

An incident is opened by the first that knows of a failure: the agent of the machine, which sees the process end; else the
coordinator, which loses the worker; else the recovery itself. What others report of the same failure is added to it, and who
failed first and how is decided anew from all of it (`strata.core.faults.failures`). It is closed when the run has recovered,
has stopped, or has failed again. Ranks that hang and are not ended are one as well, closed when the run makes steps again.
Saves that fail and ranks that the others wait for are incidents too, which stop nothing.

Pure: decides without changing, applies without deciding. The newest are kept, the oldest dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from strata.core import checks
from strata.core.events import (
    CheckpointCompleted,
    CheckpointFailed,
    Event,
    HostCleared,
    HostQuarantined,
    IncidentClosed,
    IncidentReported,
    IncidentSubject,
    Outcome,
    RecoveryRecorded,
    TaskChanged,
    WorkerFailed,
)
from strata.core.faults.failures import (
    ADVICE,
    Failure,
    FailureClass,
    WorkerError,
    classify,
    fingerprint,
    first_failing,
    others,
    rule_of,
)
from strata.core.messages import EndHang, ReportFailure, ReportSlow
from strata.core.types import Instant, JobId, WorkerSpec

KEPT = 1_000
MAX_FAILURES = 64
"""Of one incident: those that were reported first, the one to blame among them."""
TRACEBACK_LIMIT = 32_768
TOGETHER_S = 10.0
"""Within this, failures of several machines are one incident."""
LATE_S = 60.0
"""So long after an incident has ended its consequences may still be reported."""

NO_RUN = JobId("")
"""In place of a job, for what a person has decided about a machine."""
UNSAID = "its agent reported no reason"
WAITS = "no process is ended for it (hang_policy 'warn')"
LEFT = "the run continues with fewer workers, and no failure was reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What is known of a job when it fails: what a lost second and a lost step mean there."""

    step: int = 0
    """The newest that a worker has reported."""
    saved_step: int | None = None
    """Of the newest checkpoint in a durable place; None: there is none."""
    step_s: float = 0.0
    workers: int = 0
    gpus_per_worker: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    reported: IncidentReported
    """As it is known now."""
    opened_at_s: float
    closed: IncidentClosed | None = None

    @property
    def is_open(self) -> bool:
        return self.closed is None

    @property
    def is_about_run(self) -> bool:
        return self.reported.subject == "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """One incident, field by field as `/api/incidents` shows it. Times are Unix seconds."""

    id: int
    run: str
    """The job, or task, that it happened to."""
    launch: str
    """The rendezvous id of the launch; empty where no agent has reported it."""
    subject: IncidentSubject
    failure_class: FailureClass
    rule: str
    """Which evidence decides the class."""
    fingerprint: str
    """The same for the same failure, in every run."""
    text: str
    """What happened, in one sentence."""
    rank: int | None
    host: str
    pid: int
    gpu: str
    decision: str
    reason: str
    next_step: str
    """What a person should do now."""
    state: str
    """open, recovered, stopped, continued or failed_again."""
    opened_at: float
    closed_at: float | None
    closed_reason: str
    phases_s: dict[str, float]
    resumed_step: int | None
    lost_steps: int | None
    lost_s: float | None
    """Seconds without progress: of the recovery, and those that were spent on the steps that are lost."""
    lost_gpu_s: float | None
    """The same, over all GPUs of the run; of workers where there are none."""
    failures: list[Failure]
    """The evidence: how each worker ended that is known of."""


class Incidents:
    def __init__(self) -> None:
        self.records: dict[int, Incident] = {}
        self.count = 0

    # --- reading --------------------------------------------------------------------------------------------

    def shown(self, job: str | None = None, *, by_launch: bool = True) -> list[IncidentView]:
        """Newest first; of a job, or where none has that name and it is allowed, of a launch: any user may call a launch so."""
        newest = list(reversed(self.records.values()))
        found = [one for one in newest if job is None or one.reported.job_id == job]
        if not found and by_launch:
            found = [one for one in newest if one.reported.launch == job]
        return [view(incident) for incident in found]

    def hanging(self) -> dict[JobId, int]:
        """Jobs of which it is known only that workers hang, and the newest step that these had made."""
        return {
            incident.reported.job_id: max(
                (failure.error.step or 0 for failure in incident.reported.failures if failure.error),
                default=0,
            )
            for incident in self.records.values()
            if _only_hangs(incident)
        }

    def _newest(self, job: JobId, subject: IncidentSubject = "run") -> Incident | None:
        return next(
            (
                incident
                for incident in reversed(self.records.values())
                if incident.reported.job_id == job and incident.reported.subject == subject
            ),
            None,
        )

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_report(self, command: ReportFailure, job: JobId, cost: Cost, now: Instant) -> list[Event]:
        if all(failure.hangs for failure in command.failures):
            command = replace(command, decision="continue", reason=WAITS)
        known = self._known(job, seen=True)
        fresh = [failure for failure in command.failures if (failure.host, failure.pid) not in known]
        if not fresh:
            return []
        lost = self._lost_before(job, fresh)
        if lost is not None:
            return self._add(lost, fresh, command, cost, now)
        newest = self._newest(job)
        if newest is not None and self._belongs(newest, fresh, now):
            return self._add(newest, fresh, command, cost, now)
        events: list[Event] = []
        if newest is not None and newest.is_open:
            reason = "the run failed again before it had recovered"
            events.append(self._close(newest, "failed_again", reason, cost, now))
        opened = self._opened(job, fresh, now, launch=command.launch, number=self.count + 1)
        opened = replace(opened, decision=command.decision, reason=command.reason or UNSAID)
        events.append(opened)
        if command.decision == "stop":
            incident = Incident(reported=opened, opened_at_s=now.wall_s)
            events.append(self._close(incident, "stopped", opened.reason, cost, now))
        return events

    def _belongs(self, incident: Incident, fresh: Sequence[Failure], now: Instant) -> bool:
        """Whether these failures are part of an incident that is known."""
        first = incident.reported.first
        only_consequences = not any(failure.is_own for failure in fresh)
        if incident.closed is not None:
            return _may_be_late(incident, now) or (_is_recent(incident, now) and only_consequences)
        if only_consequences or first is None or not first.is_own or first.exit_code is None:
            return True
        hosts = {failure.host for failure in incident.reported.failures}
        is_together = now.wall_s - incident.opened_at_s <= TOGETHER_S
        return is_together and all(failure.host not in hosts for failure in fresh)

    def _add(
        self, incident: Incident, fresh: Sequence[Failure], command: ReportFailure, cost: Cost, now: Instant
    ) -> list[Event]:
        before = incident.reported
        ended = {(failure.host, failure.pid) for failure in fresh}
        # Who saw a process end says more than who only lost it.
        kept = [
            one
            for one in before.failures
            if not ((is_lost(one) or one.hangs) and (one.host, one.pid) in ended)
        ]
        opened = self._opened(
            before.job_id,
            [*kept, *fresh],
            now,
            launch=before.launch or command.launch,
            number=before.incident_id,
        )
        stops = "stop" in (before.decision, command.decision)
        is_undecided = not before.decision or all(is_lost(one) or one.hangs for one in before.failures)
        said = command if command.decision == "stop" or is_undecided else before
        opened = replace(opened, decision="stop" if stops else said.decision, reason=said.reason or UNSAID)
        if command.decision == "stop" and incident.is_open:
            return [opened, self._close(incident, "stopped", opened.reason, cost, now)]
        return [opened]

    def decide_lost(
        self, job: JobId, losses: Sequence[tuple[WorkerFailed, WorkerSpec]], now: Instant
    ) -> list[Event]:
        """The coordinator has lost workers of a job. Where an agent has seen one end, that says more."""
        known = self._known(job)
        fresh = [
            Failure(
                rank=_rank(spec.worker_id),
                host=spec.hostname,
                pid=_pid(spec),
                at_s=now.wall_s,
                lost=loss.reason,
            )
            for loss, spec in losses
            if (spec.hostname, _pid(spec)) not in known
        ]
        newest = self._newest(job)
        if newest is None or not (newest.is_open or _may_be_late(newest, now)):
            if not fresh:
                return []
            opened = self._opened(job, fresh, now, number=self.count + 1)
            reason = "the others continue without it where they can"
            return [replace(opened, decision="restart", reason=reason)]
        before = newest.reported
        if not fresh or len(before.failures) >= MAX_FAILURES:
            return []
        opened = self._opened(
            job, [*before.failures, *fresh], now, launch=before.launch, number=before.incident_id
        )
        return [replace(opened, decision=before.decision, reason=before.reason)]

    def decide_recovery(self, recorded: RecoveryRecorded, cost: Cost, now: Instant) -> list[Event]:
        """A run has recovered: from its newest incident, or from one that was not reported."""
        newest = self._newest(recorded.job_id)
        events: list[Event] = []
        if newest is None or (newest.closed is not None and newest.closed.outcome != "stopped"):
            if recorded.world_after > recorded.world_before > 0:
                return []  # It grew: others joined, and no worker was lost.
            # A worker that is lost is reported by an agent, or lost by the coordinator. Others have left.
            shrank = recorded.world_after < recorded.world_before
            failures = [Failure(at_s=now.wall_s, left=LEFT)] if shrank else []
            opened = self._opened(recorded.job_id, failures, now, number=self.count + 1)
            opened = replace(opened, decision="restart", reason="the run has recovered by itself")
            events.append(opened)
            newest = Incident(reported=opened, opened_at_s=now.wall_s)
        for slow in self.records.values():
            if (
                slow.is_open
                and slow.reported.subject == "slow_rank"
                and slow.reported.job_id == recorded.job_id
            ):
                reason = "the run has recovered; its step time is measured again"
                events.append(self._closed_quietly(slow, "recovered", reason, now))
        seconds = sum(recorded.phases_s.values()) + recorded.lost_steps * cost.step_s
        spread = max(1, recorded.world_before) * max(1, cost.gpus_per_worker)
        saved_steps = max(0, recorded.resumed_step - (cost.saved_step or 0))
        events.append(
            IncidentClosed(
                incident_id=newest.reported.incident_id,
                job_id=recorded.job_id,
                outcome="recovered",
                phases_s=dict(recorded.phases_s),
                resumed_step=recorded.resumed_step,
                lost_steps=recorded.lost_steps,
                lost_s=seconds,
                lost_gpu_s=seconds * spread,
                saved_steps=saved_steps,
                saved_gpu_s=saved_steps * cost.step_s * spread,
                reason=recorded.reason,
                at_s=now.wall_s,
            )
        )
        return events

    def decide_moving(self, command: EndHang, cost: Cost, now: Instant) -> list[Event]:
        """A job whose workers hung makes steps again, by itself."""
        checks.name("job_id", command.job_id)
        checks.between("step", command.step, 0, checks.SAMPLES_LIMIT)
        newest = self._newest(command.job_id)
        if newest is None or not _only_hangs(newest):
            return []
        if command.step <= self.hanging()[newest.reported.job_id]:
            return []  # Said of a hang before: this one has come meanwhile.
        seconds = max(0.0, now.wall_s - newest.opened_at_s)
        return [
            IncidentClosed(
                incident_id=newest.reported.incident_id,
                job_id=command.job_id,
                outcome="recovered",
                lost_steps=0,
                lost_s=seconds,
                lost_gpu_s=seconds * max(1, cost.workers) * max(1, cost.gpus_per_worker),
                reason=f"step {command.step:,} was completed after {seconds:.1f} s",
                at_s=now.wall_s,
            )
        ]

    def decide_task(self, changed: TaskChanged, cost: Cost, now: Instant) -> list[Event]:
        """An attempt at a task has ended. One that failed without any other evidence has its cause."""
        job = JobId(changed.task_id)
        newest = self._newest(job)
        is_open = newest is not None and newest.is_open
        if changed.status in ("completed", "stopped") or changed.cause is None:
            if newest is None or not is_open or changed.status not in ("completed", "stopped"):
                return []
            outcome: Outcome = "recovered" if changed.status == "completed" else "stopped"
            return [self._close(newest, outcome, changed.reason, cost, now)]
        cause = changed.cause
        is_final = changed.status == "failed"
        if newest is not None and (is_open or _is_recent(newest, now)):
            if not is_final or not is_open:
                return []
            return [self._close(newest, "stopped", changed.reason, cost, now)]
        error = None
        if cause.kind in ("exception", "launch"):
            kind, _, message = cause.message.partition(": ")[2].partition(": ")
            kind = kind if cause.kind == "exception" and kind.isidentifier() else "LaunchFailed"
            error = WorkerError(type=kind, message=message or cause.message, traceback=cause.traceback)
        failure = Failure(
            rank=cause.rank,
            at_s=now.wall_s,
            exit_code=cause.exit_code,
            error=error,
            oom_killed=cause.kind == "oom",
            last_lines=tuple(cause.traceback.splitlines()[-20:]) if error is None else (),
            lost=cause.message if cause.kind == "lost" else "",
        )
        opened = self._opened(job, [failure], now, number=self.count + 1)
        decision = "stop" if is_final else "restart"
        opened = replace(opened, decision=decision, reason=changed.reason)
        if not is_final:
            return [opened]
        incident = Incident(reported=opened, opened_at_s=now.wall_s)
        return [opened, self._close(incident, "stopped", changed.reason, cost, now)]

    def decide_save(
        self, event: CheckpointFailed | CheckpointCompleted, job: JobId, now: Instant
    ) -> list[Event]:
        """One incident for saves that fail one after the other, until one succeeds."""
        newest = self._newest(job, "save")
        is_open = newest is not None and newest.is_open
        if isinstance(event, CheckpointFailed) == is_open:
            return []
        if newest is not None and is_open:
            reason = f"the checkpoint of step {event.step:,} was completed"
            return [self._closed_quietly(newest, "recovered", reason, now)]
        failure = Failure(at_s=now.wall_s, error=WorkerError(type="SaveFailed", message=event.reason))
        return [
            IncidentReported(
                incident_id=self.count + 1,
                job_id=job,
                launch="",
                subject="save",
                failure_class=classify(failure),
                fingerprint=fingerprint(failure),
                first=failure,
                failures=(failure,),
                what=f"the checkpoint of step {event.step:,} failed: {event.reason}",
                decision="continue",
                reason="training continues; the newest checkpoint is an earlier one",
                at_s=now.wall_s,
            )
        ]

    def decide_slow(self, command: ReportSlow, spec: WorkerSpec | None, now: Instant) -> list[Event]:
        """One incident for a rank that the others wait for, until they no longer do."""
        checks.name("job_id", command.job_id)
        checks.name("worker_id", command.worker_id)
        checks.text("reason", command.reason)
        rank = _rank(command.worker_id)
        newest = next(
            (
                incident
                for incident in reversed(self.records.values())
                if incident.is_open
                and incident.reported.subject == "slow_rank"
                and incident.reported.job_id == command.job_id
                and incident.reported.launch == command.worker_id
            ),
            None,
        )
        if newest is not None and not command.slow:
            reason = command.reason or "the others no longer wait for it"
            return [self._closed_quietly(newest, "recovered", reason, now)]
        if newest is not None or not command.slow:
            return []
        failure = Failure(
            rank=rank,
            host=spec.hostname if spec is not None else "",
            pid=_pid(spec) if spec is not None else 0,
            at_s=now.wall_s,
        )
        return [
            IncidentReported(
                incident_id=self.count + 1,
                job_id=command.job_id,
                launch=command.worker_id,
                subject="slow_rank",
                failure_class="unknown",
                fingerprint="slow_rank",
                first=failure,
                failures=(failure,),
                what=f"{failure.who} is slow: {command.reason}",
                decision="continue",
                reason="the others wait for it at every step",
                at_s=now.wall_s,
            )
        ]

    def decide_quarantined(self, event: HostQuarantined, now: Instant) -> list[Event]:
        """A machine that is out of use is an incident until it is cleared."""
        failure = Failure(host=event.host, at_s=now.wall_s)
        return [
            IncidentReported(
                incident_id=self.count + 1,
                job_id=event.job_id or NO_RUN,
                launch=event.host,
                subject="quarantine",
                failure_class="gpu" if event.job_id is not None else "unknown",
                fingerprint="quarantine",
                first=failure,
                failures=(failure,),
                what=f"the machine {event.host} is quarantined: {event.reason}",
                decision="continue",
                reason=f"quarantined by {event.by}; runs continue without it where they can",
                at_s=now.wall_s,
            )
        ]

    def decide_cleared(self, event: HostCleared, now: Instant) -> list[Event]:
        return [
            self._closed_quietly(incident, "recovered", event.reason, now)
            for incident in self.records.values()
            if incident.is_open
            and incident.reported.subject == "quarantine"
            and incident.reported.launch == event.host
        ]

    # --- inside ---------------------------------------------------------------------------------------------

    def _lost_before(self, job: JobId, fresh: Sequence[Failure]) -> Incident | None:
        """The incident of a worker that was lost before its agent said how it ended."""
        ended = {(failure.host, failure.pid) for failure in fresh}
        return next(
            (
                incident
                for incident in reversed(self.records.values())
                if incident.reported.job_id == job
                and incident.is_about_run
                and any(is_lost(one) and (one.host, one.pid) in ended for one in incident.reported.failures)
            ),
            None,
        )

    def _known(self, job: JobId, *, seen: bool = False) -> set[tuple[str, int]]:
        """The processes whose end is in an incident of the job; with `seen`, only those whose end was seen."""
        return {
            (failure.host, failure.pid)
            for incident in self.records.values()
            if incident.reported.job_id == job and incident.is_about_run
            for failure in incident.reported.failures
            if failure.pid and not failure.left and not failure.hangs and not (seen and is_lost(failure))
        }

    def _opened(
        self, job: JobId, failures: Sequence[Failure], now: Instant, *, number: int, launch: str = ""
    ) -> IncidentReported:
        first = first_failing(failures)
        kept = list(failures[:MAX_FAILURES])
        if first is not None and first not in kept:
            kept[-1] = first
        what = (
            f"{first}{others(failures, first)}" if first is not None else "it failed; no cause was reported"
        )
        return IncidentReported(
            incident_id=number,
            job_id=job,
            launch=launch,
            subject="run",
            failure_class=classify(first),
            fingerprint=fingerprint(first),
            first=first,
            failures=tuple(kept),
            what=what,
            decision="",
            reason="",
            at_s=now.wall_s,
        )

    def _close(
        self, incident: Incident, outcome: Outcome, reason: str, cost: Cost, now: Instant
    ) -> IncidentClosed:
        if outcome == "recovered":
            return self._closed_quietly(incident, outcome, reason, now)
        at_risk = max(0, cost.step - (cost.saved_step or 0)) if outcome == "stopped" else None
        seconds = at_risk * cost.step_s if at_risk is not None else None
        spread = max(1, cost.workers) * max(1, cost.gpus_per_worker)
        return IncidentClosed(
            incident_id=incident.reported.incident_id,
            job_id=incident.reported.job_id,
            outcome=outcome,
            lost_steps=at_risk,
            lost_s=seconds,
            lost_gpu_s=seconds * spread if seconds is not None else None,
            reason=reason,
            at_s=now.wall_s,
        )

    @staticmethod
    def _closed_quietly(incident: Incident, outcome: Outcome, reason: str, now: Instant) -> IncidentClosed:
        return IncidentClosed(
            incident_id=incident.reported.incident_id,
            job_id=incident.reported.job_id,
            outcome=outcome,
            reason=reason,
            at_s=now.wall_s,
        )

    # --- applying -------------------------------------------------------------------------------------------

    def apply(self, event: IncidentReported | IncidentClosed) -> None:
        known = self.records.get(event.incident_id)
        if isinstance(event, IncidentReported):
            self.count = max(self.count, event.incident_id)
            if known is None:
                self.records[event.incident_id] = Incident(reported=event, opened_at_s=event.at_s)
                if len(self.records) > KEPT:
                    del self.records[next(iter(self.records))]
            else:
                self.records[event.incident_id] = replace(known, reported=event)
        elif known is not None:
            self.records[event.incident_id] = replace(known, closed=event)

    def compact(self) -> Iterator[Event]:
        return _history(list(self.records.values()))


def _history(incidents: Sequence[Incident]) -> Iterator[Event]:
    for incident in incidents:
        # When it was opened is what counts; when more became known of it is in the journal of that time.
        yield replace(incident.reported, at_s=incident.opened_at_s)
        if incident.closed is not None:
            yield incident.closed


def view(incident: Incident) -> IncidentView:
    known, closed, first = incident.reported, incident.closed, incident.reported.first
    next_step = ADVICE[known.failure_class]
    if known.subject == "quarantine":
        next_step = f"Fix the machine, then: strata quarantine clear {known.launch}"
    elif known.subject == "slow_rank":
        next_step = "Check that machine: its GPU clocks, its disk, and other processes on it."
    return IncidentView(
        id=known.incident_id,
        run=known.job_id,
        launch=known.launch if known.subject == "run" else "",
        subject=known.subject,
        failure_class=known.failure_class,
        rule=rule_of(first).evidence if first is not None else "no cause was reported",
        fingerprint=known.fingerprint,
        text=known.what,
        rank=first.rank if first is not None else None,
        host=first.host if first is not None else "",
        pid=first.pid if first is not None else 0,
        gpu=first.gpu if first is not None else "",
        decision=known.decision,
        reason=known.reason,
        next_step=next_step,
        state=closed.outcome if closed is not None else "open",
        opened_at=incident.opened_at_s,
        closed_at=closed.at_s if closed is not None else None,
        closed_reason=closed.reason if closed is not None else "",
        phases_s=dict(closed.phases_s) if closed is not None else {},
        resumed_step=closed.resumed_step if closed is not None else None,
        lost_steps=closed.lost_steps if closed is not None else None,
        lost_s=closed.lost_s if closed is not None else None,
        lost_gpu_s=closed.lost_gpu_s if closed is not None else None,
        failures=list(known.failures),
    )


def local_incident(
    failures: Iterable[Failure], *, run: str, decision: str, reason: str, now_s: float
) -> IncidentView:
    """What an agent without a coordinator knows of a failure."""
    now = Instant(mono_s=0.0, wall_s=now_s)
    nobody = Incidents()
    opened = nobody._opened(JobId(run), list(failures), now, number=1, launch=run)
    incident = Incident(reported=replace(opened, decision=decision, reason=reason), opened_at_s=now_s)
    if decision == "stop":
        incident = replace(incident, closed=nobody._closed_quietly(incident, "stopped", reason, now))
    return view(incident)


def _only_hangs(incident: Incident) -> bool:
    failures = incident.reported.failures
    return incident.is_open and bool(failures) and all(failure.hangs for failure in failures)


def is_lost(failure: Failure) -> bool:
    """Whether it is known only that its connection ended."""
    return failure.exit_code is None and bool(failure.lost) and bool(failure.pid)


def _is_recent(incident: Incident, now: Instant) -> bool:
    return incident.closed is not None and now.wall_s - incident.closed.at_s <= LATE_S


def _may_be_late(incident: Incident, now: Instant) -> bool:
    """Whether an incident that is over still lacks the evidence that may come now."""
    first = incident.reported.first
    return _is_recent(incident, now) and (first is None or bool(first.left))


def _rank(worker_id: str) -> int | None:
    """Of one that is named as elastic jobs name their workers."""
    text = worker_id.rpartition("rank")[2]
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _pid(spec: WorkerSpec) -> int:
    """As an elastic job registers it; 0 where it is not known."""
    text = spec.metadata.get("pid", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def check_report(command: ReportFailure) -> None:
    checks.between("number of failures", len(command.failures), 1, MAX_FAILURES)
    for field, name in (("launch", command.launch), ("job_id", command.job_id)):
        if name:
            checks.name(field, name)
    checks.text("reason", command.reason)
    for failure in command.failures:
        if failure.rank is not None:
            checks.between("rank", failure.rank, 0, checks.SAMPLES_LIMIT)
        checks.between("pid", failure.pid, 0, checks.SAMPLES_LIMIT)
        checks.between("at", failure.at_s, 0.0, 1e11)
        if failure.exit_code is not None:
            checks.between("exit_code", failure.exit_code, -(2**31), 2**32)
        for field in ("host", "gpu"):
            checks.text(field, getattr(failure, field), limit=checks.NAME_LIMIT)
        for field in ("replaced", "lost", "left"):
            checks.text(field, getattr(failure, field))
        for field, texts in (("last_lines", failure.last_lines), ("device_faults", failure.device_faults)):
            checks.between(f"number of {field}", len(texts), 0, 100)
            for text in texts:
                checks.text(field, text)
        if failure.error is not None:
            checks.text("error type", failure.error.type, limit=checks.NAME_LIMIT)
            checks.text("error message", failure.error.message, limit=2 * checks.TEXT_LIMIT)
            checks.text("traceback", failure.error.traceback, limit=TRACEBACK_LIMIT)
            checks.between("number of frames", len(failure.error.where), 0, 200)
            for place in failure.error.where:
                checks.text("frame", place)
            if failure.error.step is not None:
                checks.between("step", failure.error.step, 0, checks.SAMPLES_LIMIT)
