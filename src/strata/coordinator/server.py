"""One process, one event loop: gRPC and HTTP over one engine, started and stopped in the right order."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sqlite3
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from strata.coordinator.archive import Archive, Outbox, Retention
from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.etcd_tokens import EtcdTokens, TokensUnreachable
from strata.coordinator.auth.gatekeeper import LOOPBACK_NAMES, AccessRules, Gatekeeper
from strata.coordinator.auth.paths import ReadRules
from strata.coordinator.auth.peers import is_loopback
from strata.coordinator.auth.tokens import TaskTokens, TokenFileError, TokenStore
from strata.coordinator.engine import Unavailable
from strata.coordinator.grpc.middleware import GrpcAccess
from strata.coordinator.grpc.service import CoordinatorService
from strata.coordinator.http.app import create_app
from strata.coordinator.http.connections import HttpConnection
from strata.coordinator.http.middleware import MetricsOnly
from strata.coordinator.journal.etcd import EtcdJournal, EtcdLog
from strata.coordinator.journal.protocol import Deposed, JournalError
from strata.coordinator.journal.space import Space
from strata.coordinator.journal.sqlite import SqliteJournal, lock_directory
from strata.coordinator.leadership import Election
from strata.coordinator.logs.archive import LogArchive
from strata.coordinator.logs.store import LogStore, LogStoreHandler
from strata.coordinator.metrics.collectors import ArchiveCollector
from strata.coordinator.metrics.otel import OtelExport
from strata.coordinator.metrics.run_history import RunHistory
from strata.coordinator.notify.settings import NotifySettings
from strata.coordinator.runtime import Runtime
from strata.coordinator.settings import CoordinatorSettings
from strata.coordinator.tasks.launchers import (
    launcher_maker,
    launching_place,
    tasks_dir_of,
    worker_address,
    worker_tls,
)
from strata.coordinator.tasks.plans import Planner
from strata.coordinator.tasks.runner import TaskRunner
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core.messages import EndAttempt
from strata.core.telemetry.logtext import Tidy
from strata.errors import StrataError
from strata.etcd import FAILURES, LeaseLost
from strata.files import write_file
from strata.launch.recipes import read_recipes
from strata.launch.recipes_builtin import BUILT_IN
from strata.logs import OutageLog
from strata.rpc.methods import handlers
from strata.stores import Store, StoreError, open_store

log = logging.getLogger("strata.coordinator")

MESSAGE_LIMIT_BYTES = 16 << 20
ANSWER_LIMIT_BYTES = 64 << 20
STREAMS_PER_CONNECTION = 2_000
SHUTDOWN_S = 3.0
AGAIN_S = 0.5
"""Between attempts of one that was deposed to start again."""
COLLECT_S = 1.0
TOKENS_EVERY_S = 1.0
"""After so long a token that another coordinator has revoked counts no longer here."""
ATTEND_S = 4.0
"""After so long a standby is no longer taken for one that looks after its machine."""
STOPPING = (signal.SIGINT, signal.SIGTERM)
YOUNG_OBJECTS = 50_000
"""Allocations between collections. Almost everything here dies by its reference count; looking for cycles every
700 objects, as Python does by default, took a fifth of the processor in a barrier of 1,000 workers."""
SWITCH_S = 0.001
"""How long the event loop waits at most for a thread that computes: writing logs, metrics or a snapshot must not slow heartbeats."""


class PortTaken(StrataError):
    code = "port_taken"

    def __init__(self, name: str, host: str, port: int, why: str) -> None:
        super().__init__(
            f"{name} port {port} on {host} cannot be opened: {why}.",
            hint=f"Stop what uses it, or choose another with --{name.lower()}-port (0 picks a free one).",
        )


class Server:
    """A running coordinator. `grpc_port` and `http_port` are the ports it really has."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        notify: NotifySettings | None = None,
        private: Sequence[Path] = (),
    ) -> None:
        """`private`: further files that are read for no caller, such as the configuration."""
        notify = notify or NotifySettings()
        self._settings = settings
        if settings.archive:
            with suppress(StoreError):  # It may be away; what is not installed never answers.
                _open_archive_store(settings)
        recipes = [*BUILT_IN, *read_recipes(settings.recipes_dir or settings.data_dir / "recipes")]
        reserve_bytes = settings.disk_reserve_mb << 20
        location = settings.etcd
        self._data_dir_lock: int | None = None
        self._election: Election | None = None
        self._space: Space
        self._journal: SqliteJournal | EtcdJournal
        if location is None:
            self._journal = SqliteJournal(settings.data_dir, reserve_bytes=reserve_bytes)
            self._space = self._journal.space
        else:
            self._data_dir_lock = lock_directory(settings.data_dir)
            self._space = Space(settings.data_dir, reserve_bytes=reserve_bytes)
            self._journal = EtcdJournal(location, self._space)
            self._election = Election(self._journal, lease_s=settings.leader_lease)
        self.runtime = Runtime.create(
            self._journal,
            settings.limits,
            _open_logs(settings, notify),
            recipes,
            _read_rules(settings, private),
            _open_run_history(settings),
            notify,
            self._election,
        )
        if self._election is not None:
            self.runtime.engine.confirmed = self._election.confirmed
        self.runtime.prices = settings.price_list
        if self.runtime.logs.archive is not None:
            self.runtime.logs.archive.is_paused = lambda: self._space.is_full
        if self.runtime.run_history is not None:
            self.runtime.run_history.is_paused = lambda: self._space.is_full
        self._archive = _open_archive(settings, self._space)
        if self._archive is not None:
            self._archive.gather(self.runtime.logs, self.runtime.run_history, self._in_loop)
            self.runtime.metrics.registry.register(ArchiveCollector(self._archive))
        self._otel = _otel_export(settings, self.runtime)
        self._shared_tokens = EtcdTokens(location) if location is not None else None
        self._gatekeeper = Gatekeeper(
            _access_rules(settings),
            tokens=TokenStore(settings.data_dir, self._shared_tokens),
            task_tokens=TaskTokens(settings.data_dir, agree=self._agree_on_task_key),
            is_live=self.runtime.is_live,
            on_failure=self.runtime.metrics.access_refused,
        )
        self._tokens_outage = OutageLog(log, over="tokens of other coordinators are available again")
        self._audit_log = AuditLog(settings.data_dir)
        self._certificates = _Certificates(settings) if settings.tls_cert is not None else None
        self.grpc_port = 0
        self.http_port = 0
        self._grpc: grpc.aio.Server | None = None
        self._http: list[uvicorn.Server] = []
        self.metrics_port = 0
        self._log_handler: LogStoreHandler | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._attends_no_more = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _in_loop(self, action: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended, and with it what is in memory.
                self._loop.call_soon_threadsafe(action)

    def _agree_on_task_key(self, key: bytes) -> bytes:
        """Tasks outlive the coordinator that started them: the next one must know their tokens."""
        return self._journal.agree("keys/task-tokens", key) if isinstance(self._journal, EtcdJournal) else key

    async def start(self) -> None:
        settings, runtime = self._settings, self.runtime
        replayed = runtime.engine.replay(leads=self._election is None)
        listeners = [_listen("HTTP", settings.host, settings.http_port)]
        self.http_port = listeners[0].getsockname()[1]
        if settings.metrics_port >= 0:
            listeners.append(_listen("metrics", settings.host, settings.metrics_port))
            self.metrics_port = listeners[1].getsockname()[1]
        if self._shared_tokens is not None:
            await self._sync_tokens()  # Before the first call.
        self._grpc = await self._start_grpc()
        runtime.address = f"{settings.url_host}:{self.grpc_port}"
        loop = self._loop = asyncio.get_running_loop()
        self._log_handler = LogStoreHandler(runtime.logs, loop.call_soon_threadsafe)
        for logger in _own_loggers():
            logger.addHandler(self._log_handler)
        app = create_app(runtime, self._gatekeeper, self._audit_log)
        apps = [app, MetricsOnly(app)][: len(listeners)]
        self._http = [_http_server(each, settings, self._gatekeeper, self._certificates) for each in apps]
        self._tasks = [
            asyncio.create_task(self._run_engine(), name="engine"),
            asyncio.create_task(self._serve_http(listeners), name="http"),
            asyncio.create_task(self._pulse(), name="pulse"),
        ]
        if self._shared_tokens is not None:
            self._tasks.append(asyncio.create_task(self._keep_tokens_in_sync(), name="tokens"))
        await _until(lambda: all(server.started for server in self._http), self._tasks)
        if self._archive is not None:
            self._archive.start(f"{settings.advertised_host}:{self.grpc_port}")
        if self._election is None:
            self._leads(0)
        self._write_address()
        self._warn_about_settings()
        log.info(
            "serving: gRPC on port %d, API and dashboard on port %d of %s (%d events replayed)",
            self.grpc_port,
            self.http_port,
            settings.host,
            replayed,
        )

    async def _run_engine(self) -> None:
        """Among several coordinators: once this one leads. Ends with `Deposed` when it does no longer."""
        engine, election = self.runtime.engine, self._election
        if election is None:
            await engine.run()
            return
        scheme = "https" if self._settings.tls_cert is not None else "http"
        host = self._settings.advertised_host
        election.start(
            grpc=f"{host}:{self.grpc_port}",
            http=f"{scheme}://{host}:{self.http_port}",
            on_events=engine.follow,
        )
        attending = asyncio.create_task(self._attend_tasks(), name="attending")
        try:
            missed = await election.elected()
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
        engine.follow(missed)
        engine.resume()
        election.serves()
        self._leads(election.term)
        self._tasks.append(asyncio.create_task(self._collect_ends(), name="ends"))
        await election.leading(asyncio.create_task(engine.run(), name="leading"))

    def _leads(self, term: int) -> None:
        self._start_tasks()
        if self._archive is not None:
            self._archive.leads(term)

    async def wait(self) -> None:
        """Until something essential ends; raises what ended it."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Say goodbye to everyone, write a snapshot, leave nothing behind."""
        self.runtime.engine.stop()  # First, so that no worker is failed for a connection that we close.
        self.runtime.sessions.end_all("the coordinator is stopping")
        self.runtime.agents.end_all()
        if self._grpc is not None:
            await self._grpc.stop(0.2)
        if self._http:
            self.runtime.feed.close()
            self.runtime.logs.end_followers()
            self.runtime.end_readers()
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # Connections we cut are no news.
            for server in self._http:
                server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                is_led = self._election is None or self._election.role == "leader"
                await asyncio.gather(*self._tasks[0 if is_led else 1 : 2], return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._log_handler is not None:
            for logger in _own_loggers():
                logger.removeHandler(self._log_handler)
        if self._otel is not None:
            await asyncio.to_thread(self._otel.close)
        await asyncio.to_thread(self.runtime.notifier.close)
        if self._election is not None:
            await asyncio.to_thread(self._election.close)
        self.runtime.engine.close()
        if self._data_dir_lock is not None:
            os.close(self._data_dir_lock)
        self.runtime.logs.close()
        if self.runtime.run_history is not None:
            await asyncio.to_thread(self.runtime.run_history.close)
        if self._archive is not None:  # After those that hand over to it.
            await asyncio.to_thread(self._archive.close)
        if self._shared_tokens is not None:
            self._shared_tokens.close()
        self._audit_log.close()
        self._gatekeeper.owners.close()
        with suppress(FileNotFoundError):
            self.address_file.unlink()

    # --- parts ----------------------------------------------------------------------------------------------

    async def _start_grpc(self) -> grpc.aio.Server:
        settings, runtime = self._settings, self.runtime
        # A frozen process answers no pings: how long that is borne is for heartbeat_timeout to say.
        ping_timeout_ms = max(5_000, int(settings.heartbeat_timeout * 1000))
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
                ("grpc.max_send_message_length", ANSWER_LIMIT_BYTES),
                ("grpc.max_allowed_incoming_connections", settings.max_workers + settings.max_connections),
                # Calls of all clients together are limited: one connection must not take them all. It also switches on gRPC's own
                # protection against streams that are opened and reset.
                ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
                ("grpc.so_reuseport", 0),
                # Probing the bandwidth answers each small message with a ping: a quarter of a quiet fleet's cost.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", ping_timeout_ms),
                ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.http2.max_ping_strikes", 0),
            ],
            maximum_concurrent_rpcs=2 * settings.max_workers + 1_000,
        )
        access = GrpcAccess(
            self._gatekeeper,
            self._audit_log,
            ours=lambda: (settings.host, self.grpc_port),
            mutual_tls=settings.tls_client_ca is not None,
        )
        runtime.task_secrets = TaskSecrets(tasks_dir_of(settings))
        service = CoordinatorService(
            runtime.engine,
            runtime.sessions,
            runtime.agents,
            runtime.logs,
            runtime.metrics,
            access,
            runtime.inspection,
            runtime.run_history,
            runtime.task_secrets,
            heartbeat_interval_s=settings.heartbeat_interval,
            worker_config={"heartbeat_timeout": f"{settings.heartbeat_timeout:g}"},
            on_metrics=runtime.notifier.logged,
            standing=runtime.standing,
        )
        server.add_generic_rpc_handlers(handlers(service))
        healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
        address = f"{settings.url_host}:{settings.grpc_port}"
        try:
            if self._certificates is None:
                self.grpc_port = server.add_insecure_port(address)
            else:
                self.grpc_port = server.add_secure_port(address, self._certificates.for_grpc())
        except RuntimeError as error:
            raise PortTaken("gRPC", settings.host, settings.grpc_port, "it is in use") from error
        await server.start()
        return server

    async def _attend_tasks(self) -> None:
        """A standby looks after what it has started on this machine when it led, and reports the ends of it."""
        journal = self._journal
        if self._settings.launcher != "local" or not isinstance(journal, EtcdJournal):
            return
        while True:
            try:  # One that is behind might take a run for one that is not wanted.
                await self.runtime.standing.caught_up()
                break
            except Unavailable:
                await asyncio.sleep(AGAIN_S)

        async def report(end: EndAttempt) -> None:
            body = msgspec.msgpack.encode(end)
            while True:
                try:
                    await asyncio.to_thread(journal.log.keep, f"ends/{end.task_id}/{end.attempt}", body)
                    return
                except ConnectionError:
                    await asyncio.sleep(AGAIN_S)

        runner = self._task_runner(report_end=report)
        if runner is not None:
            threading.Thread(
                target=self._say_that_attends, args=(journal,), name="attending", daemon=True
            ).start()
            try:
                await runner.run()
            finally:
                self._attends_no_more.set()  # The thread is not waited for: an elected coordinator leads at once.

    def _say_that_attends(self, journal: EtcdJournal) -> None:
        """In a thread, until `_attends_no_more`: the leader then says that no coordinator looks after what runs on this machine."""
        etcd, lease = EtcdLog(journal.location, timeout_s=2.0), ""
        place = launching_place(self._settings)
        try:
            while not self._attends_no_more.wait(ATTEND_S / 4):
                with suppress(*FAILURES):
                    try:
                        if lease and etcd.renew(lease):
                            continue
                    except LeaseLost:
                        pass
                    lease = etcd.grant(ATTEND_S)
                    with suppress(LeaseLost):
                        etcd.keep(f"attending/{place}", b"", lease=lease)
            if lease:
                with suppress(*FAILURES):  # It runs out by itself.
                    etcd.revoke(lease)
        finally:
            etcd.close()

    async def _collect_ends(self) -> None:
        """What standbys report of runs on their machines, and who of them is there."""
        journal, runner = self._journal, self.runtime.tasks
        if not isinstance(journal, EtcdJournal) or runner is None:
            return
        mailbox = EtcdLog(journal.location, timeout_s=2.0)
        loop = asyncio.get_running_loop()

        def taken(end: EndAttempt) -> None:
            loop.run_in_executor(None, _forget_end, mailbox, end)

        try:
            while True:
                with suppress(ConnectionError, Unavailable):
                    attended = await asyncio.to_thread(mailbox.under, "attending")
                    runner.see_attended(place for place, _ in attended)
                    found = await asyncio.to_thread(mailbox.under, "ends")
                    ends = [msgspec.msgpack.decode(body, type=EndAttempt) for _, body in found]
                    runner.take_ends(ends, taken)
                await asyncio.sleep(COLLECT_S)
        finally:
            mailbox.close()

    def _start_tasks(self) -> None:
        """Take up what an earlier coordinator left running, and whatever waits."""
        runner = self._task_runner()
        if runner is not None:
            self.runtime.tasks = runner
            self._tasks.append(asyncio.create_task(runner.run(), name="tasks"))

    def _task_runner(
        self, *, report_end: Callable[[EndAttempt], Awaitable[None]] | None = None
    ) -> TaskRunner | None:
        settings, runtime, election = self._settings, self.runtime, self._election
        assert runtime.task_secrets is not None
        make_launcher = launcher_maker(settings, term=election.term if election is not None else 0)
        if make_launcher is None:
            return None
        here = launching_place(settings) if election is not None else ""
        scheme = "https://" if settings.tls_cert is not None else ""
        planner = Planner(
            recipes=runtime.recipes,
            tasks_dir=tasks_dir_of(settings),
            coordinator=worker_address(settings, self.grpc_port),
            token=self._gatekeeper.task_tokens.of,
            tls=worker_tls(settings),
            stop_timeout_s=settings.task_stop_timeout,
            secrets=runtime.task_secrets,
            elsewhere=lambda: (
                [f"{scheme}{other}" for other in election.others] if election is not None else []
            ),
            inherited=settings.inherited_by_tasks,
        )
        return TaskRunner(
            runtime.engine,
            runtime.logs,
            planner,
            make_launcher,
            stop_timeout_s=settings.task_stop_timeout,
            here=here,
            report_end=report_end,
        )

    async def _serve_http(self, listeners: list[socket.socket]) -> None:
        serving = [
            server.serve(sockets=[listener]) for server, listener in zip(self._http, listeners, strict=True)
        ]
        await asyncio.gather(*serving)

    async def _pulse(self) -> None:
        while True:
            try:
                await self.runtime.pulse()
                self._audit_log.flush()
                self.runtime.sessions.end_revoked(self._gatekeeper.still_counts)
                self.runtime.agents.end_revoked(self._gatekeeper.still_counts)
                if self._certificates is not None:
                    self._certificates.refresh()
                if self._otel is not None:
                    self.runtime.measure(await self.runtime.engine.settled())
                    self._otel.refresh()
            except Exception:  # Who only watches must not end what is watched.
                log.exception("collecting metrics failed")
            await asyncio.sleep(1.0)

    async def _keep_tokens_in_sync(self) -> None:
        while True:
            await asyncio.sleep(TOKENS_EVERY_S)
            await self._sync_tokens()

    async def _sync_tokens(self) -> None:
        """A token that another coordinator has created counts here, and one that it has revoked does not."""
        try:
            await asyncio.to_thread(self._gatekeeper.tokens.sync)
        except (TokensUnreachable, TokenFileError) as error:
            self._tokens_outage.start(f"tokens of other coordinators are unavailable: {error}")
        else:
            self._tokens_outage.ended()

    def _warn_about_settings(self) -> None:
        settings = self._settings
        if not is_loopback(settings.host) and settings.tls_cert is None:
            log.warning(
                "listening on %s without TLS: tokens and data can be read on the network. `strata certs init` "
                "creates certificates for tls_cert and tls_key.",
                settings.host,
            )
        if (
            settings.tls_client_ca is not None
            and settings.task_tls_cert is None
            and settings.launcher != "none"
        ):
            log.warning(
                "tasks cannot reach this coordinator: it requires client certificates, and task_tls_cert and "
                "task_tls_key are not set"
            )
        if settings.trust_loopback:
            log.warning("every user of this machine is an admin here (trust_loopback)")

    @property
    def address_file(self) -> Path:
        return self._settings.data_dir / "serving.json"

    def _write_address(self) -> None:
        """For tools on this machine that know only the data directory."""
        text = json.dumps(
            {
                "pid": os.getpid(),
                "host": self._settings.host,
                "grpc": self.grpc_port,
                "http": self.http_port,
                "metrics": self.metrics_port or None,
            }
        )
        with suppress(OSError):  # A convenience: a full disk is the journal's to complain about.
            write_file(self.address_file, text, durable=False)


