"""The part of an agent that speaks for its workers: one stream to the coordinator, on which their sessions ride.

Workers connect to a private Unix socket; what they say is folded and goes up on one stream for each coordinator that they name,
opened when the first of them comes. `core.fleet.multiplexer` decides all of it; this carries it out, in a thread of its own with one
event loop. A worker is asked to speak for itself where the coordinator does not know such streams (an earlier version), or refuses the
agent. When a stream is lost it is opened again at once and no worker is lost with it; where that fails, workers are let go, and look for
their coordinator themselves.

A process that connects must belong to this user or root, and speaks for the worker that it named when it connected: what it says is
sent under that one's number, and nothing else that a machine's stream may carry is taken from it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from strata.backoff import Backoff
from strata.core.fleet.multiplexer import (
    Action,
    Arrivals,
    Attach,
    Beats,
    Close,
    Detach,
    Forward,
    Meeting,
    MeetingEnded,
    MemberAnswered,
    Multiplexer,
    Stimulus,
    StreamLost,
    StreamOpened,
    Tell,
    TellEnd,
    TellTopology,
    TimePassed,
    TopologyChanged,
    Up,
    WorkerArrived,
    WorkerBeat,
    WorkerDropped,
    WorkerOpened,
    WorkerSaid,
)
from strata.core.pauses import Pace
from strata.core.types import WorkerId
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.frames import frame, json_frame, read_frame, read_json
from strata.rpc.methods import NAME
from strata.rpc.stubs import Stub
from strata.rpc.tls import VARIABLES as TLS_VARIABLES
from strata.rpc.tls import channel_credentials
from strata.sockets import is_own_peer, listen_privately
from strata.worker.errors import CoordinatorUnavailable, from_rpc
from strata.worker.session import CHANNEL_OPTIONS, FIRST_RETRY_S, LONGEST_RETRY_S

log = logging.getLogger("strata.rendezvous.sessions")

HELLO_S = 10.0
REFUSED_FOR_S = 60.0
"""How long one that does not know streams of machines is not asked again."""
UNREAD_BYTES = 8 << 20
"""A worker that does not read so much is let go."""
UNSENT_MESSAGES = 20_000
"""A stream that so much waits for is opened anew."""
MESSAGES_PER_SECOND = 2_000
"""What one worker may send on average; it is read more slowly beyond that, and slows no other worker."""
CARRIED = frozenset(["progress", "logs", "metrics", "goodbye"])
"""What goes up as it is."""
NO_MULTIPLEXING = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""How a coordinator refuses the stream itself: each worker is answered separately."""


class Destination(NamedTuple):
    """Which coordinator, and as whom."""

    address: str
    token: str
    secure: bool
    several: bool
    """Workers know other addresses, where this one does not answer."""


class Refused(Exception):
    """The coordinator does not take this agent's stream. With `direct` each worker is to open one of its own."""

    def __init__(self, why: str, *, direct: bool, leader: str = "") -> None:
        super().__init__(why)
        self.answer = {"open": False, "direct": direct, "why": why, "leader": leader}


