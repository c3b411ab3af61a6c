"""The `Presence` stream: each agent of a rendezvous holds one, and learns at once who is lost and that something has changed.

`core.fleet.presence` decides who is lost; this reads and writes the streams. A notice says what holds now, so one that was not
read yet is replaced by the next. Losses are announced with the engine's next tick; changes of the shared value once they are
durable, gathered where there are many agents: all notices of a rendezvous together are no more than `NOTICES_PER_S`.

Runs on the event loop, notified of every durable batch by the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.engine import Engine
from strata.coordinator.grpc.middleware import Context, GrpcAccess, next_message, own_key, read_hello, refuse
from strata.core.messages import (
    AgentConnected,
    AgentDisconnected,
    Event,
    HostDrainStarted,
    HostQuarantined,
    HostUndrained,
    InvalidArgument,
    ValueSwapped,
)
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb

log = logging.getLogger("strata.coordinator.presence")

NOTICES_PER_S = 5_000
"""About changes of one rendezvous, to all of its agents together."""


class AgentStream:
    """One agent's stream, seen from the coordinator."""

    def __init__(self, key: str, node: str, host: str, caller: Principal) -> None:
        self.key = key
        self.node = node
        self.host = host
        self.leave = ""
        """Why its agent is to leave."""
        self.leave_by_s: float | None = None
        """By the event loop's clock, where its machine goes then."""
        self.caller = caller
        self.said_goodbye = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._notice: pb.PresenceNotice | None = None
        self._filled = asyncio.Event()

    def notify(self, notice: pb.PresenceNotice) -> None:
        if self.leave:
            within_s: float | None = None
            if self.leave_by_s is not None:
                within_s = max(0.0, self.leave_by_s - asyncio.get_running_loop().time())
            notice = pb.PresenceNotice(
                version=notice.version, lost=notice.lost, leave=self.leave, within_s=within_s
            )
        self._notice = notice
        self._filled.set()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def next_notice(self) -> pb.PresenceNotice:
        while self._notice is None:
            self._filled.clear()
            await self._filled.wait()
        notice, self._notice = self._notice, None
        return notice


class Rendezvous:
    """The agents that have met, or will, under one key."""

    def __init__(self, version: int, lost: frozenset[str]) -> None:
        self.streams: set[AgentStream] = set()
        self.version = version
        self.lost = lost
        self.flush: asyncio.TimerHandle | None = None

    def notice(self) -> pb.PresenceNotice:
        return pb.PresenceNotice(version=self.version, lost=sorted(self.lost))

    def notify_all(self) -> None:
        if self.flush is not None:
            self.flush.cancel()
            self.flush = None
        notice = self.notice()
        for stream in self.streams:
            stream.notify(notice)


