"""A fleet of workers as the coordinator sees it: each with a session, and unless asked otherwise a connection. And one of agents.

The workers are real to the coordinator (registered, heartbeating, meeting at barriers); on this side they are
cheap streams of one process, see `swarm`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from strata.bench.coordinator.serving import HOST, Served
from strata.bench.coordinator.swarm import CallFailed, Connection, Stream, framed
from strata.rpc import coordinator_pb2 as pb

ROUND_TIMEOUT_S = 60.0
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


class FleetWorker:
    def __init__(self, worker_id: str, incarnation: int, connection: Connection) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.connection = connection
        self.session: Stream = connection.call("Session")

    def say(self, message: pb.WorkerMessage) -> None:
        self.session.send(framed(message.SerializeToString()))


class Fleet:
    """Open with `async with`; every worker is connected once that returns."""

    def __init__(self, coordinator: Served, size: int, *, connections: int | None = None) -> None:
        self._coordinator = coordinator
        self.size = size
        self.workers: list[FleetWorker] = []
        self._connection_count = connections or size
        self._connections: list[Connection] = []

    async def __aenter__(self) -> Fleet:
        for _ in range(self._connection_count):
            self._connections.append(await Connection.open(HOST, self._coordinator.grpc_port))
        gate = asyncio.Semaphore(JOINING_AT_A_TIME)

        async def join(number: int) -> FleetWorker:
            async with gate:
                connection = self._connections[number % self._connection_count]
                return await self._join(f"worker-{number:04}", connection)

        self.workers = list(await asyncio.gather(*(join(number) for number in range(self.size))))
        await asyncio.sleep(0.5)  # News of so many joins goes round for a moment; it is not what is measured.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)

    async def _join(self, worker_id: str, connection: Connection) -> FleetWorker:
        request = pb.RegisterWorkerRequest(
            worker_id=worker_id, hostname="10.0.0.1", port=29500, gpu_count=1, memory_bytes=1 << 36
        )
        answer = pb.RegisterWorkerResponse.FromString(
            await connection.unary("RegisterWorker", request.SerializeToString())
        )
        worker = FleetWorker(worker_id, answer.incarnation, connection)
        welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hear(data: bytes) -> None:
            if pb.CoordinatorMessage.FromString(data).HasField("welcome"):
                welcomed.set_result(None)

        worker.session.on_message = hear
        worker.say(pb.WorkerMessage(hello=pb.Hello(worker_id=worker_id, incarnation=answer.incarnation)))
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await welcomed
        worker.session.on_message = _ignore
        return worker

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

        def hear(data: bytes) -> None:
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
            worker.session.on_message, worker.session.on_end = hear, fail
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

    async def lose_one(self) -> float:
        """Seconds from the death of the last worker until each of the others has the new generation."""
        victim = self.workers.pop()
        self.size -= 1
        waiting = _Everybody(self.size)
        for number, worker in enumerate(self.workers):
            worker.session.on_message = partial(self._hear_topology, waiting, number)
        return await waiting.after(victim.connection.abort)

    def _hear_topology(self, waiting: _Everybody, number: int, data: bytes) -> None:
        message = pb.CoordinatorMessage.FromString(data)
        if message.HasField("topology") and message.topology.world_size == self.size:
            waiting.arrived(number)

    async def beat_at_1_hz(self) -> None:
        """Until cancelled: every worker once a second, evenly spread over it, as a real fleet is."""
        slices = 100
        began_s, turn = time.monotonic(), 0
        while True:
            step = 1_000 + turn // slices
            for place in range(turn % slices, self.size, slices):
                self.workers[place].say(pb.WorkerMessage(heartbeat=heartbeat(step, worker=place)))
            turn += 1
            await asyncio.sleep(max(0.0, began_s + turn / slices - time.monotonic()))


class AgentSwarm:
    """Agents of one rendezvous as the coordinator sees them: each with a connection, and the stream of its presence."""

    def __init__(self, coordinator: Served, size: int) -> None:
        self._coordinator = coordinator
        self._agents = [f"10.0.0.{number}_{1000 + number}_0" for number in range(size)]
        self._connections: list[Connection] = []
        self._streams: list[Stream] = []

    async def __aenter__(self) -> AgentSwarm:
        welcomed = _Everybody(len(self._agents))
        for number, name in enumerate(self._agents):
            connection = await Connection.open(HOST, self._coordinator.grpc_port)
            stream = connection.call("Presence")
            stream.on_message = partial(_arrive, welcomed, number)
            hello = pb.AgentMessage(hello=pb.AgentHello(key="bench", node=name))
            stream.send(framed(hello.SerializeToString()))
            self._connections.append(connection)
            self._streams.append(stream)
        await welcomed.after(lambda: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)

    async def lose_one(self) -> float:
        """Seconds from the death of the last agent until each of the others has been notified."""
        name, victim = self._agents.pop(), self._connections.pop()
        self._streams.pop()
        waiting = _Everybody(len(self._agents))

        def hear(number: int, data: bytes) -> None:
            if name in pb.PresenceNotice.FromString(data).lost:
                waiting.arrived(number)

        for number, stream in enumerate(self._streams):
            stream.on_message = partial(hear, number)
        return await waiting.after(victim.abort)


class _Everybody:
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


def _arrive(waiting: _Everybody, number: int, data: bytes) -> None:
    waiting.arrived(number)


def _ignore(data: bytes) -> None:
    """Topology, plans and other news: a fleet that only measures does not react."""
