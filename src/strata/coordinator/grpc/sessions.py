"""Who is connected, and everything the coordinator notifies them of.

The coordinator never calls a worker: news rides on the worker's own stream, or waits for its next heartbeat.
Each session has a bounded outbox; a worker that does not read loses its session, not the others their speed.
News about topology and plans is gathered for a moment, so that a thousand joins are not a million messages, and of news
that a slow reader has not read yet only the newest is kept. It is sent between two commits of the engine, never during
one: what workers are notified of has happened, whatever becomes of the coordinator.

Runs on the event loop, notified of every durable batch by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from strata.coordinator.auth.principals import Principal
from strata.coordinator.engine import Engine
from strata.coordinator.grpc.waits import Waits
from strata.core.messages import (
    BarrierBroken,
    BarrierReleased,
    Cause,
    DatasetId,
    Event,
    JobId,
    ShardsMoved,
    WorkerConnected,
    WorkerDisconnected,
    WorkerFailed,
    WorkerId,
    WorkerJoined,
    WorkerLeft,
)
from strata.rpc import coordinator_pb2 as pb

log = logging.getLogger("strata.coordinator.sessions")

OUTBOX_LIMIT = 1_000
GATHER_S = 0.05
STREAM_NEWS_S = 1 / 2_500
SESSION_NEWS_S = 1 / 50_000
"""While many join or leave, the next news wait so long for each stream, and each session, that has been notified, several times of what
that costs: joining is not to cost the square of how many join. One change after a quiet time waits for `GATHER_S` alone."""
TOPOLOGY = "topology"


class Outbox:
    """What waits to be sent on a stream: bounded. A peer that does not read loses the stream."""

    def __init__(self, reader: str) -> None:
        self._reader = reader
        """For the log."""
        self.over = ""
        """Why the stream has ended, once it has."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: deque[pb.CoordinatorMessage] = deque()
        self._news: dict[str, pb.CoordinatorMessage] = {}
        self._filled = asyncio.Event()

    @property
    def limit(self) -> int:
        return OUTBOX_LIMIT

    def notify(self, about: str, message: pb.CoordinatorMessage) -> None:
        """News, in place of what has not been read yet about the same."""
        self._news[about] = message
        self._filled.set()

    def push(self, message: pb.CoordinatorMessage) -> None:
        """An answer, which none replaces."""
        if len(self._outbox) >= self.limit:
            if not self.over:
                log.warning("ending the session of %s, which does not read its messages", self._reader)
            self.end("it does not read its messages")
            return
        self._outbox.append(message)
        self._filled.set()

    def end(self, why: str) -> None:
        self.over = self.over or why
        if not self.ended.done():
            self.ended.set_result(None)
        self._filled.set()

    async def next_messages(self) -> list[pb.CoordinatorMessage]:
        """What there is to say, once there is something; empty when the stream is over and all is said."""
        while not (messages := self._take()) and not self.over:
            self._filled.clear()
            await self._filled.wait()
        return messages

    def _take(self) -> list[pb.CoordinatorMessage]:
        messages = [*self._news.values(), *self._outbox]
        self._news.clear()
        self._outbox.clear()
        return messages


class WorkerSession(Outbox):
    """One worker's stream, seen from the coordinator."""

    is_shared = False
    """Whether it rides on the stream of its machine."""

    def __init__(self, worker_id: WorkerId, incarnation: int, job_id: JobId) -> None:
        super().__init__(f"'{worker_id}'")
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.job_id = job_id
        self.caller: Principal | None = None
        """Who opened it."""

    def notify_topology(self, generation: int, rank: int, world_size: int, reason: str) -> None:
        topology = pb.Topology(generation=generation, rank=rank, world_size=world_size, reason=reason)
        self.notify(TOPOLOGY, pb.CoordinatorMessage(topology=topology))


class StreamOfMany(Protocol):
    """A machine's stream, which the sessions of its workers ride on."""

    caller: Principal

    def end(self, why: str) -> None: ...