async def serve(
    settings: CoordinatorSettings,
    *,
    notify: NotifySettings | None = None,
    private: Sequence[Path] = (),
    announce: bool = True,
) -> None:
    """Run until SIGINT or SIGTERM. A leader that was deposed starts again, as a standby, in this process."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOPPING:  # Before anything is up, so that no signal finds it half-way.
        loop.add_signal_handler(number, stopped.set)
    try:
        is_again = False
        while not stopped.is_set():
            server = await _open(settings, notify, private, stopped, is_again=is_again)
            if server is None:
                return
            try:
                gc.collect()
                gc.freeze()  # What is loaded now stays: no need to look through it again.
                gc.set_threshold(YOUNG_OBJECTS)
                sys.setswitchinterval(SWITCH_S)
                if announce and not is_again:
                    _announce(settings, server)
                await _until_stopped(server, stopped)
                return
            except Deposed as deposed:
                log.warning("%s", deposed)
                # Clients that know this coordinator find it where it was.
                settings = replace(
                    settings,
                    grpc_port=server.grpc_port,
                    http_port=server.http_port,
                    metrics_port=server.metrics_port or settings.metrics_port,
                )
                is_again = True
            finally:
                await server.stop()
                gc.unfreeze()
    finally:
        for number in STOPPING:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # Impatience must not tear the last steps.


async def _open(
    settings: CoordinatorSettings,
    notify: NotifySettings | None,
    private: Sequence[Path],
    stopped: asyncio.Event,
    *,
    is_again: bool,
) -> Server | None:
    """A server that has started. What prevents that is raised the first time; one that was deposed waits until nothing does. None: it
    was stopped before."""
    outage = OutageLog(log, over="this coordinator is a standby again")
    while not stopped.is_set():
        server = Server(settings, notify=notify, private=private)
        try:
            await server.start()
        except (JournalError, PortTaken) as error:
            await server.stop()
            if not is_again:
                raise
            outage.met(f"this coordinator cannot restart yet: {error}")
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await stopped.wait()
        except BaseException:
            await server.stop()
            raise
        else:
            outage.ended()
            return server
    return None


def _announce(settings: CoordinatorSettings, server: Server) -> None:
    scheme = "https" if settings.tls_cert is not None else "http"
    print(f"Strata is serving. Dashboard: {scheme}://{settings.url_host}:{server.http_port}", flush=True)
    print(f"Workers join at {settings.url_host}:{server.grpc_port} (gRPC). Ctrl-C stops.", flush=True)


async def _until_stopped(server: Server, stopped: asyncio.Event) -> None:
    waiting = [asyncio.create_task(server.wait()), asyncio.create_task(stopped.wait())]
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def run(
    settings: CoordinatorSettings, *, notify: NotifySettings | None = None, private: Sequence[Path] = ()
) -> None:
    """`serve` on the fastest event loop there is. Raises `StrataError` for what a user can fix."""
    _allow_many_connections()
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(settings, notify=notify, private=private))
    else:
        uvloop.run(serve(settings, notify=notify, private=private))


def _forget_end(mailbox: EtcdLog, end: EndAttempt) -> None:
    with suppress(ConnectionError):  # It is found again, and counts once.
        mailbox.forget(f"ends/{end.task_id}/{end.attempt}")


def _open_logs(settings: CoordinatorSettings, notify: NotifySettings) -> LogStore:
    archive = None
    try:
        archive = LogArchive(
            settings.data_dir / "logs.sqlite",
            limit_bytes=settings.log_limit_mb * 1_000_000,
            keep_s=settings.log_days * 86_400,
        )
    except (sqlite3.Error, OSError) as error:
        log.warning("log lines are kept in memory only: %s", error)
    return LogStore(
        archive,
        tidy=Tidy([*settings.concealed, *notify.secrets]),
        lines_per_second=settings.log_lines_per_second,
    )


def _open_run_history(settings: CoordinatorSettings) -> RunHistory | None:
    try:
        return RunHistory(
            settings.data_dir / "metrics.sqlite", limit_bytes=settings.metrics_limit_mb * 1_000_000
        )
    except (sqlite3.Error, OSError) as error:
        log.warning("metrics of runs are not kept: %s", error)
        return None


def _open_archive_store(settings: CoordinatorSettings) -> Store:
    is_remote = "://" in settings.archive and not settings.archive.startswith("file:")
    # One thread waits for it, and comes back to what could not be done: no need for patience here.
    options = {"max_retries": 2, "retry_budget_s": 10.0, "request_timeout_s": 15.0} if is_remote else {}
    return open_store(settings.archive, **options)


def _open_archive(settings: CoordinatorSettings, space: Space) -> Archive | None:
    if not settings.archive:
        return None
    outbox = Outbox(settings.data_dir / "archive.sqlite")
    outbox.is_paused = lambda: space.is_full
    return Archive(
        lambda: _open_archive_store(settings),
        settings.archive,
        outbox,
        retention={
            "logs": Retention(
                limit_bytes=settings.log_limit_mb * 1_000_000, keep_s=settings.log_days * 86_400
            ),
            "metrics": Retention(limit_bytes=settings.metrics_limit_mb * 1_000_000, keep_s=None),
        },
    )


def _otel_export(settings: CoordinatorSettings, runtime: Runtime) -> OtelExport | None:
    if not settings.otel_endpoint:
        return None
    return OtelExport(runtime.metrics.registry, endpoint=settings.otel_endpoint)


def _own_loggers() -> list[logging.Logger]:
    """Where a handler gets each record once: everything, and Strata's own where that keeps to itself."""
    ours = logging.getLogger("strata")
    return [logging.getLogger()] if ours.propagate else [logging.getLogger(), ours]


