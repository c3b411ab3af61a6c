"""The background thread that keeps a worker in touch with its coordinator.

One thread, one event loop, one stream. Heartbeats go out on time whatever the training thread does, also while it waits at a
barrier. A lost connection is taken up again with back-off and jitter, under the same incarnation, with whichever of the
coordinators leads by then (`strata.leader`); barrier arrivals that were waiting are sent again and count once. When the
coordinator says that this incarnation is over, everything that waits fails with `StaleWorker` and nothing more is sent.

Nothing here ever blocks a training step: callers hand over values and, where they want an answer, wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from strata.backoff import Backoff
from strata.leader import Coordinators, Search
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.frames import SESSIONS_VARIABLE
from strata.rpc.stubs import Stubs
from strata.worker.address import split_addresses
from strata.worker.agent_stream import AgentStream
from strata.worker.errors import (
    BarrierBroken,
    CoordinatorRefused,
    CoordinatorStorageFull,
    CoordinatorUnavailable,
    NoLeader,
    SessionClosed,
    StaleWorker,
    from_rpc,
)
from strata.worker.outbox import LogOutbox, MetricOutbox
from strata.worker.resources import ResourceSampler

log = logging.getLogger("strata.worker.session")

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
RECONNECT_S = 0.2
"""The longest pause after a session that was welcome: less than a coordinator waits for one whose connection dropped, so that a
network that resets connections again and again does not get a worker failed."""
LOG_FLUSH_S = 0.2
LAST_METRICS_S = 2.0
"""How long the last metrics may take to be answered before the goodbye."""
GOODBYE_S = 4.0
"""How long the coordinator may take to answer a goodbye on the session, and then a call that repeats it."""
ANSWER_MARGIN_S = 5.0
"""How long after a barrier's time-out the coordinator may take to say so."""
ATTEMPT_S = 3.0
"""How long one of several coordinators may take to answer a call before another is asked; each time twice as long."""
LEAST_ATTEMPT_S = 0.5
"""What the last attempt of a call has, so that what a coordinator answers is heard, and raised."""
CLOSE_S = 10.0
"""How long ending the connections may take."""
MESSAGE_LIMIT_BYTES = 64 << 20

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # How long one attempt may take.
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
]
SEVERAL_OPTIONS = [
    # One that is frozen answers no pings, and another leads within seconds.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where this worker stands in the present generation."""

    rank: int
    world_size: int
    generation: int
    reason: str


class SessionThread:
    """`address` is HOST:PORT, or several of them between commas."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        call_timeout_s: float = 30.0,
    ) -> None:
        self.coordinators = Coordinators(split_addresses(address), follows_unlisted=credentials is not None)
        self.call_timeout_s = call_timeout_s
        self.logs = LogOutbox()
        self.metrics: MetricOutbox | None = None
        """What training logs, if it is set."""
        self.status = pb.WorkerStatus(state="active")
        self.registration: pb.RegisterWorkerResponse | None = None
        self.topology: Topology | None = None
        self.stale_reason = ""
        self.stale_cause = ""
        """Why this incarnation is over, in a word: see `StaleWorker`. Empty from a coordinator that does not say."""
        self.on_topology: Callable[[Topology], None] = lambda topology: None
        self.on_plan: Callable[[str, int], None] = lambda dataset_id, version: None
        self.on_stale: Callable[[str], None] = lambda reason: None
        self.connected = threading.Event()
        self.is_closed = False
        self._credentials = credentials
        self._token = token
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._pid = os.getpid()
        self._waiting: dict[bytes, tuple[pb.WaitBarrierRequest, asyncio.Future[pb.BarrierOutcome]]] = {}
        self._progress: dict[tuple[str, int, int], int] = {}
        self._sampler = ResourceSampler()
        self._session: asyncio.Task[None] | None = None
        self._goodbye: str | None = None
        """Why this worker leaves, once it does: the session's last word."""
        self._has_left = False
        self._wake: asyncio.Event
        self._logs_sent: asyncio.Event
        self._answered: asyncio.Event
        """The coordinator has answered for some metrics."""
        self._closing = threading.Lock()
        """What is given to the loop is given before it ends."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="strata-session", daemon=True)
        self._thread.start()
        self._ready.wait()

    # --- for any thread -------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of the coordinator that leads, as far as is known."""
        return self.coordinators.current

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the session's loop."""
        if os.getpid() != self._pid:
            work.close()
            raise RuntimeError(
                "This session belongs to the process that created it; create a new TrainingOrchestrator after a fork."
            )
        with self._closing:
            if not self.is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise SessionClosed(self.address)

    def report_progress(self, dataset_id: str, epoch: int, shard_id: int, samples_done: int) -> None:
        self.must_be_current()
        self._progress[(dataset_id, epoch, shard_id)] = samples_done

    def must_be_current(self) -> None:
        if self.stale_reason:
            raise _stale(self.stale_reason, self.stale_cause)

    def close(self) -> None:
        if not self._thread.is_alive() or os.getpid() != self._pid:
            return
        with self._closing:
            if not self.is_closed:
                self.is_closed = True
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        self._thread.join(CLOSE_S)

    # --- calls, on the loop ---------------------------------------------------------------------------------

    async def register(self, request: pb.RegisterWorkerRequest) -> pb.RegisterWorkerResponse:
        await self._end_session()
        request.registration_id = secrets.token_bytes(16)
        answer: pb.RegisterWorkerResponse = await self.call("RegisterWorker", request)
        self.registration = answer
        self.stale_reason = self.stale_cause = ""
        self._goodbye, self._has_left = None, False
        self._progress.clear()  # What an incarnation that is over had read does not count for this one.
        self.topology = Topology(
            rank=answer.rank, world_size=answer.world_size, generation=answer.generation, reason="registered"
        )
        self._session = self._loop.create_task(self._keep_session(answer))
        return answer

    async def deregister(self, reason: str) -> None:
        """Leave, after everything that was said before: goodbye travels on the session. A call is the fallback."""
        registration = self.registration
        if registration is None or self.stale_reason:
            return
        self._goodbye = reason
        self._wake.set()
        try:
            if self._session is not None:
                await asyncio.wait({self._session}, timeout=GOODBYE_S)
            if not self._has_left:
                request = pb.DeregisterWorkerRequest(
                    worker_id=registration.assigned_id, incarnation=registration.incarnation, reason=reason
                )
                await self.call("DeregisterWorker", request, timeout_s=GOODBYE_S)
        except CoordinatorRefused as refusal:
            if refusal.reason_code not in ("not_found", "stale"):
                raise  # Those mean that the goodbye arrived after all.
        finally:
            self.registration = None
            await self._end_session()

    async def call(self, method: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """A unary call, retried while no coordinator that leads is reached. Every call of the contract may be repeated safely."""
        budget_s = timeout_s if timeout_s is not None else self.call_timeout_s
        deadline_s = time.monotonic() + budget_s
        backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, budget_s=budget_s)
        search = self.coordinators.search()
        attempt_s = ATTEMPT_S if self.coordinators.are_several else budget_s
        while True:
            if self.is_closed:  # While it waited: there is no channel any more.
                raise SessionClosed(self.address)
            remaining_s = max(LEAST_ATTEMPT_S, deadline_s - time.monotonic())
            try:
                answer = await self._stubs(search.address).call_async(
                    method, request, timeout=min(attempt_s, remaining_s), metadata=self._metadata
                )
                search.worked()
                return answer
            except grpc.aio.AioRpcError as error:
                failure = from_rpc(error, search.address)
                if not isinstance(failure, CoordinatorUnavailable):
                    raise failure from None
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    attempt_s *= 2
                if self._is_next(search, failure) and time.monotonic() < deadline_s:
                    continue
                pause_s = backoff.pause_s()
                if pause_s is None:
                    raise self._none_leads(search, failure) from None
            await asyncio.sleep(pause_s)

    def _is_next(self, search: Search, failure: CoordinatorUnavailable) -> bool:
        """Whether another coordinator is to be asked at once. One whose disk is full leads all the same."""
        if isinstance(failure, CoordinatorStorageFull):
            return False
        return search.failed(failure.why, leader=failure.leader)

    def _none_leads(self, search: Search, failure: CoordinatorUnavailable) -> CoordinatorUnavailable:
        if not self.coordinators.are_several or isinstance(failure, CoordinatorStorageFull):
            return failure
        return NoLeader(",".join(self.coordinators.addresses), search.report())

    async def wait_barrier(self, request: pb.WaitBarrierRequest) -> pb.WaitBarrierResponse:
        """Arrive, and wait until the barrier ends, over as many connections as it takes."""
        request.call_id = secrets.token_bytes(16)
        self.must_be_current()
        future: asyncio.Future[pb.BarrierOutcome] = self._loop.create_future()
        self._waiting[request.call_id] = (request, future)
        self._wake.set()
        patience_s = request.timeout_ms / 1000 + ANSWER_MARGIN_S if request.timeout_ms else None
        try:
            async with asyncio.timeout(patience_s):
                outcome = await future
        except TimeoutError:
            raise CoordinatorUnavailable(self.address, "it has not reported how the barrier ended") from None
        finally:
            self._waiting.pop(request.call_id, None)
        answer = outcome.outcome
        if outcome.error_code == "barrier_broken":
            raise BarrierBroken(answer.reason, missing=tuple(answer.missing))
        if outcome.error_code == "stale":
            raise _stale(answer.reason, outcome.error_cause)
        if outcome.error_code:
            raise CoordinatorRefused(outcome.error_code, answer.reason)
        return answer

    # --- the session ----------------------------------------------------------------------------------------

    async def _keep_session(self, registration: pb.RegisterWorkerResponse) -> None:
        backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S)
        backoff.worked()
        search = self.coordinators.search()
        while not self.stale_reason:
            started_s = time.monotonic()
            failure: Exception = CoordinatorUnavailable(search.address, "the session ended")
            try:
                await self._run_session(registration, search)
                if self._has_left:
                    return
            except grpc.aio.AioRpcError as error:
                self._stubs(search.address).stream_failed(error)
                failure = from_rpc(error, search.address)
                if isinstance(failure, StaleWorker):
                    self._become_stale(failure)
                    return
                log.debug("session lost: %s", failure)
            except StaleWorker as stale:
                self._become_stale(stale)
                return
            except CoordinatorUnavailable as away:
                failure = away  # As this machine's agent has found.
            except asyncio.InvalidStateError:
                log.debug("session lost while something was being sent")
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                log.debug("session cancelled by the coordinator")
            finally:
                was_welcome = self.connected.is_set()
                self.connected.clear()
            if time.monotonic() - started_s > 5.0:
                backoff.worked()
            if isinstance(failure, CoordinatorUnavailable) and self._is_next(search, failure):
                continue
            pause_s = backoff.pause_s() or 0.0
            await asyncio.sleep(min(pause_s, RECONNECT_S) if was_welcome else pause_s)

    async def _open_stream(self, registration: pb.RegisterWorkerResponse, search: Search) -> Any:
        """By way of this machine's agent where there is one that speaks for its workers; else a stream of its own."""
        agent = os.environ.get(SESSIONS_VARIABLE)
        if agent:
            stream = await AgentStream.open(
                agent,
                address=search.address,
                token=self._token,
                secure=self._credentials is not None,
                several=self.coordinators.are_several,
                worker_id=registration.assigned_id,
                incarnation=registration.incarnation,
            )
            if stream is not None:
                return stream
        # Ready as soon as the channel is: a second back-off on top of the channel's would double the silence.
        waits = not self.coordinators.are_several
        stream = self._stubs(search.address).current.method("Session")(
            metadata=self._metadata, wait_for_ready=waits
        )
        hello = pb.Hello(worker_id=registration.assigned_id, incarnation=registration.incarnation)
        try:
            await stream.write(pb.WorkerMessage(hello=hello))
        except asyncio.InvalidStateError:
            await stream.read()  # It has ended already; this says how.
            raise
        return stream

    async def _run_session(self, registration: pb.RegisterWorkerResponse, search: Search) -> None:
        stream = await self._open_stream(registration, search)
        reader = self._loop.create_task(self._read(stream, search))
        try:
            sender = self._loop.create_task(self._send(stream, registration.heartbeat_interval_ms / 1000))
            try:
                done, _ = await asyncio.wait({reader, sender}, return_when=asyncio.FIRST_COMPLETED)
                for task in (reader, sender):  # What was read says more about an end than a failed write.
                    if task in done:
                        task.result()
                await reader  # All is said; the answer to the goodbye is still to come.
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        finally:
            reader.cancel()
            stream.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _send(self, stream: Any, interval_s: float) -> None:
        """Heartbeats on time, and in between whatever else there is to say. Returns after the last word."""
        sent_barriers: set[bytes] = set()
        next_beat_s = 0.0
        leave_by_s: float | None = None
        if self.metrics is not None:
            self.metrics.reconnected()
        while True:
            now_s = time.monotonic()
            for call_id, (request, _) in list(self._waiting.items()):
                if call_id not in sent_barriers:
                    sent_barriers.add(call_id)
                    await stream.write(pb.WorkerMessage(barrier=request))
            sent_barriers &= self._waiting.keys()
            if now_s >= next_beat_s:
                next_beat_s = now_s + interval_s
                await stream.write(pb.WorkerMessage(heartbeat=self._heartbeat()))
                await self._send_progress(stream)
            await self._send_logs(stream)
            if self.metrics is not None and (metrics := self.metrics.take()) is not None:
                await stream.write(pb.WorkerMessage(metrics=metrics))
            self._logs_sent.set()
            if self._goodbye is not None:
                leave_by_s = leave_by_s or now_s + LAST_METRICS_S
                if self.metrics is None or self.metrics.is_empty or now_s >= leave_by_s:
                    await self._send_progress(stream)
                    await stream.write(pb.WorkerMessage(goodbye=pb.Goodbye(reason=self._goodbye)))
                    return
            try:
                async with asyncio.timeout(min(LOG_FLUSH_S, max(0.0, next_beat_s - time.monotonic()))):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    def _heartbeat(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            timestamp_ms=time.time_ns() // 1_000_000, status=self.status, resources=self._sampler.sample()
        )

    async def _send_progress(self, stream: Any) -> None:
        if not self._progress:
            return
        progress, self._progress = self._progress, {}
        shards = [
            pb.ShardProgress(dataset_id=dataset, epoch=epoch, shard_id=shard, samples_done=done)
            for (dataset, epoch, shard), done in progress.items()
        ]
        generation = self.topology.generation if self.topology is not None else 0
        step = self.status.current_step
        await stream.write(
            pb.WorkerMessage(progress=pb.Progress(generation=generation, step=step, shards=shards))
        )

    async def _send_logs(self, stream: Any) -> None:
        while batch := self.logs.take():
            try:
                await stream.write(pb.WorkerMessage(logs=batch))
            except BaseException:
                self.logs.give_back(batch)
                raise

    async def _read(self, stream: Any, search: Search) -> None:
        while True:
            message = await stream.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                return
            match message.WhichOneof("body"):
                case "welcome":
                    search.worked()
                    if self.connected.is_set() and self.metrics is not None:
                        self.metrics.reconnected()  # The stream of this machine was opened again.
                        self._wake.set()
                    self.connected.set()
                case "topology":
                    self._take_topology(message.topology)
                case "plan":
                    _notify(self.on_plan, message.plan.dataset_id, message.plan.plan_version)
                case "barrier":
                    waiting = self._waiting.get(message.barrier.call_id)
                    if waiting is not None and not waiting[1].done():
                        waiting[1].set_result(message.barrier)
                case "metrics_kept":
                    if self.metrics is not None:
                        self.metrics.answered(message.metrics_kept)
                        self._answered.set()
                        self._wake.set()
                case "goodbye":
                    self._has_left = self._goodbye is not None
                case "stale":
                    raise _stale(message.stale.reason, message.stale.cause)
                case _:
                    pass  # A newer coordinator may say more than this version understands.

    def _take_topology(self, message: pb.Topology) -> None:
        topology = Topology(
            rank=message.rank,
            world_size=message.world_size,
            generation=message.generation,
            reason=message.reason,
        )
        changed = self.topology is None or topology.generation != self.topology.generation
        self.topology = topology
        if changed:
            log.debug("generation %d: %s", topology.generation, topology.reason)
            _notify(self.on_topology, topology)

    def _become_stale(self, stale: StaleWorker) -> None:
        if self._goodbye is not None:
            self._has_left = True  # It arrived, and its answer was lost on the way.
            return
        self.stale_cause = stale.cause
        self.stale_reason = stale.message
        log.warning("this worker's incarnation has ended: %s", stale.message)
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(_stale(stale.message, stale.cause))
        _notify(self.on_stale, stale.message)

    async def flush_metrics(self, timeout_s: float) -> None:
        """Give the coordinator a moment to answer for the last metrics."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.connected.is_set() and self.metrics is not None and not self.metrics.is_empty:
                    self._answered.clear()
                    self._wake.set()
                    await self._answered.wait()

    async def flush_logs(self) -> None:
        """Give lines written just before the end a moment to go out."""
        self._logs_sent.clear()
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * LOG_FLUSH_S):
                await self._logs_sent.wait()

    # --- thread and loop ------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_the_rest())
        self._loop.close()

    async def _open(self) -> None:
        self._wake = asyncio.Event()
        self._logs_sent = asyncio.Event()
        self._answered = asyncio.Event()
        self._channels: dict[str, tuple[grpc.aio.Channel, Stubs]] = {}

    def _stubs(self, address: str) -> Stubs:
        """For calls to one of the coordinators, over a connection that is kept."""
        if address not in self._channels:
            options = CHANNEL_OPTIONS
            if self.coordinators.are_several:
                given = dict(SEVERAL_OPTIONS)
                options = [*SEVERAL_OPTIONS, *(each for each in CHANNEL_OPTIONS if each[0] not in given)]
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(address, options=options)
            else:
                channel = grpc.aio.secure_channel(address, self._credentials, options=options)
            self._channels[address] = channel, Stubs(channel)
        return self._channels[address][1]

    async def _end_session(self) -> None:
        if self._session is not None:
            self._session.cancel()
            await asyncio.gather(self._session, return_exceptions=True)
            self._session = None

    async def _shut_down(self) -> None:
        await self._end_session()
        for _, future in self._waiting.values():
            if not future.done():
                future.cancel()
        try:
            for channel, _ in self._channels.values():
                await channel.close(None)
        finally:
            self._loop.stop()


def _stale(reason: str, cause: str) -> StaleWorker:
    error = StaleWorker("stale", reason, cause=cause)
    error.hint = (
        "Another process has replaced it: stop this one, or register again."
        if error.superseded
        else "Register again before doing anything else."
    )
    return error


async def _cancel_the_rest() -> None:
    """gRPC leaves tasks behind that would complain when the loop goes."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _notify(listener: Callable[..., None], *news: object) -> None:
    """A listener that fails must not take the session with it."""
    try:
        listener(*news)
    except Exception:
        log.exception("a listener failed")
