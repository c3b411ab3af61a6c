"""The `Session` stream of a machine: its agent speaks for its workers, each of which is a member of the stream.

To the rest of the coordinator each member is a session like any other: it is admitted by its own incarnation, replaced by a newer
session of the same worker, fenced when its incarnation ends, and lost when its agent says so or the stream ends. What concerns many
of them is one message: heartbeats, arrivals at a barrier and how it ended, a new generation. What members are sent waits in one
bounded outbox; a machine that does not read loses its stream, not the others their speed. `core.fleet.multiplexer` is the other end.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.engine import Engine, Unavailable
from strata.coordinator.grpc.middleware import Context, barrier_text, next_message
from strata.coordinator.grpc.sessions import OUTBOX_LIMIT, Outbox, Sessions, WorkerSession
from strata.coordinator.grpc.waits import WAITS_PER_WORKER, Outcome, Wait
from strata.coordinator.metrics.instruments import CoordinatorMetrics
from strata.core.fleet.multiplexer import MAX_MEMBERS
from strata.core.messages import (
    BarrierTickets,
    HeartbeatsFolded,
    InvalidArgument,
    JobId,
    Overloaded,
    Refused,
    Reply,
    Stale,
    Unknown,
    WorkerId,
)
from strata.core.pauses import Pace
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import wire

log = logging.getLogger("strata.coordinator.machines")

MEMBERS_PER_MESSAGE = 20
"""So many members in one message weigh as much as a message."""

Call = tuple[int, bytes, int]
"""Member, call id, and the place among those who arrived."""
_numbers = itertools.count(1)


class MemberSession(WorkerSession):
    """A worker whose session rides on the stream of its machine."""

    is_shared = True

    def __init__(
        self, machine: MachineSession, member: int, worker_id: WorkerId, incarnation: int, job_id: JobId
    ) -> None:
        super().__init__(worker_id, incarnation, job_id)
        self.machine = machine
        self.member = member
        self.caller = machine.caller

    def notify(self, about: str, message: pb.CoordinatorMessage) -> None:
        own = pb.CoordinatorMessage(member=self.member)
        own.MergeFrom(message)  # The same message may be for many.
        self.machine.notify(f"{self.member} {about}", own)

    def notify_topology(self, generation: int, rank: int, world_size: int, reason: str) -> None:
        self.machine.notify_topology(self, generation, rank, world_size, reason)

    def push(self, message: pb.CoordinatorMessage) -> None:
        message.member = self.member
        self.machine.push(message)

    def end(self, why: str) -> None:
        if not self.over:
            super().end(why)
            self.machine.member_ended(self)


class MachineSession(Outbox):
    """One machine's stream, seen from the coordinator."""

    def __init__(self, host: str, caller: Principal, sessions: Sessions) -> None:
        super().__init__(f"machine '{host}'")
        self.host = host
        self.caller = caller
        self.holder = WorkerId(f"machine {next(_numbers)}")
        """Among those who wait at barriers."""
        self.members: dict[int, MemberSession] = {}
        self.last_member = 0
        self._sessions = sessions
        self._topologies: dict[JobId, pb.Topologies] = {}

    @property
    def limit(self) -> int:
        return OUTBOX_LIMIT + len(self.members)

    def notify_topology(
        self, session: MemberSession, generation: int, rank: int, world_size: int, reason: str
    ) -> None:
        """One message for all members of a job, as long as it says the same of each but the rank."""
        folded = self._topologies.get(session.job_id)
        if folded is None or folded.topology.generation != generation:
            topology = pb.Topology(generation=generation, world_size=world_size, reason=reason)
            folded = self._topologies[session.job_id] = pb.Topologies(topology=topology)
        folded.members.append(session.member)
        folded.ranks.append(rank)
        self._filled.set()

    def member_ended(self, session: MemberSession) -> None:
        """Fenced, replaced, or it has left: its agent is notified, after all that was said to it before."""
        if self.members.pop(session.member, None) is None:
            return
        if not self.over:
            self.push(pb.CoordinatorMessage(member=session.member, detach=pb.Detach()))
        self._sessions.close(session)

    def close(self) -> None:
        """The stream has ended: members that do not come back, on another stream, are lost."""
        self.end("its stream ended")
        self._sessions.waits.close_all(self.holder, owner=self)
        for session in list(self.members.values()):
            session.end("the stream of its machine ended")

    def _take(self) -> list[pb.CoordinatorMessage]:
        topologies = [pb.CoordinatorMessage(topologies=each) for each in self._topologies.values()]
        self._topologies.clear()
        return [*topologies, *super()._take()]


