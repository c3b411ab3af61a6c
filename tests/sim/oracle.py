"""What must hold, checked from outside: a second, much simpler account of the fleet, kept from facts alone.

* I4: a barrier never releases early, never twice, and tells each call one thing only.
* I5: nothing from a stale incarnation or generation takes effect, and nobody is called stale who is not.
* I6: whatever was acknowledged is there after any crash.
* Nobody is called superseded whose place no other process has taken, so that one of them always continues.
* Once a run has told which of its checkpoints exist, no other one is called completed; none that exists is called
  removed, however late the word of it is.
* A process whose end an agent has reported is in exactly one incident, for ever, and no other process is blamed there that was
  only lost; a run has at most one incident that is open, and none that was known when a recovery was reported.
* Nothing is forgotten of what a recovery can use.
* Every unfinished shard of every plan has exactly one owner, who is present; a new plan is even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.core.cluster import Cluster
from strata.core.fleet.datasets import shard_sizes
from strata.core.messages import (
    ArriveAtBarrier,
    BarrierArrived,
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CheckpointRemoved,
    Command,
    Event,
    IncidentClosed,
    IncidentReported,
    JobId,
    NotifyCheckpoint,
    ReconcileCheckpoints,
    RecordsForgotten,
    Refused,
    RegisterDataset,
    Registered,
    ReportFailure,
    ReportRecovery,
    ShardsMoved,
    Stale,
    WorkerFailed,
    WorkerForgotten,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)

Key = tuple[JobId, str, int]
Outcome = BarrierReleased | BarrierBroken


class Violation(AssertionError):
    """An invariant does not hold."""


def must(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclass
class Account:
    """Who is in, by the facts; and what is open at each barrier since this boot."""

    incarnations: dict[WorkerId, int] = field(default_factory=dict)
    """Of everyone who is present."""
    jobs: dict[WorkerId, JobId] = field(default_factory=dict)
    generations: dict[JobId, int] = field(default_factory=dict)
    registrations: dict[WorkerId, str] = field(default_factory=dict)
    """The newest of everyone who was ever there."""
    joined_in: dict[WorkerId, int] = field(default_factory=dict)
    """How many had registered in all when it first sat down."""
    registered: int = 0
    opened_at: dict[Key, int] = field(default_factory=dict)
    """How many had registered in all when the open round of a barrier began."""

    def take(self, event: Event) -> None:
        match event:
            case WorkerJoined():
                worker = event.spec.worker_id
                self.registered = max(self.registered, event.incarnation)
                self.incarnations[worker] = event.incarnation
                self.registrations[worker] = event.registration_id
                self.jobs[worker] = event.spec.job_id
                if not event.superseded:
                    self.joined_in[worker] = event.incarnation
                self._changed(event.spec.job_id, event.generation)
            case WorkerFailed() | WorkerLeft():
                self.incarnations.pop(event.worker_id, None)
                self._changed(event.job_id, event.generation)
            case WorkerForgotten():
                self.incarnations.pop(event.worker_id, None)
            case BarrierArrived():
                self.opened_at.setdefault((event.job_id, event.barrier_id, event.step), self.registered)
            case BarrierReleased() | BarrierBroken():
                self.opened_at.pop((event.job_id, event.barrier_id, event.step), None)
            case _:
                pass

    def _changed(self, job: JobId, generation: int) -> None:
        self.generations[job] = generation

    def roster(self, job: JobId) -> set[WorkerId]:
        return {worker for worker in self.incarnations if self.jobs[worker] == job}


class Oracle:
    def __init__(self, existing: Callable[[], set[str]]) -> None:
        self.existing = existing
        """Which checkpoints are in the store."""
        self.may_exist = existing
        """Those too that may be there, and that nobody is sure of."""
        self.account = Account()
        self._calls: dict[str, ArriveAtBarrier] = {}
        self._told: dict[str, str] = {}
        self._incarnations: set[int] = set()
        self._acknowledged_incarnation = 0
        self._checkpoints: set[str] = set()
        self.forgotten = 0
        self._run_generations: dict[str, int] = {}
        """The newest of the run that a checkpoint was acknowledged for."""
        self._datasets: set[str] = set()
        self._ended: set[tuple[str, int]] = set()
        """Processes whose end was reported, and acknowledged."""
        self.incidents = 0
        self.releases = 0
        self.breaks = 0
        self.stale = 0
        self.storage_refusals = 0

    # --- decisions ------------------------------------------------------------------------------------------

    def decided(self, command: Command, events: Sequence[Event]) -> None:
        self._must_be_current(command)
        if isinstance(command, ArriveAtBarrier):
            self._calls[command.call_id] = command
        if isinstance(command, ReconcileCheckpoints):
            found = {event.checkpoint_id for event in events if isinstance(event, CheckpointCompleted)}
            must(found <= set(command.present), f"{found} are found again, and {command} does not list them")
        self._take_all(events)

    def decided_together(self, accepted: Sequence[ArriveAtBarrier], events: Sequence[Event]) -> None:
        """Arrivals that one machine reported in one message, less those that were refused."""
        for arrival in accepted:
            self._must_be_current(arrival)
            self._calls[arrival.call_id] = arrival
        self._take_all(events)

    def _take_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BarrierReleased):
                self._check_release(event)
            if isinstance(event, WorkerJoined):
                must(
                    event.incarnation > self._acknowledged_incarnation, f"I6: {event} repeats an incarnation"
                )
            if isinstance(event, CheckpointRemoved):
                must(event.checkpoint_id not in self.existing(), f"{event} is in the store")
            if isinstance(event, CheckpointCompleted) and event.reason == "found again":
                must(event.checkpoint_id in self.may_exist(), f"{event} is not in the store")
            if isinstance(event, RecordsForgotten):
                lost = self._checkpoints & self.existing() & set(event.checkpoints)
                must(not lost, f"{lost} exist and are forgotten")
                self._checkpoints -= set(event.checkpoints)
                self.forgotten += len(event.checkpoints) + event.barriers
            self.account.take(event)

    def _must_be_current(self, command: Command) -> None:
        worker, incarnation = getattr(command, "worker_id", None), getattr(command, "incarnation", 0)
        if worker is None:
            return
        current = self.account.incarnations.get(worker)
        must(current is not None, f"I5: {worker} is no member, yet {command} took effect")
        must(incarnation in (0, current), f"I5: {command} took effect; the incarnation is {current}")
        generation = self.account.generations[self.account.jobs[worker]]
        said = getattr(command, "generation", 0)
        must(said in (0, generation), f"I5: {command} took effect; the generation is {generation}")
        newest = self._run_generations.get(getattr(command, "run_id", ""), 0)
        said = getattr(command, "run_generation", newest)
        must(said >= newest, f"I5: {command} took effect in run generation {newest}")

    def refused(self, command: Command, refusal: Refused) -> None:
        if not isinstance(refusal, Stale):
            return
        self.stale += 1
        worker = getattr(command, "worker_id", None)
        if worker is None or worker not in self.account.incarnations:
            return
        current = getattr(command, "incarnation", 0) in (0, self.account.incarnations[worker])
        generation = self.account.generations[self.account.jobs[worker]]
        current = current and getattr(command, "generation", 0) in (0, generation)
        current = current and refusal.cause != "run_generation"
        must(not current, f"I5: {worker} is up to date and was called stale: {refusal}")

    def superseded(self, worker: WorkerId, *, born: str) -> None:
        """A process ends because it was told that another one has its place."""
        newest = self.account.registrations[worker]
        must(not newest.startswith(f"{born}-"), f"{worker} was superseded by nobody but itself ({newest})")

    def reconciled(self, cluster: Cluster, command: ReconcileCheckpoints) -> None:
        records = [r for r in cluster.checkpoints.records.values() if r.run_id == command.run_id]
        shown = {r.checkpoint_id for r in records if r.status == "completed" and not r.removed}
        extra = shown - set(command.present)
        must(not extra, f"the registry shows {extra}, which do not exist any more")

    def recovered(self, cluster: Cluster, command: ReportRecovery) -> None:
        job = self.account.jobs[command.worker_id]
        incidents = [i for i in cluster.incidents.records.values() if i.reported.job_id == job]
        still_open = [incident for incident in incidents if incident.is_open and incident.is_about_run]
        must(not still_open, f"a recovery was reported, and open is {still_open}")

    def _check_incidents(self, cluster: Cluster) -> None:
        found: dict[tuple[str, int], int] = {}
        seen_ends: set[tuple[str, int]] = set()
        open_jobs: list[JobId] = []
        for number, incident in cluster.incidents.records.items():
            known = incident.reported
            if known.subject != "run":
                continue
            open_jobs += [known.job_id] if incident.is_open else []
            for failure in known.failures:
                process = (failure.host, failure.pid)
                if failure.pid:
                    must(process not in found, f"{process} is in incidents {found.get(process)} and {number}")
                    found[process] = number
                    seen_ends |= {process} if failure.exit_code is not None else set()
            seen = any(failure.exit_code is not None for failure in known.failures)
            blamed = known.first is not None and known.first.exit_code is not None
            must(blamed or not seen, f"{known} blames one that was only lost")
        must(len(open_jobs) == len(set(open_jobs)), f"several incidents of {open_jobs} are open")
        must(self._ended <= seen_ends, f"no incident says how {self._ended - seen_ends} ended")
        self.incidents = max(self.incidents, len(cluster.incidents.records))

    # --- barriers -------------------------------------------------------------------------------------------

    def _check_release(self, event: BarrierReleased) -> None:
        self.releases += 1
        key = (event.job_id, event.barrier_id, event.step)
        must(len(set(event.arrived)) == len(event.arrived), f"I4: somebody counts twice in {event}")
        for worker, call_id in zip(event.arrived, event.call_ids, strict=True):
            call = self._calls[call_id]
            must(
                (call.worker_id, call.barrier_id, call.step) == (worker, *key[1:]),
                f"I4: {call} is not for {event}",
            )
            must(
                call_id not in self._told,
                f"I4: {call_id} was told '{self._told.get(call_id)}', then counted again",
            )
            present = self.account.incarnations.get(worker)
            must(
                call.incarnation == present, f"I5: {call} counts in {event}, but the incarnation is {present}"
            )
            expected = call.expected
            must(expected in (0, len(event.arrived)), f"I4: {call} expected {expected} in {event}")
        opened_at = self.account.opened_at.get(key, self.account.registered)
        if all(not self._calls[call_id].expected for call_id in event.call_ids):
            early = [
                worker
                for worker in self.account.roster(event.job_id) - set(event.arrived)
                if self.account.joined_in[worker] <= opened_at
            ]
            must(not early, f"I4: released before {early} had come: {event}")

    def told(self, call: ArriveAtBarrier, outcome: Outcome) -> None:
        """A caller is told how its barrier ended."""
        word = _word(outcome)
        before = self._told.setdefault(call.call_id, word)
        must(before == word, f"I4: {call.call_id} was told '{before}' and then '{word}'")
        self.breaks += word == "broken"
        if word == "released":
            must(
                call.call_id in outcome.call_ids,
                f"I4: {call} was released by {outcome}, which does not count it",
            )

    # --- plans ----------------------------------------------------------------------------------------------

    def settled(self, cluster: Cluster, events: Iterable[Event]) -> None:
        """After every batch, before it is written."""
        kinds = (WorkerJoined, WorkerFailed, WorkerLeft, ShardsMoved, CheckpointCompleted)
        if any(isinstance(event, IncidentReported | IncidentClosed) for event in events):
            self._check_incidents(cluster)
        changed = [event for event in events if isinstance(event, kinds)]
        if not changed:
            return
        planned = {(e.job_id, e.dataset_id, e.epoch) for e in changed if isinstance(e, ShardsMoved)}
        for key, entry in cluster.datasets.plans.items():
            roster = sorted(self.account.roster(key[0]))
            must(
                list(entry.plan.workers) == roster,
                f"{key} is planned for {entry.plan.workers}, not for {roster}",
            )
            sizes, done = shard_sizes(cluster.datasets.specs[key[1]]), cluster.datasets.done(key)
            unfinished = done < sizes if done is not None else sizes > 0
            owners = entry.plan.owners[unfinished]
            if roster:
                must(
                    bool(((owners >= 0) & (owners < len(roster))).all()),
                    f"{key}: an unfinished shard has no owner",
                )
                counts = entry.plan.counts(unfinished)
                if key in planned:
                    must(int(counts.max() - counts.min()) <= 1, f"{key} is uneven: {counts}")

    # --- acknowledgements and crashes -----------------------------------------------------------------------

    def acknowledged(self, command: Command, answer: Any) -> None:
        if isinstance(answer, Registered):
            self._acknowledged_incarnation = max(self._acknowledged_incarnation, answer.incarnation)
        elif isinstance(command, NotifyCheckpoint) and command.status == "completed":
            self._checkpoints.add(command.checkpoint_id)
            newest = self._run_generations.get(command.run_id, 0)
            self._run_generations[command.run_id] = max(newest, command.run_generation)
        elif isinstance(command, ReportFailure):
            self._ended |= {(failure.host, failure.pid) for failure in command.failures}
        elif isinstance(command, RegisterDataset):
            self._datasets.add(command.spec.dataset_id)

    def restarted(self, cluster: Cluster) -> None:
        known = {c.checkpoint_id for c in cluster.checkpoints.records.values() if c.status == "completed"}
        must(self._checkpoints <= known, f"I6: lost checkpoints {self._checkpoints - known}")
        self._check_incidents(cluster)
        must(self._datasets <= set(cluster.datasets.specs), "I6: lost a dataset")
        counted = cluster.membership.incarnation
        must(counted >= self._acknowledged_incarnation, "I6: an incarnation would be given out again")
        for outcome in cluster.barriers.ended.values():
            for call_id in outcome.call_ids:
                said = self._told.get(call_id, _word(outcome))
                must(said == _word(outcome), f"I6: {call_id} was told otherwise than {outcome}")
        self._rebuild(cluster)

    def _rebuild(self, cluster: Cluster) -> None:
        """The account goes back to what is durable, as the coordinator does."""
        membership = cluster.membership
        account = self.account = Account(registered=membership.incarnation)
        for worker, member in membership.members.items():
            account.jobs[worker] = member.spec.job_id
            account.registrations[worker] = member.registration_id
            account.joined_in[worker] = member.seat
            if member.present:
                account.incarnations[worker] = member.incarnation
        account.registrations |= {worker: known[-1] for worker, known in membership.departed.items()}
        account.generations = dict(membership.job_generations)

    def same(self, one: Cluster, other: Cluster) -> None:
        try:
            is_same = one.compact() == other.compact()
        except LookupError as error:
            raise Violation(f"I6: the state cannot be told as a history: {error}") from error
        must(is_same, "I6: the journal leads to another state than the one that was")


def _word(outcome: Outcome) -> str:
    return "released" if isinstance(outcome, BarrierReleased) else "broken"