class Sessions:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cluster = engine.cluster
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self.machines: set[StreamOfMany] = set()
        self.waits = Waits()
        self._changed_jobs: dict[JobId, str] = {}
        self._changed_plans: dict[tuple[JobId, DatasetId], pb.PlanChanged] = {}
        self._flush: asyncio.TimerHandle | None = None
        self._is_overdue = False
        self._next_news_s = 0.0
        """By the loop's clock: not before this."""

    def __len__(self) -> int:
        return len(self._sessions)

    # --- coming and going -----------------------------------------------------------------------------------

    def open(
        self,
        worker_id: WorkerId,
        incarnation: int,
        make: Callable[[WorkerId, int, JobId], WorkerSession] = WorkerSession,
    ) -> WorkerSession:
        """A session for a member that has just been admitted; it replaces an older one of the same worker."""
        older = self._sessions.get(worker_id)
        if older is not None:
            older.end("a newer stream of the same worker replaced it")
        job = self._cluster.membership.members[worker_id].spec.job_id
        session = self._sessions[worker_id] = make(worker_id, incarnation, job)
        self._engine.observe(WorkerConnected(worker_id=worker_id, incarnation=incarnation))
        self._notify_topology(session, "connected")
        return session

    def close(self, session: WorkerSession) -> None:
        """The stream has ended. Without a goodbye its worker is suspect from now on."""
        session.end("its stream ended")
        self.waits.close_all(session.worker_id, owner=session)
        if self._sessions.get(session.worker_id) is session:
            del self._sessions[session.worker_id]
            self._engine.observe(
                WorkerDisconnected(worker_id=session.worker_id, incarnation=session.incarnation)
            )

    def end_revoked(self, still_counts: Callable[[Principal], bool]) -> None:
        """Ends the sessions of callers whose credential was taken away or has expired."""
        callers = {session.caller for session in self._sessions.values() if session.caller is not None}
        revoked = {caller for caller in callers if not still_counts(caller)}
        why = "its credential was revoked or has expired"
        for machine in [each for each in self.machines if not still_counts(each.caller)]:
            machine.end(why)
        for session in list(self._sessions.values()):
            if session.caller in revoked:
                session.end(why)

    def end_all(self, why: str) -> None:
        for machine in self.machines:
            machine.end(why)
        for session in list(self._sessions.values()):
            session.end(why)

    # --- news -----------------------------------------------------------------------------------------------

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BarrierReleased() | BarrierBroken():
                    self.waits.ended(event)
                case WorkerJoined():
                    if event.superseded:
                        # One that a retry of its own registration replaced may register again.
                        cause: Cause = "superseded" if event.superseded < event.origin else "failed"
                        self._fence(event.spec.worker_id, event.superseded, event.reason, cause)
                    self._gather_topology(event.spec.job_id, event.reason)
                case WorkerFailed():
                    reason = f"declared failed: {event.reason}"
                    self._fence(event.worker_id, event.incarnation, reason, "failed")
                    self._gather_topology(event.job_id, f"'{event.worker_id}' failed: {event.reason}")
                case WorkerLeft():
                    session = self._sessions.get(event.worker_id)
                    if session is not None:
                        session.push(pb.CoordinatorMessage(goodbye=pb.Goodbye(reason=event.reason)))
                        session.end("the worker said goodbye")
                    self._gather_topology(event.job_id, f"'{event.worker_id}' left: {event.reason}")
                case ShardsMoved():
                    self._changed_plans[(event.job_id, event.dataset_id)] = pb.PlanChanged(
                        dataset_id=event.dataset_id, plan_version=event.version, reason=event.reason
                    )
                    self._schedule()
                case _:
                    pass  # Workers need not know of the rest.
        if self._is_overdue:
            self._notify()

    def _fence(self, worker_id: WorkerId, incarnation: int, reason: str, cause: Cause) -> None:
        session = self._sessions.get(worker_id)
        if session is not None and session.incarnation == incarnation:
            session.push(pb.CoordinatorMessage(stale=pb.Stale(reason=reason, cause=cause)))
            session.end(reason)
            self._sessions.pop(worker_id, None)  # Of a machine's stream it has closed itself.

    def _gather_topology(self, job: JobId, reason: str) -> None:
        self._changed_jobs[job] = reason
        self._schedule()

    def _schedule(self) -> None:
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_at(max(loop.time() + GATHER_S, self._next_news_s), self._notify)

    def _notify(self) -> None:
        self._is_overdue = not self._engine.is_settled
        if self._is_overdue:
            return  # `committed` is called as soon as the rest is durable.
        self._flush = None
        # One stream each, but for those of a machine, which share one.
        streams = len(self.machines) + sum(1 for each in self._sessions.values() if not each.is_shared)
        pause_s = streams * STREAM_NEWS_S + len(self._sessions) * SESSION_NEWS_S
        self._next_news_s = asyncio.get_running_loop().time() + pause_s
        jobs, self._changed_jobs = self._changed_jobs, {}
        plans, self._changed_plans = self._changed_plans, {}
        plan_messages: dict[JobId, list[tuple[str, pb.CoordinatorMessage]]] = {}
        for (job, dataset), plan in plans.items():
            news = (f"plan of {dataset}", pb.CoordinatorMessage(plan=plan))
            plan_messages.setdefault(job, []).append(news)
        membership = self._cluster.membership
        changed = {
            job: (membership.roster(job), membership.job_generations.get(job, 0), reason)
            for job, reason in jobs.items()
        }
        for session in list(self._sessions.values()):
            if session.job_id in changed:
                roster, generation, reason = changed[session.job_id]
                session.notify_topology(generation, roster.get(session.worker_id, 0), len(roster), reason)
            for about, message in plan_messages.get(session.job_id, ()):
                session.notify(about, message)

    def _notify_topology(self, session: WorkerSession, reason: str) -> None:
        membership = self._cluster.membership
        roster = membership.roster(session.job_id)
        generation = membership.job_generations[session.job_id]
        session.notify_topology(generation, roster.get(session.worker_id, 0), len(roster), reason)