def _allow_many_connections() -> None:
    """Every worker and browser is an open file, and the usual soft limit is a thousand."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(name: str, host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(name, host, port, (error.strerror or str(error)).lower()) from error
    listener.listen(1024)
    return listener


def _http_server(
    app: object,
    settings: CoordinatorSettings,
    gatekeeper: Gatekeeper,
    certificates: _Certificates | None,
) -> uvicorn.Server:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=HttpConnection.serving(gatekeeper.owners, most_per_client=settings.connections_per_client),
        proxy_headers=False,  # Who calls is what the kernel says, not what a header does.
        log_config=None,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="none",
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=2 if settings.tls_client_ca else 0,
    )
    config.load()
    if certificates is not None and config.ssl is not None:
        certificates.for_http(config.ssl)
    return _HttpServer(config)


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn would take the process's signals for itself; this process has its own order of stopping."""
        yield


class _Certificates:
    """The files of TLS, read again when they change, for every connection that begins after that."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        """Raises `StrataError` for files that cannot be used."""
        assert settings.tls_cert is not None
        assert settings.tls_key is not None
        self._cert, self._key, self._authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self._seen = self._stamps()
        self._http: list[ssl.SSLContext] = []
        self._pair = self._read()

    def for_grpc(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, self._authority is not None
        )

    def for_http(self, context: ssl.SSLContext) -> None:
        self._http.append(context)

    def refresh(self) -> None:
        """Called now and then. New files that cannot be used are reported, and the old ones stay in use."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._pair = self._read()
            for context in self._http:
                context.load_cert_chain(self._cert, self._key)
        except (StrataError, OSError) as error:
            log.error("the new certificates cannot be used, keeping the old ones: %s", error)
        else:
            log.info("certificates were reloaded: %s", self._cert)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        key, cert, authority = self._pair
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        files = [str(f) for f in (self._cert, self._key, self._authority) if f is not None]
        try:
            # gRPC would only say that the port cannot be opened.
            probe = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            probe.load_cert_chain(self._cert, self._key)
            if self._authority is not None:
                probe.load_verify_locations(self._authority)
            authority = self._authority.read_bytes() if self._authority is not None else None
            return self._key.read_bytes(), self._cert.read_bytes(), authority
        except OSError as error:  # ssl.SSLError is one of them.
            raise StrataError(
                f"The certificates cannot be used ({', '.join(files)}): {error.strerror or error}.",
                hint="tls_cert and tls_key are a PEM certificate and its key; tls_client_ca is a PEM CA certificate.",
            ) from error

    def _stamps(self) -> list[tuple[int, int] | None]:
        def stamp(path: Path | None) -> tuple[int, int] | None:
            try:
                found = path.stat() if path is not None else None
            except OSError:
                return None
            return (found.st_mtime_ns, found.st_ino) if found is not None else None

        return [stamp(path) for path in (self._cert, self._key, self._authority)]


def _access_rules(settings: CoordinatorSettings) -> AccessRules:
    hosts = frozenset(settings.allowed_hosts)
    if is_loopback(settings.host) or hosts:  # On other addresses, names that are not listed are not known.
        hosts |= LOOPBACK_NAMES | {settings.host.strip("[]")}
    return AccessRules(
        secrets=settings.secrets,
        hosts=hosts,
        trust_loopback=settings.trust_loopback,
        certificate_roles=settings.certificate_roles,
        needs_credentials=bool(settings.secrets) or settings.tls_client_ca is not None,
    )


def _read_rules(settings: CoordinatorSettings, private: Sequence[Path]) -> ReadRules:
    signing_keys = [
        Path(name).expanduser() for name in os.environ.get("STRATA_SIGNING_KEY", "").split(",") if name
    ]
    return ReadRules(
        roots=settings.data_roots,
        private=(*settings.private_files, *(path.absolute() for path in (*private, *signing_keys))),
        tasks=tasks_dir_of(settings),
        previews=settings.previews,
    )


async def _until(ready: Callable[[], bool], tasks: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(30):
        while not ready():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)
