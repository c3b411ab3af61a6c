"""The gRPC face: decode, hand to the engine, encode. Refusals become statuses; nothing is decided here.

Unary calls answer any gRPC client. The `Session` stream is the hot path: its heartbeats touch soft state only,
its arrivals are handed over without waiting, and one that floods is read more slowly and slows nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio

from strata.coordinator.engine import Engine, InternalError, Unavailable
from strata.coordinator.logs import LogStore
from strata.coordinator.metrics import CoordinatorMetrics
from strata.coordinator.sampling import count_samples
from strata.coordinator.sessions import Sessions, WorkerSession
from strata.coordinator.waits import Outcome
from strata.core import checks
from strata.core.messages import (
    Conflict,
    DatasetAccepted,
    DatasetId,
    InvalidArgument,
    JobId,
    Overloaded,
    PlanEpoch,
    RegisterDataset,
    Registered,
    Reply,
    Stale,
    Swapped,
    SwapValue,
    Unknown,
    WorkerId,
)
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc, wire
from strata.rpc.methods import Malformed

log = logging.getLogger("strata.coordinator.grpc")

HELLO_TIMEOUT_S = 10.0
MESSAGES_PER_SECOND = 2_000
"""What one session may send on average; it is read more slowly beyond that."""
LOG_LINES_PER_BATCH = 2_000
SHARDS_PER_PROGRESS = 10_000
SHARDS_AT_A_TIME = 1_000
ITEMS_PER_MESSAGE = 20
"""So many log lines or shards in one message weigh as much as a message."""
LAST_WORDS_S = 1.0
"""How long a session that is over may take to read why."""

BROKEN_HINT = b"Look at the missing workers' logs; then meet at the barrier again."

_END: object = grpc.aio.EOF  # type: ignore[attr-defined]

_STATUSES: dict[type[StrataError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    Unknown: grpc.StatusCode.NOT_FOUND,
    Conflict: grpc.StatusCode.ALREADY_EXISTS,
    Stale: grpc.StatusCode.FAILED_PRECONDITION,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    InternalError: grpc.StatusCode.INTERNAL,
}

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Answer = TypeVar("Answer")


def _call(
    handler: Callable[[CoordinatorService, Request, Context], Awaitable[Answer]],
) -> Callable[[CoordinatorService, Request, Context], Awaitable[Answer]]:
    """Count the call and turn refusals into statuses, the same way for every unary method."""
    name = handler.__name__

    async def call(self: CoordinatorService, request: Request, context: Context) -> Answer:
        self.metrics.request(name)
        try:
            if isinstance(request, Malformed):
                raise unreadable(request)
            return await handler(self, request, context)
        except StrataError as error:
            await refuse(context, error)

    call.__name__ = name
    return call


async def refuse(context: Context, error: StrataError) -> NoReturn:
    status = _STATUSES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION)
    trailers = (("strata-code", error.code), ("strata-hint-bin", error.hint.encode()))
    await context.abort(status, str(error), trailers)
    raise AssertionError("abort always raises")


def unreadable(message: Malformed) -> InvalidArgument:
    return InvalidArgument(
        "message",
        f"cannot be read: {message.why}.",
        hint="Send what proto/strata/rpc/coordinator.proto describes; texts must be UTF-8.",
    )


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        logs: LogStore,
        metrics: CoordinatorMetrics,
        *,
        heartbeat_interval_s: float,
        worker_config: dict[str, str],
    ) -> None:
        self.engine = engine
        self.sessions = sessions
        self.logs = logs
        self.metrics = metrics
        self.heartbeat_interval_ms = int(heartbeat_interval_s * 1000)
        self.worker_config = worker_config

    # --- membership -----------------------------------------------------------------------------------------

    @_call
    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Context
    ) -> pb.RegisterWorkerResponse:
        reply = cast(Registered, await self.engine.submit(wire.register_worker(request)))
        membership = (await self.engine.settled()).membership
        job = JobId(request.job_id or "default")
        roster = membership.roster(job)
        return pb.RegisterWorkerResponse(
            assigned_id=reply.worker_id,
            rank=roster.get(reply.worker_id, 0),
            world_size=len(roster),
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            config=self.worker_config,
            incarnation=reply.incarnation,
            generation=membership.job_generations[job],
        )

    @_call
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        generation = self._heard(request)
        response = pb.HeartbeatResponse(
            acknowledged=True, server_timestamp_ms=time.time_ns() // 1_000_000, generation=generation
        )
        if request.generation and request.generation != generation:
            response.pending_commands.add(
                command_id=f"topology-{generation}",
                kind="topology",
                arguments={"generation": str(generation)},
            )
        return response

    @_call
    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: Context
    ) -> pb.DeregisterWorkerResponse:
        await self.engine.submit(wire.deregister_worker(request))
        return pb.DeregisterWorkerResponse(acknowledged=True)

    def _heard(self, beat: pb.HeartbeatRequest) -> int:
        """Soft: nothing is journaled, nothing waits. Returns the job's present generation."""
        membership = self.engine.cluster.membership
        worker_id = WorkerId(beat.worker_id)
        member = membership.admit(worker_id, incarnation=beat.incarnation)
        report = wire.report(beat)
        checks.report(report)
        membership.heard(worker_id, self.engine.clock.now())
        membership.reports[worker_id] = report
        return membership.job_generations[member.spec.job_id]

    # --- data -----------------------------------------------------------------------------------------------

    @_call
    async def RegisterDataset(
        self, request: pb.RegisterDatasetRequest, context: Context
    ) -> pb.RegisterDatasetResponse:
        total, files = await count_samples(request.path, request.format, request.total_samples or None)
        command = RegisterDataset(spec=wire.dataset_spec(request, files, total))
        reply = cast(DatasetAccepted, await self.engine.submit(command))
        return pb.RegisterDatasetResponse(
            dataset_id=reply.spec.dataset_id,
            total_shards=reply.spec.shard_count,
            created=reply.created,
            total_samples=reply.spec.total_samples,
        )

    @_call
    async def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: Context
    ) -> pb.ListDatasetsResponse:
        datasets = (await self.engine.settled()).datasets
        return pb.ListDatasetsResponse(
            datasets=[wire.dataset(s, datasets.registered_at_s[i]) for i, s in datasets.specs.items()]
        )

    @_call
    async def GetDataShard(
        self, request: pb.GetDataShardRequest, context: Context
    ) -> pb.GetDataShardResponse:
        worker_id, dataset_id = WorkerId(request.worker_id), DatasetId(request.dataset_id)
        cluster = await self.engine.settled()
        member = cluster.membership.admit(
            worker_id, incarnation=request.incarnation, generation=request.generation
        )
        spec = cluster.datasets.get(dataset_id)
        key = (member.spec.job_id, dataset_id, int(request.epoch))
        if key not in cluster.datasets.plans:
            await self.engine.submit(
                PlanEpoch(
                    worker_id=worker_id,
                    incarnation=request.incarnation,
                    generation=request.generation,
                    dataset_id=dataset_id,
                    epoch=int(request.epoch),
                )
            )
            cluster = await self.engine.settled()
        datasets = cluster.datasets
        plan = datasets.plans[key].plan
        generation = cluster.membership.job_generations[member.spec.job_id]
        shards = []
        for number, shard in enumerate(datasets.shards_of(worker_id, key), 1):
            shards.append(wire.shard(shard, spec, key[2], datasets.files_of(spec, shard)))
            if number % SHARDS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # A worker with a hundred thousand shards is not the only one here.
        return pb.GetDataShardResponse(
            shards=shards,
            plan_version=plan.version,
            generation=generation,
            reason=plan.reason,
        )

    # --- barriers -------------------------------------------------------------------------------------------

    @_call
    async def WaitBarrier(self, request: pb.WaitBarrierRequest, context: Context) -> pb.WaitBarrierResponse:
        ended: asyncio.Future[tuple[Outcome, int]] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Outcome, order: int) -> None:
            if not ended.done():
                ended.set_result((outcome, order))

        wait = self.sessions.waits.open(WorkerId(request.worker_id), deliver)
        try:
            await self.engine.submit(wire.arrive(request), then=wait.begin)
            outcome, order = await ended
        finally:
            wait.close()
        answer = wire.barrier_outcome(outcome, order)
        if not answer.released:
            trailers = (
                ("strata-code", "barrier_broken"),
                ("strata-hint-bin", BROKEN_HINT),
                ("strata-missing-bin", "\n".join(answer.missing).encode()),
            )
            await context.abort(grpc.StatusCode.ABORTED, barrier_text(request, answer.reason), trailers)
        return answer

    # --- checkpoints ----------------------------------------------------------------------------------------

    @_call
    async def NotifyCheckpoint(
        self, request: pb.NotifyCheckpointRequest, context: Context
    ) -> pb.CheckpointAck:
        command = wire.notify_checkpoint(request)
        await self.engine.submit(command)
        return pb.CheckpointAck(
            acknowledged=True,
            checkpoint_id=request.checkpoint_id,
            status=wire.STATUS_NUMBERS[command.status],  # type: ignore[arg-type]
        )

    @_call
    async def GetLatestCheckpoint(
        self, request: pb.GetLatestCheckpointRequest, context: Context
    ) -> pb.RecoveryResponse:
        cluster = await self.engine.settled()
        worker_id = WorkerId(request.worker_id)
        job = JobId(request.job_id)
        if not job:
            job = cluster.membership.admit(worker_id, incarnation=0).spec.job_id
        record = cluster.checkpoints.latest(job)
        if record is None:
            return pb.RecoveryResponse(has_checkpoint=False)
        datasets = cluster.datasets
        shards = [
            wire.shard(
                shard, datasets.specs[key[1]], key[2], datasets.files_of(datasets.specs[key[1]], shard)
            )
            for key in datasets.plans
            if key[0] == job and key[2] == record.epoch
            for shard in datasets.shards_of(worker_id, key)
        ]
        return pb.RecoveryResponse(
            has_checkpoint=True,
            latest_checkpoint=wire.checkpoint(record),
            resume_step=record.step,
            resume_epoch=record.epoch,
            shard_assignments=shards,
        )

    @_call
    async def ReportRecovery(
        self, request: pb.ReportRecoveryRequest, context: Context
    ) -> pb.ReportRecoveryResponse:
        await self.engine.submit(wire.report_recovery(request))
        return pb.ReportRecoveryResponse(acknowledged=True)

    # --- values ---------------------------------------------------------------------------------------------

    @_call
    async def ReadValue(self, request: pb.ReadValueRequest, context: Context) -> pb.ValueResponse:
        value = (await self.engine.settled()).values.values.get(request.key)
        if value is None:
            return pb.ValueResponse()
        return pb.ValueResponse(value=value.body, version=value.version)

    @_call
    async def SwapValue(self, request: pb.SwapValueRequest, context: Context) -> pb.ValueResponse:
        command = SwapValue(key=request.key, body=request.value, expected_version=request.expected_version)
        reply = cast(Swapped, await self.engine.submit(command))
        return pb.ValueResponse(swapped=reply.made, value=reply.body, version=reply.version)

    # --- session --------------------------------------------------------------------------------------------

    async def Session(self, request_iterator: object, context: Context) -> None:
        try:
            session = await self._welcome(context)
        except StrataError as error:
            if isinstance(error, Stale | Unknown):
                await context.write(pb.CoordinatorMessage(stale=pb.Stale(reason=str(error))))
            await refuse(context, error)
        writer = asyncio.create_task(self._write(session, context))
        reader = asyncio.create_task(self._read(session, context))
        try:
            await asyncio.wait({writer, reader, session.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            self.sessions.close(session)
            await asyncio.wait({writer}, timeout=LAST_WORDS_S)
            writer.cancel()
            failed, _ = await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(failed, StrataError):
            await refuse(context, failed)

    async def _welcome(self, context: Context) -> WorkerSession:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise InvalidArgument("hello", "did not come.", hint="Send Hello first.") from None
        if isinstance(first, Malformed):
            raise unreadable(first)
        if first is _END or first.WhichOneof("body") != "hello":
            raise InvalidArgument(
                "hello", "must be the first message of a session.", hint="Send Hello first."
            )
        self.metrics.request("Session.hello")
        cluster = await self.engine.settled()
        worker_id = WorkerId(first.hello.worker_id)
        member = cluster.membership.admit(worker_id, incarnation=first.hello.incarnation)
        session = self.sessions.open(worker_id, member.incarnation)
        session.push(
            pb.CoordinatorMessage(
                welcome=pb.Welcome(
                    server_timestamp_ms=time.time_ns() // 1_000_000,
                    heartbeat_interval_ms=self.heartbeat_interval_ms,
                )
            )
        )
        return session

    async def _write(self, session: WorkerSession, context: Context) -> None:
        while messages := await session.next_messages():
            for message in messages:
                await context.write(message)

    async def _read(self, session: WorkerSession, context: Context) -> None:
        since_s, weight = time.monotonic(), 0
        while not session.over:
            message = await context.read()
            if message is _END:
                return
            if isinstance(message, Malformed):
                raise unreadable(message)
            try:
                weight += self._take(session, message)
            except (Stale, Unknown) as error:
                session.push(pb.CoordinatorMessage(stale=pb.Stale(reason=str(error))))
                raise
            if weight >= MESSAGES_PER_SECOND:
                # Back-pressure for whoever sends faster than a second's worth in a second.
                pause_s = since_s + weight / MESSAGES_PER_SECOND - time.monotonic()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                since_s, weight = time.monotonic(), 0

    def _take(self, session: WorkerSession, message: pb.WorkerMessage) -> int:
        """Handle one message; returns its weight in messages."""
        match message.WhichOneof("body"):
            case "heartbeat":
                self.metrics.request("Session.heartbeat")
                beat = message.heartbeat
                beat.worker_id, beat.incarnation = session.worker_id, session.incarnation
                self._heard(beat)
            case "barrier":
                self.metrics.request("Session.barrier")
                self._arrive(session, message.barrier)
            case "progress":
                self.metrics.request("Session.progress")
                self._progress(session, message.progress)
                return 1 + len(message.progress.shards) // ITEMS_PER_MESSAGE
            case "logs":
                self.metrics.request("Session.logs")
                entries = message.logs.entries[:LOG_LINES_PER_BATCH]
                lines = ((e.timestamp, e.level, e.message, e.source, e.task_id) for e in entries)
                lost = len(message.logs.entries) - len(entries) + message.logs.dropped
                self.logs.add_from_worker(session.worker_id, lines, dropped=lost)
                return 1 + len(message.logs.entries) // ITEMS_PER_MESSAGE
            case _:
                pass  # A newer worker may say more than this version understands.
        return 1

    def _arrive(self, session: WorkerSession, request: pb.WaitBarrierRequest) -> None:
        request.worker_id, request.incarnation = session.worker_id, session.incarnation

        def deliver(outcome: Outcome, order: int) -> None:
            answer = wire.barrier_outcome(outcome, order)
            code = "" if answer.released else "barrier_broken"
            if code:
                answer.reason = barrier_text(request, answer.reason)
            session.push(
                pb.CoordinatorMessage(
                    barrier=pb.BarrierOutcome(call_id=request.call_id, outcome=answer, error_code=code)
                )
            )

        def refused(refusal: StrataError) -> None:
            answer = pb.WaitBarrierResponse(released=False, reason=str(refusal))
            session.push(
                pb.CoordinatorMessage(
                    barrier=pb.BarrierOutcome(
                        call_id=request.call_id, outcome=answer, error_code=refusal.code
                    )
                )
            )

        def answered(reply: Reply | StrataError) -> None:
            if isinstance(reply, StrataError):
                wait.close()
                refused(reply)
            else:
                wait.begin(reply)

        try:
            wait = self.sessions.waits.open(session.worker_id, deliver, owner=session)
        except Overloaded as refusal:
            refused(refusal)
            return
        try:
            self.engine.post(wire.arrive(request), answered)
        except Unavailable as refusal:
            wait.close()
            session.end(str(refusal))  # The worker comes back and arrives again.

    def _progress(self, session: WorkerSession, progress: pb.Progress) -> None:
        membership = self.engine.cluster.membership
        member = membership.admit(session.worker_id, incarnation=session.incarnation)
        if progress.generation and progress.generation != membership.job_generations[member.spec.job_id]:
            return  # Progress of a generation that is over does not count; its reader is being told.
        checks.between("shards in one progress message", len(progress.shards), 0, SHARDS_PER_PROGRESS)
        for item in progress.shards:
            key = (member.spec.job_id, DatasetId(item.dataset_id), int(item.epoch))
            self.engine.cluster.datasets.report(key, int(item.shard_id), int(item.samples_done))


def barrier_text(request: pb.WaitBarrierRequest, reason: str) -> str:
    return f"Barrier '{request.barrier_id}' at step {request.step} was broken: {reason}."
