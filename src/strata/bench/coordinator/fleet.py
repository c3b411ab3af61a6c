"""A fleet of workers as the coordinator sees it: each with a session, and unless asked otherwise a connection. And one of agents.

The workers are real to the coordinator (registered, heartbeating, meeting at barriers); on this side they are
cheap streams of one process, see `swarm`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any

from strata.backoff import Backoff
from strata.bench.coordinator.serving import HOST, Served
from strata.bench.coordinator.swarm import CallFailed, Connection, Stream, framed
from strata.rpc import coordinator_pb2 as pb

ROUND_TIMEOUT_S = 120.0
JOINING_AT_A_TIME = 100


def heartbeat(step: int, *, worker: int = 0) -> pb.HeartbeatRequest:
    """What a worker with one GPU says about itself: no two of them, and no two steps, the same."""
    salt = (worker * 7919 + step * 104_729) % 1_000_003
    return pb.HeartbeatRequest(
        timestamp_ms=time.time_ns() // 1_000_000,
        status=pb.WorkerStatus(state="training", current_step=step, current_epoch=2, current_task="pretrain"),
        resources=pb.ResourceUsage(
            cpu_percent=50 + salt % 500 / 10,
            memory_used_bytes=20_000_000_000 + salt * 4096,
            disk_read_bytes=1_234_567_890 + salt * 512,
            disk_write_bytes=987_654_321 + salt * 512,
            network_rx_bytes=55_555_555_555 + salt * 97,
            network_tx_bytes=44_444_444_444 + salt * 89,
            gpu_usage=[
                pb.GpuUsage(
                    index=0,
                    utilization_percent=90 + salt % 100 / 10,
                    memory_used_bytes=68_000_000_000 + salt * 1024,
                    memory_total_bytes=85_899_345_920,
                )
            ],
        ),
    )


async def _register(connection: Connection, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
    """As the worker library does: a call that has waited too long at a busy server is cancelled there, and made again."""
    request.registration_id = request.worker_id.encode()
    backoff = Backoff(first_s=0.05, longest_s=1.0, budget_s=ROUND_TIMEOUT_S)
    while True:
        try:
            answer = await connection.unary("RegisterWorker", request.SerializeToString())
            return pb.RegisterWorkerResponse.FromString(answer)
        except CallFailed as failure:
            pause_s = backoff.pause_s()
            if "CANCELLED" not in str(failure) or pause_s is None:
                raise
        await asyncio.sleep(pause_s)


class _Connected:
    """Connections to a coordinator, which end with it."""

    def __init__(self, coordinator: Served) -> None:
        self._port = coordinator.grpc_port
        self._connections: list[Connection] = []

    async def _connect(self) -> Connection:
        connection = await Connection.open(HOST, self._port)
        self._connections.append(connection)
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def beating(fleet: Fleet | MachineFleet) -> AsyncIterator[None]:
    """Who has joined is not to be failed while the others do."""
    beats = asyncio.create_task(fleet.beat(every_s=5.0))
    try:
        yield
    finally:
        beats.cancel()


class FleetWorker:
    def __init__(self, worker_id: str, incarnation: int, connection: Connection) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.connection = connection
        self.session: Stream = connection.call("Session")

    def say(self, message: pb.WorkerMessage) -> None:
        self.session.send(framed(message.SerializeToString()))


class Fleet(_Connected):
    """Open with `async with`; every worker is connected once that returns."""

    def __init__(self, coordinator: Served, size: int, *, connections: int | None = None) -> None:
        super().__init__(coordinator)
        self.size = size
        self.workers: list[FleetWorker] = []
        self._connection_count = connections or size

    async def __aenter__(self) -> Fleet:
        has_one_each = self._connection_count == self.size
        while not has_one_each and len(self._connections) < self._connection_count:
            await self._connect()
        gate = asyncio.Semaphore(JOINING_AT_A_TIME)

        async def join(number: int) -> None:
            async with gate:
                if has_one_each:
                    connection = await self._connect()
                else:
                    connection = self._connections[number % self._connection_count]
                self.workers.append(await self._join(f"worker-{number:05}", connection))

        async with beating(self):
            await asyncio.gather(*(join(number) for number in range(self.size)))
        self.workers.sort(key=lambda worker: worker.worker_id)
        await asyncio.sleep(0.5)  # News of so many joins goes round for a moment; it is not what is measured.
        return self

    async def _join(self, worker_id: str, connection: Connection) -> FleetWorker:
        request = pb.RegisterWorkerRequest(
            worker_id=worker_id, hostname="10.0.0.1", port=29500, gpu_count=1, memory_bytes=1 << 36
        )
        answer = await _register(connection, request)
        while True:
            worker = FleetWorker(worker_id, answer.incarnation, connection)
            try:
                await self._welcomed(worker)
                return worker
            except CallFailed as failure:
                if "CANCELLED" not in str(failure):
                    raise  # Else it has waited too long at a busy server, as a registration may.

    @staticmethod
    async def _welcomed(worker: FleetWorker) -> None:
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive(data: bytes) -> None:
            if pb.CoordinatorMessage.FromString(data).HasField("welcome") and not welcomed.done():
                welcomed.set_result(None)

        def fail() -> None:
            if not welcomed.done():
                welcomed.set_exception(CallFailed(f"The session ended: {worker.session.ended_with}"))

        worker.session.on_message, worker.session.on_end = receive, fail
        hello = pb.Hello(worker_id=worker.worker_id, incarnation=worker.incarnation)
        worker.say(pb.WorkerMessage(hello=hello))
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await welcomed
        worker.session.on_message, worker.session.on_end = _ignore, lambda: None

    async def barrier(self, name: str, step: int, *, beats_before: int = 0, timeout_ms: int = 0) -> float:
        """Seconds from the first arrival, or the first heartbeat before it, to the last release.

        A session is handled in order, so a release also proves that every heartbeat before it was taken.
        """
        beats = framed(pb.WorkerMessage(heartbeat=heartbeat(step)).SerializeToString())
        arrivals = [
            framed(
                pb.WorkerMessage(
                    barrier=pb.WaitBarrierRequest(
                        barrier_id=name,
                        step=step,
                        expected_participants=self.size,
                        timeout_ms=timeout_ms,
                        call_id=f"{name}-{step}-{number}".encode(),
                    )
                ).SerializeToString()
            )
            for number in range(self.size)
        ]
        everyone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self.size

        def receive(data: bytes) -> None:
            nonlocal waiting
            message = pb.CoordinatorMessage.FromString(data)
            if message.HasField("barrier"):
                waiting -= 1
                if not message.barrier.outcome.released:
                    fail(message.barrier.outcome.reason)
                elif not waiting and not everyone.done():
                    everyone.set_result(None)

        def fail(reason: str = "a session ended") -> None:
            if not everyone.done():
                everyone.set_exception(CallFailed(f"Barrier {name} at step {step}: {reason}"))

        for worker in self.workers:
            worker.session.on_message, worker.session.on_end = receive, fail
        began_s = time.perf_counter()
        for _ in range(beats_before):
            for worker in self.workers:
                worker.session.send(beats)
        for worker, arrival in zip(self.workers, arrivals, strict=True):
            worker.session.send(arrival)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await everyone
        elapsed_s = time.perf_counter() - began_s
        for worker in self.workers:
            worker.session.on_message, worker.session.on_end = _ignore, lambda: None
        return elapsed_s

    def _on_topology(self, waiting: _Countdown, number: int, data: bytes) -> None:
        message = pb.CoordinatorMessage.FromString(data)
        if message.HasField("topology") and message.topology.world_size == self.size:
            waiting.arrived(number)

    async def lose(self, count: int) -> float:
        """Seconds from the death of the last so many workers until each of the others has a generation without all of them."""
        victims, self.workers = self.workers[-count:], self.workers[:-count]
        self.size -= count
        waiting = _Countdown(self.size)
        for number, worker in enumerate(self.workers):
            worker.session.on_message = partial(self._on_topology, waiting, number)

        def abort() -> None:
            for victim in victims:
                victim.connection.abort()

        return await waiting.after(abort)

    async def beat(self, *, every_s: float) -> None:
        """Until cancelled: every worker once in so many seconds, evenly spread, as a real fleet is."""
        slices = 100
        began_s, turn = time.monotonic(), 0
        while True:
            step = 1_000 + turn // slices
            for place in range(turn % slices, len(self.workers), slices):
                self.workers[place].say(pb.WorkerMessage(heartbeat=heartbeat(step, worker=place)))
            turn += 1
            await asyncio.sleep(max(0.0, began_s + turn * every_s / slices - time.monotonic()))


class AgentSwarm(_Connected):
    """Agents of one rendezvous as the coordinator sees them: each with a connection, and the stream of its presence."""

    def __init__(self, coordinator: Served, size: int) -> None:
        super().__init__(coordinator)
        self._agents = [f"10.0.0.{number}_{1000 + number}_0" for number in range(size)]
        self._streams: list[Stream] = []

    async def __aenter__(self) -> AgentSwarm:
        welcomed = _Countdown(len(self._agents))
        for number, name in enumerate(self._agents):
            stream = (await self._connect()).call("Presence")
            stream.on_message = partial(_arrive, welcomed, number)
            hello = pb.AgentMessage(hello=pb.AgentHello(key="bench", node=name))
            stream.send(framed(hello.SerializeToString()))
            self._streams.append(stream)
        await welcomed.after(lambda: None)
        return self

    async def lose_one(self) -> float:
        """Seconds from the death of the last agent until each of the others has been notified."""
        name, victim = self._agents.pop(), self._connections.pop()
        self._streams.pop()
        waiting = _Countdown(len(self._agents))

        def receive(number: int, data: bytes) -> None:
            if name in pb.PresenceNotice.FromString(data).lost:
                waiting.arrived(number)

        for number, stream in enumerate(self._streams):
            stream.on_message = partial(receive, number)
        return await waiting.after(victim.abort)


class _Countdown:
    """A count of those who have something, each of them once."""

    def __init__(self, count: int) -> None:
        self._missing = set(range(count))
        self._all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def arrived(self, number: int) -> None:
        self._missing.discard(number)
        if not self._missing and not self._all.done():
            self._all.set_result(None)

    async def after(self, cause: Callable[[], None]) -> float:
        """Seconds from `cause` until the last one has it."""
        began_s = time.perf_counter()
        cause()
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await self._all
        return time.perf_counter() - began_s


def _arrive(waiting: _Countdown, number: int, data: bytes) -> None:
    waiting.arrived(number)


def _ignore(data: bytes) -> None:
    """Topology, plans and other news: a fleet that only measures does not react."""


class MachineFleet(_Connected):
    """The same workers on machines whose agents speak for them: a connection and a stream for each machine, as the agents have.

    What agents do with what their workers say is theirs, on machines of their own: here it has been done already.
    """

    def __init__(self, coordinator: Served, machines: int, ranks_each: int) -> None:
        super().__init__(coordinator)
        self._ranks_each = ranks_each
        self.size = machines * ranks_each
        self.streams: list[Stream] = []
        self._machines = machines

    async def __aenter__(self) -> MachineFleet:
        for _ in range(self._machines):
            await self._connect()
        gate = asyncio.Semaphore(JOINING_AT_A_TIME)

        async def join(number: int) -> Stream:
            async with gate:
                return await self._join(number, self._connections[number])

        async with beating(self):
            self.streams = await asyncio.gather(*map(join, range(self._machines)))
        await asyncio.sleep(0.5)  # As for a fleet without agents.
        return self

    async def _join(self, machine: int, connection: Connection) -> Stream:
        stream = connection.call("Session")
        welcomed = _Countdown(1 + self._ranks_each)

        def receive(data: bytes) -> None:
            message = pb.CoordinatorMessage.FromString(data)
            if message.HasField("welcome"):
                welcomed.arrived(message.member)

        stream.on_message = receive
        stream.send(_message(machine=pb.MachineHello(host=f"host-{machine}")))
        for rank in range(self._ranks_each):
            worker_id = f"worker-{machine * self._ranks_each + rank:05}"
            request = pb.RegisterWorkerRequest(
                worker_id=worker_id, hostname=f"host-{machine}", port=29500, gpu_count=1, memory_bytes=1 << 36
            )
            answer = await _register(connection, request)
            attach = pb.Attach(worker_id=worker_id, incarnation=answer.incarnation)
            stream.send(_message(member=rank + 1, attach=attach))
        await welcomed.after(lambda: None)
        stream.on_message = _ignore
        self.streams.append(stream)
        return stream

    def beats(self, machine: int, step: int) -> bytes:
        """One folded heartbeat of a machine: every worker's report has changed."""
        first = machine * self._ranks_each
        message = pb.Beats(members=range(1, self._ranks_each + 1))
        for rank in range(self._ranks_each):
            beat = heartbeat(step, worker=first + rank)
            message.reports.add(member=rank + 1, status=beat.status, resources=beat.resources)
        return _message(beats=message)

    async def barrier(self, name: str, step: int, *, beats_before: int = 0) -> float:
        """Seconds from the first arrival, or the first heartbeat before it, to the last release, at the agents."""
        beats = [self.beats(machine, step) for machine in range(self._machines)] if beats_before else []
        arrivals = [
            _message(
                arrivals=pb.Arrivals(
                    barrier=pb.WaitBarrierRequest(
                        barrier_id=name, step=step, expected_participants=self.size
                    ),
                    members=range(1, self._ranks_each + 1),
                    call_ids=[f"{name}-{step}-{machine}-{rank}".encode() for rank in range(self._ranks_each)],
                )
            )
            for machine in range(self._machines)
        ]
        everyone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self.size

        def receive(data: bytes) -> None:
            nonlocal waiting
            message = pb.CoordinatorMessage.FromString(data)
            if message.HasField("outcomes"):
                waiting -= len(message.outcomes.members)
                if not message.outcomes.outcome.outcome.released:
                    fail(message.outcomes.outcome.outcome.reason)
                elif not waiting and not everyone.done():
                    everyone.set_result(None)

        def fail(reason: str = "a stream ended") -> None:
            if not everyone.done():
                everyone.set_exception(CallFailed(f"Barrier {name} at step {step}: {reason}"))

        for stream in self.streams:
            stream.on_message, stream.on_end = receive, fail
        began_s = time.perf_counter()
        for _ in range(beats_before):
            for stream, beat in zip(self.streams, beats, strict=True):
                stream.send(beat)
        for stream, arrival in zip(self.streams, arrivals, strict=True):
            stream.send(arrival)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await everyone
        elapsed_s = time.perf_counter() - began_s
        for stream in self.streams:
            stream.on_message, stream.on_end = _ignore, lambda: None
        return elapsed_s

    async def beat(self, *, every_s: float) -> None:
        """Until cancelled: every machine once in so many seconds, evenly spread."""
        slices = 100
        began_s, turn = time.monotonic(), 0
        while True:
            for machine in range(turn % slices, len(self.streams), slices):
                self.streams[machine].send(self.beats(machine, 1_000 + turn // slices))
            turn += 1
            await asyncio.sleep(max(0.0, began_s + turn * every_s / slices - time.monotonic()))

    async def lose(self, machines: int) -> float:
        """Seconds from the death of so many machines until each of the others has a generation without all of their workers."""
        victims, self._connections = self._connections[-machines:], self._connections[:-machines]
        self.streams = self.streams[:-machines]
        self._machines -= machines
        self.size -= machines * self._ranks_each
        waiting = _Countdown(self.size)

        def receive(machine: int, data: bytes) -> None:
            message = pb.CoordinatorMessage.FromString(data)
            if message.HasField("topologies") and message.topologies.topology.world_size == self.size:
                for member in message.topologies.members:
                    waiting.arrived(machine * self._ranks_each + member - 1)

        for machine, stream in enumerate(self.streams):
            stream.on_message = partial(receive, machine)

        def abort() -> None:
            for victim in victims:
                victim.abort()

        return await waiting.after(abort)


def _message(**body: Any) -> bytes:
    return framed(pb.WorkerMessage(**body).SerializeToString())