class SessionRelay:
    """Made by the agent before it starts workers."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` where the socket cannot be made."""
        self.path = path
        path.unlink(missing_ok=True)  # Of a dead process that had this number.
        self._listener = listen_privately(path)
        self._upstreams: dict[Destination, Upstream] = {}
        self._connections = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="strata-sessions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_unix_server(self._serve, sock=self._listener))
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._shut_down())
        self._loop.close()

    async def _shut_down(self) -> None:
        for upstream in list(self._upstreams.values()):
            await upstream.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if is_own_peer(writer.get_extra_info("socket")):
                await self._speak_for(reader, writer)
        except (
            OSError,
            TimeoutError,
            ValueError,
            KeyError,
            TypeError,
            DecodeError,
            Refused,
            StrataError,
        ) as error:
            log.debug("a worker's session ended: %r", error)
        finally:
            writer.transport.abort()

    async def _speak_for(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(HELLO_S):
            hello = await read_json(reader)
        if hello["tls"] != [os.environ.get(name, "") for name in TLS_VARIABLES]:
            writer.write(
                json_frame({"open": False, "direct": True, "why": "its agent has other certificates"})
            )
            await writer.drain()
            return
        to = Destination(
            str(hello["address"]), str(hello["token"]), bool(hello["secure"]), bool(hello["several"])
        )
        worker_id, incarnation = WorkerId(str(hello["worker_id"])), int(hello["incarnation"])
        upstream = self._upstreams.get(to)
        if upstream is None or upstream.is_over:
            upstream = self._upstreams[to] = Upstream(to)
        connection = next(self._connections)
        upstream.users.add(connection)
        try:
            try:
                await upstream.opened()
            except Refused as refused:
                writer.write(json_frame(refused.answer))
                await writer.drain()
                return
            writer.write(json_frame({"open": True}))
            opened = WorkerOpened(connection=connection, worker_id=worker_id, incarnation=incarnation)
            upstream.writers[connection] = writer
            upstream.feed(opened)
            await self._read(reader, upstream, connection)
        finally:
            upstream.writers.pop(connection, None)
            upstream.feed(WorkerDropped(connection=connection))
            upstream.users.discard(connection)
            if not upstream.users and not upstream.is_refused:
                if self._upstreams.get(to) is upstream:
                    del self._upstreams[to]
                await upstream.close()

    @staticmethod
    async def _read(reader: asyncio.StreamReader, upstream: Upstream, connection: int) -> None:
        pace, count = Pace(), 0
        while (data := await read_frame(reader)) is not None:
            stimulus = _stimulus(connection, pb.WorkerMessage.FromString(data))
            if isinstance(stimulus, WorkerSaid):
                await upstream.opened()  # Until then it waits where it is, and what follows with it.
            if stimulus is not None:
                upstream.feed(stimulus)
            count += 1
            if count >= MESSAGES_PER_SECOND:
                await asyncio.sleep(pace.take(count / MESSAGES_PER_SECOND, time.monotonic()))
                count = 0


def _stimulus(connection: int, message: pb.WorkerMessage) -> Stimulus | None:
    """None for what a worker has no business to say to its agent."""
    kind = message.WhichOneof("body")
    if kind == "heartbeat":
        beat = message.heartbeat
        report = pb.Report(status=beat.status, resources=beat.resources)
        return WorkerBeat(connection=connection, report=report)
    if kind == "barrier":
        barrier = message.barrier
        meeting = Meeting(
            barrier_id=barrier.barrier_id,
            step=barrier.step,
            generation=barrier.generation,
            expected=barrier.expected_participants,
            timeout_ms=barrier.timeout_ms,
        )
        return WorkerArrived(connection=connection, meeting=meeting, call_id=barrier.call_id)
    return WorkerSaid(connection=connection, message=message) if kind in CARRIED else None


class Upstream:
    """The stream to one coordinator, opened again whenever it is lost, for as long as a worker uses it."""

    def __init__(self, to: Destination) -> None:
        self.to = to
        self.users: set[int] = set()
        """Connections of workers that it is, or will be, for."""
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.is_over = False
        self._refused: Refused | None = None
        self._mux = Multiplexer()
        self._numbers = itertools.count(1)
        self._stream = 0
        """The number of the one that is open; 0: none is."""
        self._news: asyncio.Event = asyncio.Event()
        """It was opened, or refused."""
        self._outbox: list[pb.WorkerMessage] = []
        self._filled = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        credentials = channel_credentials(secure=to.secure)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(to.address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(to.address, credentials, options=CHANNEL_OPTIONS)
        self._stub = Stub(self._channel, NAME)
        self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def is_refused(self) -> bool:
        """Each worker opens a stream of its own, for the time being."""
        return self._refused is not None and not self.is_over

    async def opened(self) -> None:
        """Once there is a stream. Raises `Refused`."""
        while not self._stream:
            if self._refused is not None:
                raise self._refused
            self._news.clear()
            await self._news.wait()

    def feed(self, stimulus: Stimulus) -> None:
        now_s = asyncio.get_running_loop().time()
        for action in self._mux.handle(stimulus, now_s):
            self._act(action)
        due_s = self._mux.due_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self.feed, TimePassed())

    async def close(self) -> None:
        self.is_over = True
        self._news.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()

    # --- down, to workers -----------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case Tell():
                self._tell(action.connection, action.message)
            case TellTopology():
                message = pb.CoordinatorMessage()
                message.topology.CopyFrom(action.topology)
                message.topology.rank = action.rank
                self._tell(action.connection, message)
            case TellEnd():
                message = pb.CoordinatorMessage()
                message.barrier.CopyFrom(action.outcome)
                message.barrier.call_id = action.call_id
                message.barrier.outcome.arrival_order = action.order
                self._tell(action.connection, message)
            case Close():
                self._let_go(action.connection)
            case _:
                self._outbox.append(_upward(action))
                self._filled.set()

    def _tell(self, connection: int, message: pb.CoordinatorMessage | None) -> None:
        writer = self.writers.get(connection)
        if writer is None or message is None or writer.is_closing():
            return
        message.member = 0
        writer.write(frame(message.SerializeToString()))
        if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
            log.warning("a worker does not read the coordinator's messages; closing its connection")
            self._let_go(connection)

    def _let_go(self, connection: int) -> None:
        """After all that was said to it before."""
        writer = self.writers.pop(connection, None)
        if writer is not None:
            with suppress(OSError):
                writer.write_eof()

    # --- up, to the coordinator -----------------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            await self._reopen()
        finally:
            self.is_over = True
            await self._channel.close(None)

    async def _reopen(self) -> None:
        """Returns when workers are to look for another coordinator."""
        backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S)
        backoff.worked()
        while True:
            failure: StrataError | None = None
            was_open = False
            try:
                await self._run()
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error, self.to.address)
                if error.code() in NO_MULTIPLEXING:
                    self._refuse(Refused(failure.message, direct=True))
                    await asyncio.sleep(REFUSED_FOR_S)
                    return
            except asyncio.InvalidStateError:
                pass  # Lost while something was being sent.
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            finally:
                if self._stream:
                    was_open = True
                    stream, self._stream = self._stream, 0
                    self.feed(StreamLost(stream=stream))
            if was_open:
                backoff.worked()
            elif self.to.several:
                leader = failure.leader if isinstance(failure, CoordinatorUnavailable) else ""
                why = failure.message if failure is not None else "the stream ended"
                self._refuse(Refused(why, direct=False, leader=leader))
                return
            await asyncio.sleep(backoff.pause_s() or 0.0)

    def _refuse(self, refused: Refused) -> None:
        """Workers that wait are notified, and those that are connected are let go."""
        self._refused = refused
        self._news.set()
        for connection in list(self.writers):
            self._let_go(connection)

    async def _run(self) -> None:
        call = self._stub.method("Session")(
            metadata=(("authorization", f"Bearer {self.to.token}"),) if self.to.token else (),
            wait_for_ready=not self.to.several,
        )
        writer: asyncio.Task[None] | None = None
        try:
            try:
                await call.write(pb.WorkerMessage(machine=pb.MachineHello(host=socket.gethostname())))
            except asyncio.InvalidStateError:
                await call.read()  # It has ended already; this says how.
                raise
            welcome = await call.read()
            if welcome is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            self._stream = next(self._numbers)
            self._outbox.clear()
            self.feed(
                StreamOpened(stream=self._stream, interval_s=welcome.welcome.heartbeat_interval_ms / 1000)
            )
            self._news.set()
            writer = asyncio.get_running_loop().create_task(self._write(call))
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                    return
                stimulus = _answer(self._stream, message)
                if stimulus is not None:
                    self.feed(stimulus)
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                while not self._outbox:
                    self._filled.clear()
                    await self._filled.wait()
                messages, self._outbox = self._outbox, []
                if len(messages) > UNSENT_MESSAGES:
                    log.warning("%d messages wait for the coordinator; reopening its stream", len(messages))
                    return
                for message in messages:
                    await call.write(message)
        finally:
            call.cancel()  # The task that reads from it learns that it is over.


