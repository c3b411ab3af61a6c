"""The state of a coordinator, and the only ways to change it.

* `handle(command)` decides: events, which are hard state and belong in the journal, and a reply; or a refusal.
* `observe(observation)` takes in soft state: heartbeats, connections, reported progress. Journaled nowhere.
* `apply(event)` rebuilds the state from a journal. `handle` applies what it has decided by the same call.

The parts (`membership`, `barriers`, …) are for reading; nothing outside the core changes them. Their `decide_…`
methods never change anything and their `apply` never decides anything, so a journal of events rebuilds the hard state
exactly. A command whose consequences depend on each other (a failure breaks a barrier) is decided as a chain: each
event is applied before the next is derived. Every event carries a reason a person can read.

Pure: no clock, no threads, no I/O. Time arrives as `Instant`. One caller at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import assert_never

from strata.core import checks
from strata.core.faults.failures import classify, first_failing
from strata.core.faults.incidents import Cost, Incidents, check_report
from strata.core.fleet.barriers import BarrierLimits, Barriers
from strata.core.fleet.checkpoints import CheckpointEvent, Checkpoints, data_commit
from strata.core.fleet.datasets import Datasets
from strata.core.fleet.drains import Drains
from strata.core.fleet.health import Health, why_unfit
from strata.core.fleet.membership import Membership, MembershipLimits
from strata.core.fleet.presence import Presence, PresenceLimits
from strata.core.fleet.quarantine import Quarantine
from strata.core.fleet.recoveries import Recoveries
from strata.core.fleet.retention import Retention, RetentionLimits
from strata.core.fleet.tasks import Tasks
from strata.core.fleet.values import Values
from strata.core.messages import (
    DEFAULT_JOB,
    Accepted,
    AgentConnected,
    AgentDisconnected,
    ArriveAtBarrier,
    ArriveTogether,
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    BarrierTickets,
    BeginAttempt,
    CancelDrain,
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointRemoved,
    CheckpointStarted,
    ClearHost,
    ClockResumed,
    Command,
    CountersRestored,
    CreateTask,
    DatasetAccepted,
    DatasetRegistered,
    DatasetRemoved,
    Decision,
    DeregisterWorker,
    DrainHost,
    EndAttempt,
    EndHang,
    Event,
    HandoverRecorded,
    Heartbeat,
    HeartbeatsFolded,
    HostCleared,
    HostDrained,
    HostDrainStarted,
    HostExamined,
    HostQuarantined,
    HostUndrained,
    IncidentClosed,
    IncidentReported,
    Instant,
    JobId,
    LoopStalled,
    NoteProgress,
    NoteWhereabouts,
    NotifyCheckpoint,
    Observation,
    PlanEpoch,
    ProgressReported,
    QuarantineHost,
    QueueTask,
    Rebalance,
    ReconcileCheckpoints,
    Reconciled,
    RecordsForgotten,
    RecoveryRecorded,
    Refused,
    RegisterDataset,
    Registered,
    RegisterWorker,
    RemoveDataset,
    Reply,
    ReportFailure,
    ReportHandover,
    ReportHealth,
    ReportRecovery,
    ReportSlow,
    RestartTask,
    ShardsMoved,
    ShardsRequested,
    StopTask,
    StragglersMarked,
    Swapped,
    SwapValue,
    TaskChanged,
    TaskCreated,
    TaskProgressed,
    Tick,
    Unknown,
    ValueDropped,
    ValueRefreshed,
    ValueSwapped,
    VersionsReserved,
    WorkerConnected,
    WorkerDisconnected,
    WorkerFailed,
    WorkerForgotten,
    WorkerJoined,
    WorkerLeft,
    WorkerSpec,
)
from strata.core.refusals import shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    membership: MembershipLimits = field(default_factory=MembershipLimits)
    barriers: BarrierLimits = field(default_factory=BarrierLimits)
    presence: PresenceLimits = field(default_factory=PresenceLimits)
    retention: RetentionLimits = field(default_factory=RetentionLimits)


class Cluster:
    def __init__(self, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.membership = Membership(limits.membership)
        self.barriers = Barriers(limits.barriers)
        self.datasets = Datasets()
        self.checkpoints = Checkpoints()
        self.tasks = Tasks()
        self.recoveries = Recoveries()
        self.incidents = Incidents()
        self.quarantine = Quarantine()
        self.drains = Drains()
        self.health = Health()
        self.values = Values(drop_after_s=limits.retention.values_s)
        self.presence = Presence(limits.presence)
        self.retention = Retention(limits.retention)

    # --- commands in, events out ----------------------------------------------------------------------------

    def handle(self, command: Command, now: Instant) -> Decision:
        """Decide and apply. A refusal is raised before anything has changed."""
        facts: list[Event] = []

        def fact(event: Event) -> None:
            self.apply(event, now)
            facts.append(event)

        try:
            reply = self._handle(command, now, fact)
        except Refused:
            assert not facts, f"{type(command).__name__} was refused after it had changed something"
            raise
        return Decision(events=tuple(facts), reply=reply)

    def _handle(self, command: Command, now: Instant, fact: Callable[[Event], None]) -> Reply:
        match command:
            case RegisterWorker():
                return self._register(command, now, fact)
            case DeregisterWorker():
                left = self.membership.decide_leave(command, now)
                self._lose(left, now, fact)
                return Accepted(reason=left.reason)
            case RegisterDataset():
                registered = self.datasets.decide_register(command, now)
                if registered is not None:
                    fact(registered)
                spec = self.datasets.specs[command.spec.dataset_id]
                return DatasetAccepted(spec=spec, created=registered is not None)
            case RemoveDataset():
                removed = self.datasets.decide_remove(command, now)
                self.tasks.check_dataset_unused(command.dataset_id)
                fact(removed)
                return Accepted(reason=removed.reason)
            case ArriveAtBarrier():
                return self._arrive(command, now, fact)
            case ArriveTogether():
                return BarrierTickets(
                    tickets=tuple(self._ticket(each, now, fact) for each in command.arrivals)
                )
            case NotifyCheckpoint():
                return self._notify_checkpoint(command, now, fact)
            case ReconcileCheckpoints():
                return self._reconcile(command, now, fact)
            case CreateTask():
                name = command.spec.dataset_id
                granted = self.datasets.decide_grant(name, JobId(command.spec.task_id), now) if name else None
                created = self.tasks.decide_create(command, now)
                if granted is not None:
                    fact(granted)
                fact(created)
                return Accepted(reason=created.reason)
            case (
                StopTask()
                | RestartTask()
                | QueueTask()
                | BeginAttempt()
                | EndAttempt()
                | NoteProgress()
                | NoteWhereabouts()
            ):
                changed = self.tasks.decide_change(command, now)
                if changed is None:
                    return Accepted(reason=f"it is {self.tasks.get(command.task_id).status} already")
                fact(changed)
                if isinstance(changed, TaskChanged):
                    job = JobId(command.task_id)
                    _each(fact, self.incidents.decide_task(changed, self._cost(job), now))
                return Accepted(reason=changed.reason)
            case ReportRecovery():
                member = self.membership.admit(command.worker_id, incarnation=command.incarnation)
                recorded = self.recoveries.decide_report(command, member.spec.job_id, now)
                fact(recorded)
                cost = self._cost(member.spec.job_id)
                _each(fact, self.incidents.decide_recovery(recorded, cost, now))
                _each(fact, self.drains.decide_recovery(recorded, command.hosts, now))
                return Accepted(reason=recorded.reason)
            case ReportFailure():
                check_report(command)
                job = self._job_of(command)
                events_of = self.incidents.decide_report(command, job, self._cost(job), now)
                _each(fact, events_of)
                self._quarantine_failed(command, job, now, fact)
                return Accepted(reason="known already" if not events_of else "recorded")
            case QuarantineHost():
                self._quarantine(command, None, now, fact)
                return Accepted(reason=self.quarantine.hosts[command.host].reason)
            case ClearHost():
                cleared = self.quarantine.decide_clear(command, now)
                fact(cleared)
                _each(fact, self.incidents.decide_cleared(cleared, now))
                return Accepted(reason=cleared.reason)
            case DrainHost():
                members = self.membership.members.values()
                jobs = {each.spec.job_id for each in members if each.spec.hostname == command.host}
                _each(fact, self.drains.decide_drain(command, jobs, now))
                return Accepted(reason=self.drains.hosts[command.host].asked.reason)
            case CancelDrain():
                undrained = self.drains.decide_cancel(command, now)
                fact(undrained)
                return Accepted(reason=undrained.reason)
            case ReportHandover():
                _each(fact, self.drains.decide_handover(command, self._job_left(command), now))
                return Accepted(reason="recorded")
            case ReportHealth():
                return self._examine(command, now, fact)
            case ReportSlow():
                known = self.membership.members.get(command.worker_id)
                spec_of = known.spec if known is not None else None
                _each(fact, self.incidents.decide_slow(command, spec_of, now))
                return Accepted(reason=command.reason)
            case EndHang():
                _each(fact, self.incidents.decide_moving(command, self._cost(command.job_id), now))
                return Accepted(reason=f"step {command.step:,} was completed")
            case SwapValue():
                swapped = self.values.decide_swap(command, now)
                _each(fact, swapped)
                return self._value(command.key, made=bool(swapped))
            case PlanEpoch():
                return self._plan_epoch(command, now, fact)
            case Rebalance():
                _each(fact, self.datasets.decide_rebalance(self.membership, now))
                self.datasets.dirty_jobs.clear()
                return Accepted(reason="plans match their members")
            case Tick():
                lost: dict[JobId, list[tuple[WorkerFailed, WorkerSpec]]] = {}
                for change in self.membership.decide_tick(now):
                    if isinstance(change, WorkerFailed):
                        member = self.membership.members[change.worker_id]
                        lost.setdefault(change.job_id, []).append((change, member.spec))
                        self._lose(change, now, fact)
                    else:
                        fact(change)
                for job, losses in lost.items():
                    _each(fact, self.incidents.decide_lost(job, losses, now))
                _each(fact, self.barriers.decide_tick(self.membership, now))
                _each(fact, self.values.decide_tick(now))
                _each(fact, self.drains.decide_tick(now))
                self._forget(now, fact)
                return Accepted(reason="time passed")
        assert_never(command)

    def _arrive(self, command: ArriveAtBarrier, now: Instant, fact: Callable[[Event], None]) -> BarrierTicket:
        member = self.membership.admit(
            command.worker_id, incarnation=command.incarnation, generation=command.generation
        )
        events, ticket = self.barriers.decide_arrival(command, member, self.membership, now)
        _each(fact, events)
        return ticket

    def _ticket(
        self, command: ArriveAtBarrier, now: Instant, fact: Callable[[Event], None]
    ) -> BarrierTicket | Refused:
        """One that is refused changes nothing, and does not keep those from arriving who came with it."""
        try:
            return self._arrive(command, now, fact)
        except Refused as refusal:
            return refusal

    def _forget(self, now: Instant, fact: Callable[[Event], None]) -> None:
        if self.retention.is_time(now):
            self.retention.looked(now)
            forgotten = self.retention.decide_forget(self.tasks, self.checkpoints, self.barriers, now)
            if forgotten is not None:
                fact(forgotten)

    def _quarantine_failed(
        self, command: ReportFailure, job: JobId, now: Instant, fact: Callable[[Event], None]
    ) -> None:
        """Where the run's policy says so: the machine whose device failed first, and for nothing else than that."""
        first = first_failing(command.failures)
        if not command.quarantine or first is None or not first.host or classify(first) != "gpu":
            return
        evidence = first.device_faults[-1] if first.device_faults else str(first.error or "")
        said = str(first) if evidence in str(first) else f"{first}: {evidence}"
        asked = QuarantineHost(host=first.host, reason=shorten(said, 400), by=shorten(f"the policy of {job}"))
        with suppress(Refused):  # A host without a proper name: the failure is recorded all the same.
            self._quarantine(asked, job, now, fact)

    def _quarantine(
        self, command: QuarantineHost, job: JobId | None, now: Instant, fact: Callable[[Event], None]
    ) -> None:
        quarantined = self.quarantine.decide_add(command, now, job=job)
        if quarantined is not None:
            fact(quarantined)
            _each(fact, self.incidents.decide_quarantined(quarantined, now))

    def _examine(self, command: ReportHealth, now: Instant, fact: Callable[[Event], None]) -> Accepted:
        """A machine that is not fit to train is out of use until an operator has looked at it."""
        examined = self.health.decide_report(command, now)
        fact(examined)
        unfit = why_unfit(examined)
        if not unfit:
            return Accepted(reason="fit")
        asked = QuarantineHost(host=command.host, reason=unfit, by="its health checks")
        self._quarantine(asked, None, now, fact)
        return Accepted(reason=unfit)

    def _register(self, command: RegisterWorker, now: Instant, fact: Callable[[Event], None]) -> Registered:
        self.membership.must_be_new(command)
        joined = self.membership.decide_register(command, now)
        if isinstance(joined, WorkerJoined):
            left = self.membership.decide_move(command, now)
            if left is not None:
                self._lose(left, now, fact)
                joined = self.membership.decide_register(command, now)
                assert isinstance(joined, WorkerJoined)
            replaced = self.membership.members[command.spec.worker_id] if joined.superseded else None
            fact(joined)
            broken = self.barriers.decide_change(
                joined.spec.job_id, joined.reason, self.membership, now, lost=replaced
            )
            _each(fact, broken)
        return Registered(worker_id=command.spec.worker_id, incarnation=joined.incarnation)

    def _lose(self, loss: WorkerFailed | WorkerLeft, now: Instant, fact: Callable[[Event], None]) -> None:
        lost = self.membership.members[loss.worker_id]
        fact(loss)
        broken = self.barriers.decide_change(loss.job_id, loss.reason, self.membership, now, lost=lost)
        _each(fact, broken)

    def _value(self, key: str, *, made: bool) -> Swapped:
        value = self.values.get(key)
        if value is None:
            return Swapped(made=made, body=b"", version=0)
        return Swapped(made=made, body=value.body, version=value.version)

    def _notify_checkpoint(
        self, command: NotifyCheckpoint, now: Instant, fact: Callable[[Event], None]
    ) -> Reply:
        job = self._job_of_notice(command)
        self.membership.runs.admit(job, command.run_id, command.run_generation)
        event = self.checkpoints.decide_notice(command, job, now)
        if event is None:
            return Accepted(reason="known already")
        fact(event)
        if isinstance(event, CheckpointFailed | CheckpointCompleted):
            _each(fact, self.incidents.decide_save(event, job, now))
        _each(fact, self.datasets.decide_epochs(job, self.membership, now))
        return Accepted(reason=event.reason)

    def _job_of_notice(self, command: NotifyCheckpoint) -> JobId:
        """That of the worker; or, where the agent of a machine has finished what its dead workers began, as it says: it speaks for a run
        that has started here, and the run's generation fences it."""
        if not command.is_by_agent:
            return self.membership.admit(
                command.worker_id, incarnation=command.incarnation, generation=command.generation
            ).spec.job_id
        if command.status != "completed" or not self.membership.runs.knows(command.job_id, command.run_id):
            raise Unknown(
                "run", command.run_id, hint="Agents report what they saved of a run that has started here."
            )
        return command.job_id

    def _reconcile(
        self, command: ReconcileCheckpoints, now: Instant, fact: Callable[[Event], None]
    ) -> Reconciled:
        job = self.membership.admit(command.worker_id, incarnation=command.incarnation).spec.job_id
        self.membership.runs.admit(job, command.run_id, command.run_generation)
        events, unknown = self.checkpoints.decide_reconcile(command, job, now)
        if command.revision != self.checkpoints.revision:
            return Reconciled(made=False, revision=self.checkpoints.revision, removed=0, unknown=())
        _each(fact, events)
        if events:
            _each(fact, self.datasets.decide_epochs(job, self.membership, now))
        removed = sum(1 for event in events if isinstance(event, CheckpointRemoved))
        return Reconciled(made=True, revision=self.checkpoints.revision, removed=removed, unknown=unknown)

    def _plan_epoch(self, command: PlanEpoch, now: Instant, fact: Callable[[Event], None]) -> Reply:
        member = self.membership.admit(
            command.worker_id, incarnation=command.incarnation, generation=command.generation
        )
        checks.between("epoch", command.epoch, 0, checks.SAMPLES_LIMIT)
        self.datasets.get_for(member.spec.job_id, command.dataset_id)
        key = (member.spec.job_id, command.dataset_id, command.epoch)
        moved = self.datasets.decide_plan(key, self.membership, now)
        if moved is not None:
            fact(moved)
        return Accepted(reason=self.datasets.plans[key].plan.reason)

    def _job_of(self, command: ReportFailure) -> JobId:
        """Whose workers they were: as they have registered, as the agent says, else as the launch is called."""
        if command.job_id is not None:
            return command.job_id
        ended = {(failure.host, str(failure.pid)) for failure in command.failures}
        for member in self.membership.members.values():
            if (member.spec.hostname, member.spec.metadata.get("pid", "")) in ended:
                return member.spec.job_id
        return JobId(command.launch) if command.launch else DEFAULT_JOB

    def _job_left(self, command: ReportHandover) -> JobId:
        """Whose workers they were: as the agent says, as the only ones there have registered, else as the launch is called."""
        if command.job_id is not None:
            return command.job_id
        there = {
            each.spec.job_id
            for each in self.membership.members.values()
            if each.spec.hostname == command.host
        }
        drain = self.drains.hosts.get(command.host)
        known = {*there, *(drain.asked.jobs if drain is not None else ())}
        if len(known) == 1:
            return known.pop()
        return JobId(command.launch) if command.launch else DEFAULT_JOB

    def _cost(self, job: JobId) -> Cost:
        """What a lost second and a lost step of the job mean, as far as its workers have said."""
        roster = self.membership.roster(job)
        reports = [report for worker in roster if (report := self.membership.reports.get(worker)) is not None]
        steps_s = sorted(s for report in reports if 0.0 < (s := report.metrics.get("step_time_s", 0.0)) < 1e6)
        saved = self.checkpoints.latest(job)
        return Cost(
            step=max((report.step for report in reports), default=0),
            saved_step=saved.step if saved is not None else None,
            step_s=steps_s[len(steps_s) // 2] if steps_s else 0.0,
            workers=len(roster),
            gpus_per_worker=max((self.membership.members[w].spec.gpu_count for w in roster), default=0),
        )

    # --- soft state in --------------------------------------------------------------------------------------

    def observe(self, observation: Observation, now: Instant) -> None:
        """Take it in. A refusal is raised before anything has changed."""
        match observation:
            case Heartbeat():
                self.membership.take_heartbeat(observation, now)
            case HeartbeatsFolded():
                self.membership.take_heartbeats(observation, now)
            case WorkerConnected():
                self.membership.take_connection(observation, now)
            case WorkerDisconnected():
                self.membership.take_disconnection(observation, now)
            case ProgressReported():
                self.datasets.take_progress(observation, self.membership)
            case ShardsRequested():
                self.datasets.take_request(observation)
            case StragglersMarked():
                self.membership.mark_stragglers(observation)
            case AgentConnected():
                self.presence.take_connection(observation, now)
            case AgentDisconnected():
                self.presence.take_disconnection(observation, now)
            case LoopStalled():
                self.membership.credit_stall(observation.stall_s, now)
                self.presence.credit_stall(observation.stall_s, now)
            case ClockResumed():
                self.membership.resume_clock(now)
                self.values.resume_clock(now)
                self.drains.resume_clock(now)
            case _:
                assert_never(observation)

    # --- events in ------------------------------------------------------------------------------------------

    def apply(self, event: Event, now: Instant) -> None:
        """Take in what was decided, now or before a restart."""
        match event:
            case WorkerJoined():
                self.membership.apply(event, now)
                self.datasets.dirty_jobs.add(event.spec.job_id)
            case WorkerFailed() | WorkerLeft() | WorkerForgotten():
                self.membership.apply(event, now)
                if not isinstance(event, WorkerForgotten):
                    self.datasets.dirty_jobs.add(event.job_id)
                for job in self.membership.forget_empty_jobs():
                    self.datasets.forget(job)
            case CountersRestored():
                self.membership.apply(event, now)
                self.values.restore(event.value_version, event.soft_value_version)
                self.checkpoints.revision = event.checkpoint_revision
                self.datasets.dirty_jobs.update(event.jobs)
            case DatasetRegistered():
                self.datasets.apply(event)
                self.datasets.dirty_jobs.update(self.membership.jobs())
            case ShardsMoved() | DatasetRemoved():
                self.datasets.apply(event)
            case BarrierArrived() | BarrierReleased() | BarrierBroken():
                self.barriers.apply(event)
            case CheckpointStarted() | CheckpointCompleted() | CheckpointFailed() | CheckpointRemoved():
                self._apply_checkpoint(event)
            case TaskCreated() | TaskChanged() | TaskProgressed():
                self.tasks.apply(event)
            case RecoveryRecorded():
                self.recoveries.apply(event)
            case IncidentReported() | IncidentClosed():
                self.incidents.apply(event)
            case HostQuarantined() | HostCleared():
                self.quarantine.apply(event)
            case HostDrainStarted() | HandoverRecorded() | HostDrained() | HostUndrained():
                self.drains.apply(event, now)
            case HostExamined():
                self.health.apply(event)
            case RecordsForgotten():
                self.tasks.forget(event.tasks)
                self.checkpoints.forget(event.checkpoints)
                self.barriers.forget(event.barriers)
            case ValueSwapped() | ValueRefreshed() | VersionsReserved() | ValueDropped():
                self.values.apply(event, now)
            case _:
                assert_never(event)

    def _apply_checkpoint(self, event: CheckpointEvent) -> None:
        """Shards have got as far as the checkpoint that a recovery would use says."""
        job = self.checkpoints.job_of(event)
        if isinstance(event, CheckpointCompleted):
            self.membership.runs.note(job, event.run_id, max(event.generation, event.told_in))
        elif not isinstance(event, CheckpointRemoved):
            self.membership.runs.note(job, event.run_id, event.generation)
        before = self.checkpoints.position(job)
        self.checkpoints.apply(event)
        after = self.checkpoints.position(job)
        if (before and before.checkpoint_id) != (after and after.checkpoint_id):
            self.datasets.commit(job, data_commit(after.data_json) if after is not None else None)

    @property
    def plans_are_stale(self) -> bool:
        return bool(self.datasets.dirty_jobs)

    def compact(self) -> list[Event]:
        """A short history that leads to this state: what a snapshot holds."""
        return list(self.compaction())

    def compaction(self) -> Iterator[Event]:
        """The same, to be drawn little by little while the state changes: what it was is held from now, which costs little,
        because what the parts hold is replaced and never changed."""
        counters = CountersRestored(
            generation=self.membership.generation,
            incarnation=self.membership.incarnation,
            jobs=dict(self.membership.job_generations),
            changes=dict(self.membership.job_changes),
            value_version=self.values.reserved,
            soft_value_version=self.values.soft_reserved,
            checkpoint_revision=self.checkpoints.revision,
            runs=self.membership.runs.compact(),
            departed=dict(self.membership.departed),
            reason="compacted history",
            at_s=0.0,
        )
        return chain(
            self.membership.compact(),
            self.datasets.compact(),
            self.barriers.compact(),
            self.checkpoints.compact(),
            self.tasks.compact(),
            self.recoveries.compact(),
            self.incidents.compact(),
            self.quarantine.compact(),
            self.drains.compact(),
            self.health.compact(),
            self.values.compact(),
            (counters,),
        )


def _each(fact: Callable[[Event], None], events: Iterable[Event]) -> None:
    for event in events:
        fact(event)