class Machines:
    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        metrics: CoordinatorMetrics,
        take: Callable[[WorkerSession, pb.WorkerMessage], Awaitable[int]],
        *,
        messages_per_second: int,
        burst_s: float,
        welcome: Callable[[], pb.Welcome],
    ) -> None:
        """`take` handles what one worker says for itself, and returns its weight."""
        self._engine = engine
        self._sessions = sessions
        self._metrics = metrics
        self._take_own = take
        self._messages_per_second = messages_per_second
        self._burst_s = burst_s
        self._welcome = welcome

    def open(self, hello: pb.MachineHello, caller: Principal) -> MachineSession:
        self._metrics.request("Session.machine")
        machine = MachineSession(hello.host, caller, self._sessions)
        self._sessions.machines.add(machine)
        machine.push(pb.CoordinatorMessage(welcome=self._welcome()))
        return machine

    def close(self, machine: MachineSession) -> None:
        self._sessions.machines.discard(machine)
        machine.close()

    async def read(self, machine: MachineSession, context: Context) -> None:
        pace, weight = Pace(), 0
        while not machine.over:
            message = await next_message(context)
            if message is None:
                return
            weight += await self._take(machine, message)
            share = self._messages_per_second * max(1, len(machine.members))
            if weight >= share * self._burst_s:
                # Back-pressure for a machine that sends more in a moment than its workers may.
                await asyncio.sleep(pace.take(weight / share, time.monotonic()))
                weight = 0

    async def _take(self, machine: MachineSession, message: pb.WorkerMessage) -> int:
        match message.WhichOneof("body"):
            case "beats":
                self._metrics.request("Session.beats")
                self._beat(machine, message.beats)
                return 1 + len(message.beats.members) // MEMBERS_PER_MESSAGE
            case "arrivals":
                self._metrics.request("Session.arrivals")
                self._arrive(machine, message.arrivals)
                return 1 + len(message.arrivals.members) // MEMBERS_PER_MESSAGE
            case "attach":
                self._metrics.request("Session.attach")
                await self._attach(machine, message.member, message.attach)
            case "detach":
                self._metrics.request("Session.detach")
                session = machine.members.pop(message.member, None)
                if session is not None:
                    session.over = "its connection to its agent ended"
                    self._sessions.close(session)
            case "hello" | "machine":
                raise InvalidArgument(
                    "message", "was sent twice.", hint="Open a stream for each worker or machine."
                )
            case _:
                return await self._take_for(machine, message)
        return 1

    async def _take_for(self, machine: MachineSession, message: pb.WorkerMessage) -> int:
        session = machine.members.get(message.member)
        if session is None:
            return 1  # Its session has ended, and its agent does not know yet.
        try:
            return await self._take_own(session, message)
        except (Stale, Unknown):
            return 1  # It is fenced as soon as that is durable.

    async def _attach(self, machine: MachineSession, number: int, attach: pb.Attach) -> None:
        if number <= machine.last_member:
            raise InvalidArgument(
                "member", f"{number} was used on this stream before.", hint="Count upwards from 1."
            )
        machine.last_member = number
        cluster = await self._engine.settled()
        worker_id = WorkerId(attach.worker_id)
        try:
            if len(machine.members) >= MAX_MEMBERS:
                raise Overloaded(f"This stream has {MAX_MEMBERS:,} members.", hint="Open another.")
            machine.caller.require_incarnation(attach.incarnation)
            member = cluster.membership.admit(worker_id, incarnation=attach.incarnation)
            machine.caller.require_job(member.spec.job_id)
        except (Refused, Forbidden) as refusal:
            # One that is refused does not cost the others their stream: it alone is told why.
            if isinstance(refusal, Stale | Unknown):
                answer = wire.stale(refusal)
            else:
                answer = pb.CoordinatorMessage(detach=pb.Detach())
            answer.member = number
            machine.push(answer)
            return
        session = self._sessions.open(
            worker_id,
            member.incarnation,
            lambda *who: machine.members.setdefault(number, MemberSession(machine, number, *who)),
        )
        session.push(pb.CoordinatorMessage(welcome=self._welcome()))

    def _beat(self, machine: MachineSession, beats: pb.Beats) -> None:
        reports = {report.member: report for report in beats.reports}
        members = machine.members
        folded = [
            wire.folded_beat(session.worker_id, session.incarnation, reports.get(number))
            for number in beats.members[:MAX_MEMBERS]
            if (session := members.get(number)) is not None
        ]
        if folded:
            self._engine.observe(HeartbeatsFolded(beats=tuple(folded)))

    # --- barriers -------------------------------------------------------------------------------------------

    def _arrive(self, machine: MachineSession, message: pb.Arrivals) -> None:
        request = message.barrier
        callers = [
            (number, call_id)
            for number, call_id in zip(message.members, message.call_ids, strict=False)
            if number in machine.members
        ]
        if not callers:
            return
        sessions = [(machine.members[number], call_id) for number, call_id in callers]
        command = wire.arrive_together(
            request, [(session.worker_id, session.incarnation, call_id) for session, call_id in sessions]
        )

        def answered(reply: Reply | StrataError) -> None:
            if isinstance(reply, BarrierTickets):
                self._wait(machine, request, callers, reply)
            elif isinstance(reply, Unavailable):
                not_now(reply)
            else:
                assert isinstance(reply, StrataError)
                self._refuse(machine, callers, reply)

        def not_now(refusal: Unavailable) -> None:
            # The agent comes back, to the coordinator that leads then, and its workers arrive again.
            machine.end(str(refusal))

        try:
            self._engine.post(command, answered)
        except Unavailable as refusal:
            not_now(refusal)

    def _wait(
        self,
        machine: MachineSession,
        request: pb.WaitBarrierRequest,
        callers: list[tuple[int, bytes]],
        reply: BarrierTickets,
    ) -> None:
        """One wait for all who are in the same round."""
        rounds: dict[int, tuple[Wait, list[Call]]] = {}
        for (number, call_id), ticket in zip(callers, reply.tickets, strict=True):
            if isinstance(ticket, Refused):
                self._refuse(machine, [(number, call_id)], ticket)
            elif ticket.outcome is not None:
                self._tell(machine, request, [(number, call_id, ticket.order)], ticket.outcome)
            elif ticket.round in rounds:
                rounds[ticket.round][1].append((number, call_id, ticket.order))
            else:
                calls: list[Call] = [(number, call_id, ticket.order)]
                at_most = WAITS_PER_WORKER * max(1, len(machine.members))
                try:
                    wait = self._sessions.waits.open(
                        machine.holder, self._deliver(machine, request, calls), owner=machine, at_most=at_most
                    )
                except Overloaded as refusal:
                    self._refuse(machine, [(number, call_id)], refusal)
                    continue
                rounds[ticket.round] = (wait, calls)
                wait.begin(ticket)
        if machine.over:
            self._sessions.waits.close_all(machine.holder, owner=machine)

    def _deliver(
        self, machine: MachineSession, request: pb.WaitBarrierRequest, calls: list[Call]
    ) -> Callable[[Outcome, int], None]:
        return lambda outcome, _: self._tell(machine, request, calls, outcome)

    @staticmethod
    def _tell(
        machine: MachineSession, request: pb.WaitBarrierRequest, calls: list[Call], ended: Outcome
    ) -> None:
        message = pb.CoordinatorMessage()
        batch = message.outcomes
        batch.outcome.outcome.CopyFrom(wire.barrier_outcome(ended, 0))
        outcome = batch.outcome.outcome
        if not outcome.released:
            outcome.reason = barrier_text(request, outcome.reason)
            batch.outcome.error_code = "barrier_broken"
        for number, call_id, order in calls:
            batch.members.append(number)
            batch.call_ids.append(call_id)
            batch.orders.append(order)
        machine.push(message)

    @staticmethod
    def _refuse(machine: MachineSession, callers: list[tuple[int, bytes]], refusal: StrataError) -> None:
        message = pb.CoordinatorMessage()
        batch = message.outcomes
        batch.outcome.outcome.reason = str(refusal)
        batch.outcome.error_code = refusal.code
        batch.outcome.error_cause = refusal.cause if isinstance(refusal, Refused) else ""
        batch.members.extend(number for number, _ in callers)
        batch.call_ids.extend(call_id for _, call_id in callers)
        batch.orders.extend(0 for _ in callers)
        machine.push(message)