def _upward(action: Up) -> pb.WorkerMessage:
    message = pb.WorkerMessage()
    match action:
        case Attach():
            message.member = action.member
            message.attach.worker_id, message.attach.incarnation = action.worker_id, action.incarnation
        case Detach():
            message.member = action.member
            message.detach.SetInParent()
        case Beats():
            message.beats.members.extend(action.members)
            for member, report in action.reports:
                own = message.beats.reports.add()
                own.CopyFrom(report)
                own.member = member
        case Arrivals():
            meeting = action.meeting
            barrier = message.arrivals.barrier
            barrier.barrier_id, barrier.step, barrier.generation = (
                meeting.barrier_id,
                meeting.step,
                meeting.generation,
            )
            barrier.expected_participants, barrier.timeout_ms = meeting.expected, meeting.timeout_ms
            message.arrivals.members.extend(member for member, _ in action.calls)
            message.arrivals.call_ids.extend(call_id for _, call_id in action.calls)
        case Forward():
            message.CopyFrom(action.message)
            message.member = action.member
    return message


def _answer(stream: int, message: pb.CoordinatorMessage) -> Stimulus | None:
    match message.WhichOneof("body"):
        case "topologies":
            topologies = message.topologies
            return TopologyChanged(
                stream=stream,
                ranks=tuple(zip(topologies.members, topologies.ranks, strict=False)),
                topology=topologies.topology,
            )
        case "outcomes":
            ended = message.outcomes
            return MeetingEnded(
                stream=stream,
                calls=tuple(zip(ended.members, ended.call_ids, ended.orders, strict=False)),
                outcome=ended.outcome,
            )
        case "barrier":
            alone = message.barrier
            call = (message.member, alone.call_id, alone.outcome.arrival_order)
            return MeetingEnded(stream=stream, calls=(call,), outcome=alone)
        case "detach":
            return MemberAnswered(stream=stream, member=message.member, message=None, ends=True)
        case "stale" | "goodbye":
            return MemberAnswered(stream=stream, member=message.member, message=message, ends=True)
        case None:
            return None
        case _:
            return MemberAnswered(stream=stream, member=message.member, message=message)
