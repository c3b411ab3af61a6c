"""Nothing that a crash could take back is ever said: answers wait for the commit of the facts that they show."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import AccessRules, Gatekeeper
from strata.coordinator.auth.tokens import TaskTokens, TokenStore
from strata.coordinator.engine import Engine
from strata.coordinator.grpc.middleware import GrpcAccess
from strata.coordinator.grpc.service import CoordinatorService
from strata.coordinator.journal.protocol import JournalError
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.coordinator.leadership import Standby
from strata.coordinator.logs.store import LogStore
from strata.coordinator.runtime import Runtime
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core.cluster import Limits
from strata.core.messages import Event, Swapped, SwapValue
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc
from strata.rpc.methods import handlers

PATIENCE_S = 60.0
AT_ONCE_S = 0.3
"""Long enough for an answer that does not wait: one takes a few milliseconds."""


class GatedJournal(SqliteJournal):
    """A real journal whose commits wait at a gate, and fail behind it if they are told to."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        self.fails = False

    def append(self, events: Sequence[Event]) -> None:
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(PATIENCE_S)
        if self.fails:
            raise JournalError("no space left on device")
        super().append(events)


@dataclass(frozen=True, kw_only=True)
class Served:
    engine: Engine
    journal: GatedJournal
    calls: Any

    async def register(self, worker_id: str) -> pb.RegisterWorkerResponse:
        answer: pb.RegisterWorkerResponse = await self.calls.RegisterWorker(
            pb.RegisterWorkerRequest(worker_id=worker_id), timeout=PATIENCE_S
        )
        return answer

    async def register_at_the_gate(self, worker_id: str) -> asyncio.Task[Any]:
        """A registration that is decided, and whose commit is under way."""
        self.journal.gate.clear()
        self.journal.waiting.clear()
        registering = asyncio.create_task(self.register(worker_id))
        assert await asyncio.to_thread(self.journal.waiting.wait, PATIENCE_S)
        return registering


@asynccontextmanager
async def coordinator(data_dir: Path) -> AsyncIterator[Served]:
    """Engine, journal and gRPC as they are served, in this process."""
    journal = GatedJournal(data_dir)
    runtime = Runtime.create(journal, Limits(), LogStore())
    server = grpc.aio.server()
    gatekeeper = Gatekeeper(
        AccessRules(trust_loopback=True),
        tokens=TokenStore(data_dir),
        task_tokens=TaskTokens(data_dir),
        is_live=runtime.is_live,
    )
    audit_log = AuditLog(data_dir)
    service = CoordinatorService(
        runtime.engine,
        runtime.sessions,
        runtime.agents,
        runtime.logs,
        runtime.metrics,
        GrpcAccess(gatekeeper, audit_log, ours=lambda: ("127.0.0.1", port), mutual_tls=False),
        runtime.inspection,
        runtime.run_history,
        TaskSecrets(data_dir),
        heartbeat_interval_s=1.0,
        worker_config={},
        on_metrics=runtime.notifier.logged,
    )
    server.add_generic_rpc_handlers(handlers(service))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    running = asyncio.create_task(runtime.engine.run())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = coordinator_pb2_grpc.CoordinatorStub(channel)
            yield Served(engine=runtime.engine, journal=journal, calls=calls)
    finally:
        journal.gate.set()
        runtime.engine.stop()
        with suppress(JournalError):
            await running
        await server.stop(0)
        runtime.engine.close()
        audit_log.close()
        gatekeeper.owners.close()


async def is_answered(asked: asyncio.Task[Any]) -> bool:
    return bool((await asyncio.wait({asked}, timeout=AT_ONCE_S))[0])