class Agents:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cluster = engine.cluster
        self._meetings: dict[str, Rendezvous] = {}
        self._any_lost = False

    def __len__(self) -> int:
        return sum(len(meeting.streams) for meeting in self._meetings.values())

    # --- streams --------------------------------------------------------------------------------------------

    async def serve(self, context: Context, access: GrpcAccess) -> None:
        """From the hello to the end, whichever side ends it."""
        caller: Principal | None = None
        try:
            caller = access.identify(context)
            stream = await self._welcome(context, caller)
        except StrataError as error:
            if isinstance(error, Forbidden):
                access.audit(context, caller, "Presence", refusal=error.message)
            await refuse(context, error)
        tasks = {
            asyncio.create_task(self._write(stream, context)),
            asyncio.create_task(self._read(stream, context)),
        }
        try:
            await asyncio.wait({*tasks, stream.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close(stream)
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, StrataError):
                await refuse(context, end)

    async def _welcome(self, context: Context, caller: Principal) -> AgentStream:
        hello = await read_hello(context, of="an agent", named="AgentHello")
        cluster = await self._engine.settled()
        key, node = own_key(hello.key, caller), hello.node
        self._engine.observe(AgentConnected(key=key, node=node))
        stream = AgentStream(key, node, hello.host, caller)
        quarantined = cluster.quarantine.hosts.get(hello.host)
        stream.leave = quarantined.reason if quarantined is not None else ""
        if (drain := cluster.drains.hosts.get(hello.host)) is not None and not stream.leave:
            self._ask_to_leave(stream, drain.asked)
        meeting = self._meetings.get(key)
        if meeting is None:
            value = cluster.values.durable.get(key)
            lost = cluster.presence.lost(self._engine.clock.now()).get(key, frozenset())
            meeting = self._meetings[key] = Rendezvous(value.version if value is not None else 0, lost)
        meeting.streams.add(stream)
        stream.notify(meeting.notice())
        if node in meeting.lost:
            self.look()
        return stream

    @staticmethod
    async def _write(stream: AgentStream, context: Context) -> None:
        while True:
            await context.write(await stream.next_notice())

    @staticmethod
    async def _read(stream: AgentStream, context: Context) -> None:
        message = await next_message(context)
        if message is None:
            return
        if message.WhichOneof("body") != "goodbye":
            raise InvalidArgument(
                "message", "must be a goodbye: an agent sends nothing else.", hint="Send Goodbye, or nothing."
            )
        stream.said_goodbye = True

    def _close(self, stream: AgentStream) -> None:
        meeting = self._meetings[stream.key]
        meeting.streams.discard(stream)
        if not meeting.streams:
            if meeting.flush is not None:
                meeting.flush.cancel()
            del self._meetings[stream.key]
        ended = AgentDisconnected(key=stream.key, node=stream.node, said_goodbye=stream.said_goodbye)
        self._engine.observe(ended)

    def end_revoked(self, still_counts: Callable[[Principal], bool]) -> None:
        """Ends the streams of callers whose credential was taken away or has expired."""
        for meeting in self._meetings.values():
            for stream in meeting.streams:
                if not still_counts(stream.caller):
                    stream.end()

    def end_all(self) -> None:
        """The coordinator is stopping, which is no loss of an agent: its last tick has been."""
        for meeting in self._meetings.values():
            for stream in meeting.streams:
                stream.end()

    # --- notices --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Announce who is lost since the last look, and who is back."""
        lost = self._cluster.presence.lost(self._engine.clock.now())
        if not lost and not self._any_lost:
            return
        self._any_lost = bool(lost)
        for key, meeting in self._meetings.items():
            now_lost = lost.get(key, frozenset())
            if now_lost == meeting.lost:
                continue
            for node in sorted(now_lost - meeting.lost):
                log.warning(
                    "agent %s of '%s' is lost: its connection dropped; notifying %d others",
                    node,
                    key,
                    len(meeting.streams),
                )
            meeting.lost = now_lost
            meeting.notify_all()

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, HostQuarantined | HostDrainStarted):
                self._send_away(event)
            elif isinstance(event, HostUndrained):
                self._let_stay(event)
            elif isinstance(event, ValueSwapped) and event.key in self._meetings:
                meeting = self._meetings[event.key]
                meeting.version = event.version
                if meeting.flush is None:
                    pause_s = len(meeting.streams) / NOTICES_PER_S
                    meeting.flush = asyncio.get_running_loop().call_later(pause_s, meeting.notify_all)

    def _send_away(self, event: HostQuarantined | HostDrainStarted) -> None:
        """Its machine is out of use, or goes: the agents that take part from there leave."""
        for meeting in self._meetings.values():
            for stream in meeting.streams:
                if stream.host == event.host:
                    if isinstance(event, HostDrainStarted):
                        self._ask_to_leave(stream, event)
                    else:
                        stream.leave, stream.leave_by_s = event.reason, None
                    stream.notify(meeting.notice())

    def _ask_to_leave(self, stream: AgentStream, event: HostDrainStarted) -> None:
        left_s = self._cluster.drains.left_s(event.host, self._engine.clock.now()) or 0.0
        stream.leave = f"drained by {event.by}: {event.reason}"
        stream.leave_by_s = asyncio.get_running_loop().time() + left_s

    def _let_stay(self, event: HostUndrained) -> None:
        """Those that leave already are not held up; one that was not notified stays."""
        for meeting in self._meetings.values():
            for stream in meeting.streams:
                if stream.host == event.host and stream.leave_by_s is not None:
                    stream.leave, stream.leave_by_s = "", None
                    stream.notify(meeting.notice())

    def count(self, host: str) -> int:
        """How many agents of a machine take part in runs."""
        return self.by_host()[host]

    def by_host(self) -> Counter[str]:
        return Counter(stream.host for meeting in self._meetings.values() for stream in meeting.streams)
