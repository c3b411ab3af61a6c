"""The `Session` stream: the hot path of every worker, and how a dropped connection is noticed at once. See `machines` for those of
machines, whose agents speak for their workers.

Heartbeats touch soft state only and arrivals are handed over without waiting. A stream is read no faster than its
share, so one that floods slows no other; one whose peer does not read ends within a second of being over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.engine import Engine, Unavailable
from strata.coordinator.grpc.machines import Machines, MachineSession
from strata.coordinator.grpc.middleware import (
    Context,
    GrpcAccess,
    barrier_text,
    next_message,
    read_hello,
    refuse,
)
from strata.coordinator.grpc.sessions import Sessions, WorkerSession
from strata.coordinator.grpc.waits import Outcome
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.instruments import CoordinatorMetrics
from strata.coordinator.metrics.run_history import RunHistory
from strata.core.messages import (
    DEFAULT_JOB,
    DeregisterWorker,
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
from strata.core.telemetry.loglines import LogLine
from strata.core.telemetry.run_metrics import MetricBatch
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import wire

MESSAGES_PER_SECOND = 2_000
"""What one session may send on average; it is read more slowly beyond that."""
BURST_S = 0.1
"""So many seconds' worth may come at once: a flood is evenly spread, and not the whole second's before everybody else."""
LOG_LINES_PER_BATCH = 2_000
LOG_LINES_AT_ONCE = 100
ITEMS_PER_MESSAGE = 20
"""So many log lines or shards in one message weigh as much as a message."""
FLUSH_S = 1.0
"""How long a session that is over may take to read why."""
BYTES_PER_MESSAGE = 8_192
"""So many bytes of metrics weigh as much as a message."""


class Streams:
    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        logs: LogStore,
        metrics: CoordinatorMetrics,
        access: GrpcAccess,
        run_history: RunHistory | None,
        *,
        heartbeat_interval_ms: int,
        on_metrics: Callable[[JobId, MetricBatch], None],
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._logs = logs
        self._metrics = metrics
        self._access = access
        self._run_history = run_history
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._on_metrics = on_metrics
        self.machines = Machines(
            engine,
            sessions,
            metrics,
            self._take,
            messages_per_second=MESSAGES_PER_SECOND,
            burst_s=BURST_S,
            welcome=self._welcoming,
        )

    async def serve(self, context: Context) -> None:
        """From the hello to the end, whichever side ends it."""
        caller: Principal | None = None
        try:
            caller = self._access.identify(context)
            session = await self._welcome(context, caller)
        except StrataError as error:
            if isinstance(error, Forbidden):
                self._access.audit(context, caller, "Session", refusal=error.message)
            if isinstance(error, Stale | Unknown):
                await context.write(wire.stale(error))
            await refuse(context, error)
        writer = asyncio.create_task(self._write(session, context))
        if isinstance(session, MachineSession):
            reader = asyncio.create_task(self.machines.read(session, context))
        else:
            reader = asyncio.create_task(self._read(session, context))
        for task in (writer, reader):
            task.add_done_callback(_look_at)
        try:
            await asyncio.wait({writer, reader, session.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            if isinstance(session, MachineSession):
                self.machines.close(session)
            else:
                self._sessions.close(session)
            await asyncio.wait({writer}, timeout=FLUSH_S)
            writer.cancel()
            failed, _ = await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(failed, StrataError):
            await refuse(context, failed)

    async def _welcome(self, context: Context, caller: Principal) -> WorkerSession | MachineSession:
        hello = await read_hello(context, of="a session", named="Hello", also="machine")
        if isinstance(hello, pb.MachineHello):
            return self.machines.open(hello, caller)
        self._metrics.request("Session.hello")
        cluster = await self._engine.settled()
        worker_id = WorkerId(hello.worker_id)
        caller.require_incarnation(hello.incarnation)
        member = cluster.membership.admit(worker_id, incarnation=hello.incarnation)
        caller.require_job(member.spec.job_id)
        session = self._sessions.open(worker_id, member.incarnation)
        session.caller = caller
        session.push(pb.CoordinatorMessage(welcome=self._welcoming()))
        return session

    def _welcoming(self) -> pb.Welcome:
        return pb.Welcome(
            server_timestamp_ms=time.time_ns() // 1_000_000,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
        )

    async def _write(self, session: WorkerSession | MachineSession, context: Context) -> None:
        while messages := await session.next_messages():
            for message in messages:
                await context.write(message)

    async def _read(self, session: WorkerSession, context: Context) -> None:
        pace, weight = Pace(), 0
        while not session.over:
            message = await next_message(context)
            if message is None:
                return
            try:
                weight += await self._take(session, message)
            except (Stale, Unknown) as error:
                await self._engine.settled()  # What it is refused for may not be durable yet.
                session.push(wire.stale(error))
                raise
            if weight >= MESSAGES_PER_SECOND * BURST_S:
                # Back-pressure for a worker that sends more in a moment than may come in it.
                await asyncio.sleep(pace.take(weight / MESSAGES_PER_SECOND, time.monotonic()))
                weight = 0

    async def _take(self, session: WorkerSession, message: pb.WorkerMessage) -> int:
        """Handle one message; returns its weight in messages."""
        match message.WhichOneof("body"):
            case "heartbeat":
                self._metrics.request("Session.heartbeat")
                beat = message.heartbeat
                beat.worker_id, beat.incarnation = session.worker_id, session.incarnation
                self._engine.observe(wire.heartbeat(beat))
            case "barrier":
                self._metrics.request("Session.barrier")
                self._arrive(session, message.barrier)
            case "progress":
                self._metrics.request("Session.progress")
                progress = wire.progress(message.progress, session.worker_id, session.incarnation)
                self._engine.observe(progress)
                return 1 + len(message.progress.shards) // ITEMS_PER_MESSAGE
            case "logs":
                self._metrics.request("Session.logs")
                await self._log(session, message.logs)
                return 1 + len(message.logs.entries) // ITEMS_PER_MESSAGE
            case "metrics":
                self._metrics.request("Session.metrics")
                self._keep_metrics(session, message.metrics)
                return 1 + sum(len(rows.values) for rows in message.metrics.rows) // BYTES_PER_MESSAGE
            case "goodbye":
                self._metrics.request("Session.goodbye")
                self._leave(session, message.goodbye.reason)
            case _:
                pass  # A newer worker may say more than this version understands.
        return 1

    async def _log(self, session: WorkerSession, batch: pb.LogBatch) -> None:
        """Few lines at a time, so that a large batch does not hold up what others say."""
        # Where a line comes from is for us to say: its sender could claim to be any worker.
        task_id = "" if session.job_id == DEFAULT_JOB else session.job_id
        count = min(len(batch.entries), LOG_LINES_PER_BATCH)
        lost = len(batch.entries) - count + batch.dropped
        sender = f"worker {session.worker_id}"
        for first in range(0, max(count, 1), LOG_LINES_AT_ONCE):
            entries = batch.entries[first : min(first + LOG_LINES_AT_ONCE, count)]
            lines = [LogLine(e.timestamp, e.level, e.message, "worker", task_id) for e in entries]
            self._logs.add_lines(lines, sender=sender, worker_id=session.worker_id, dropped=lost)
            lost = 0
            if first + LOG_LINES_AT_ONCE < count:
                await asyncio.sleep(0)

    def _keep_metrics(self, session: WorkerSession, message: pb.MetricBatch) -> None:
        """Answered once it is on disk; one that cannot be kept is answered with the reason."""
        loop = asyncio.get_running_loop()
        kept = pb.MetricsKept(number=message.number, started_ms=message.started_ms)

        def answer() -> None:
            session.push(pb.CoordinatorMessage(metrics_kept=kept))

        def answer_later() -> None:
            with suppress(RuntimeError):  # The loop has ended; so has the session.
                loop.call_soon_threadsafe(answer)

        member = self._engine.cluster.membership.members.get(session.worker_id)
        run = member.spec.run_id if member is not None else ""
        try:
            batch = wire.metric_batch(message)
        except InvalidArgument as refusal:
            kept.refused = str(refusal)
            answer()
            return
        self._on_metrics(session.job_id, batch)
        if self._run_history is None:
            kept.refused = "The coordinator has no disk space for metrics of runs."
            answer()
            return
        self._run_history.put(run or session.job_id, session.job_id, batch, answer_later)

    def _leave(self, session: WorkerSession, reason: str) -> None:
        """Answered, and the session ended, once it is durable; one that is refused is sent the reason."""

        def answered(reply: Reply | StrataError) -> None:
            if isinstance(reply, StrataError):
                if not isinstance(reply, Unavailable):
                    session.push(wire.stale(reply))
                session.end(str(reply))

        command = DeregisterWorker(
            worker_id=session.worker_id, incarnation=session.incarnation, reason=reason
        )
        try:
            self._engine.post(command, answered)
        except Unavailable as refusal:
            session.end(str(refusal))  # The worker comes back and says it again.

    def _arrive(self, session: WorkerSession, request: pb.WaitBarrierRequest) -> None:
        request.worker_id, request.incarnation = session.worker_id, session.incarnation

        def answer(outcome: pb.WaitBarrierResponse, error_code: str, error_cause: str = "") -> None:
            message = pb.CoordinatorMessage()  # Filled in place: nested constructors copy by way of bytes.
            message.barrier.call_id = request.call_id
            message.barrier.outcome.CopyFrom(outcome)
            message.barrier.error_code = error_code
            message.barrier.error_cause = error_cause
            session.push(message)

        def deliver(ended: Outcome, order: int) -> None:
            outcome = wire.barrier_outcome(ended, order)
            if not outcome.released:
                outcome.reason = barrier_text(request, outcome.reason)
            answer(outcome, "" if outcome.released else "barrier_broken")

        def refused(refusal: StrataError) -> None:
            cause = refusal.cause if isinstance(refusal, Refused) else ""
            answer(pb.WaitBarrierResponse(released=False, reason=str(refusal)), refusal.code, cause)

        def answered(reply: Reply | StrataError) -> None:
            if isinstance(reply, Unavailable):
                not_now(reply)
            elif isinstance(reply, StrataError):
                wait.close()
                refused(reply)
            else:
                wait.begin(reply)

        def not_now(refusal: Unavailable) -> None:
            wait.close()
            # The worker comes back, to the coordinator that leads then, and arrives again.
            session.end(str(refusal))

        try:
            wait = self._sessions.waits.open(session.worker_id, deliver, owner=session)
        except Overloaded as refusal:
            refused(refusal)
            return
        try:
            self._engine.post(wire.arrive(request), answered)
        except Unavailable as refusal:
            not_now(refusal)


def _look_at(task: asyncio.Task[None]) -> None:
    """gRPC's errors on a stream that has ended are no news, also when no task is left to read them."""
    if not task.cancelled():
        task.exception()