async def test_a_heartbeat_shows_a_generation_only_once_it_is_durable(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as served:
        first = await served.register("a")
        registering = await served.register_at_the_gate("b")
        beat = pb.HeartbeatRequest(worker_id="a", generation=first.generation)
        asked = asyncio.ensure_future(served.calls.Heartbeat(beat, timeout=PATIENCE_S))
        assert not await is_answered(asked), "the generation that b began is not durable yet"
        assert served.engine.cluster.membership.generation > first.generation
        served.journal.gate.set()
        assert (await asked).generation == (await registering).generation > first.generation


async def test_a_heartbeat_never_shows_what_could_not_be_written(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as served:
        await served.register("a")
        registering = await served.register_at_the_gate("b")
        asked = asyncio.ensure_future(
            served.calls.Heartbeat(pb.HeartbeatRequest(worker_id="a"), timeout=PATIENCE_S)
        )
        served.journal.fails = True
        served.journal.gate.set()
        assert not await is_answered(asked)
        assert not registering.done()
        for call in (asked, registering):
            call.cancel()


async def test_a_heartbeat_counts_while_a_commit_is_under_way(tmp_path: Path) -> None:
    """The answer waits for the disk; that the worker is alive does not."""
    async with coordinator(tmp_path) as served:
        await served.register("a")
        await served.register_at_the_gate("b")
        pulse = served.engine.cluster.membership.pulses["a"]  # type: ignore[index]
        heard_mono_s = pulse.last_heartbeat_mono_s
        asked = asyncio.ensure_future(
            served.calls.Heartbeat(pb.HeartbeatRequest(worker_id="a"), timeout=PATIENCE_S)
        )
        async with asyncio.timeout(PATIENCE_S):
            while pulse.last_heartbeat_mono_s <= heard_mono_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not await is_answered(asked)
        served.journal.gate.set()
        await asked


async def test_nobody_is_called_superseded_before_its_successor_is_durable(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as served:
        old = await served.register("a")
        registering = await served.register_at_the_gate("a")
        beat = pb.HeartbeatRequest(worker_id="a", incarnation=old.incarnation)
        asked = asyncio.ensure_future(served.calls.Heartbeat(beat, timeout=PATIENCE_S))
        assert not await is_answered(asked), "a crash would make the old one current again"
        served.journal.gate.set()
        with pytest.raises(grpc.aio.AioRpcError, match=f"Incarnation {old.incarnation}"):
            await asked
        await registering


async def test_a_session_is_not_notified_either_before_its_successor_is_durable(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as served:
        old = await served.register("a")
        stream = served.calls.Session()
        await stream.write(pb.WorkerMessage(hello=pb.Hello(worker_id="a", incarnation=old.incarnation)))
        while (await stream.read()).WhichOneof("body") != "welcome":
            pass
        registering = await served.register_at_the_gate("a")
        await stream.write(pb.WorkerMessage(heartbeat=pb.HeartbeatRequest()))

        async def hear_stale() -> pb.Stale:
            while (message := await stream.read()).WhichOneof("body") != "stale":
                pass
            stale: pb.Stale = message.stale
            return stale

        hearing = asyncio.create_task(hear_stale())
        assert not await is_answered(hearing)
        served.journal.gate.set()
        assert (await asyncio.wait_for(hearing, PATIENCE_S)).reason
        await registering


async def test_who_reads_gets_a_turn_between_two_commits_however_many_follow(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as served:
        await served.register("a")
        over = False

        async def swap_without_end(key: str) -> None:
            version = 0
            while not over:
                command = SwapValue(key=key, body=b"x", expected_version=version)
                answer = await served.engine.submit(command)
                assert isinstance(answer, Swapped)
                version = answer.version

        served.journal.gate.clear()
        served.journal.waiting.clear()
        writing = [asyncio.create_task(swap_without_end("one"))]
        assert await asyncio.to_thread(served.journal.waiting.wait, PATIENCE_S)
        writing.append(asyncio.create_task(swap_without_end("other")))
        await asyncio.sleep(
            0
        )  # It is in the queue: from now on one of the two always waits for the other's commit.
        served.journal.gate.set()
        for number in range(20):
            beat = pb.HeartbeatRequest(worker_id="a", status=pb.WorkerStatus(current_step=number))
            await served.calls.Heartbeat(beat, timeout=PATIENCE_S)
        over = True
        await asyncio.gather(*writing)


ARRIVAL = pb.WaitBarrierRequest(barrier_id="b", step=1, call_id=b"one")


@pytest.mark.parametrize("arrives", ["by itself", "by its machine"])
async def test_a_deposed_leader_ends_sessions_instead_of_answering_them(tmp_path: Path, arrives: str) -> None:
    """The worker comes back, finds who leads and says it again. It is not refused, and not called stale."""
    async with coordinator(tmp_path) as served:
        one, _ = await served.register("a"), await served.register("b")

        async def deposed() -> None:
            raise Standby(None)

        served.engine.confirmed = deposed
        stream = served.calls.Session()
        if arrives == "by its machine":
            await stream.write(pb.WorkerMessage(machine=pb.MachineHello(host="h")))
            attach = pb.Attach(worker_id="a", incarnation=one.incarnation)
            await stream.write(pb.WorkerMessage(member=1, attach=attach))
            arrivals = pb.Arrivals(barrier=ARRIVAL, members=[1], call_ids=[b"one"])
            await stream.write(pb.WorkerMessage(arrivals=arrivals))
        else:
            await stream.write(pb.WorkerMessage(hello=pb.Hello(worker_id="a", incarnation=one.incarnation)))
            await stream.write(pb.WorkerMessage(barrier=ARRIVAL))
        heard = set()
        with suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(PATIENCE_S):
                async for message in stream:
                    heard.add(message.WhichOneof("body"))
        assert not heard & {"barrier", "outcomes", "stale"}
