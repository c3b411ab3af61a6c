"""Limits hold, and whoever floods or stalls slows nobody but itself."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import EventStream, RawSession, channel, metric, refusal, stub
from tests.service.flood import flooding
from tests.service.other_user import relayed
from tests.support import Coordinator, eventually

HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SLOWER_AT_MOST = 40
"""Times as slow as undisturbed. Two busy cores alone can make it ten."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Coordinator]:
    limits = {
        "STRATA_MAX_CONNECTIONS": "6",
        "STRATA_MAX_CONNECTIONS_PER_CLIENT": "6",
        "STRATA_MAX_WORKERS": "3",
        "STRATA_HEARTBEAT_TIMEOUT": "600",
    }
    server = Coordinator(tmp_path / "coordinator", env=limits).start()
    yield server
    server.stop()


def test_connections_over_the_limit_get_a_reason_and_freed_ones_serve_again(small: Coordinator) -> None:
    held = [_connect(small.http_port) for _ in range(6)]
    with _connect(small.http_port) as one_more:
        answer = one_more.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "overloaded"
    for wire in held[:3]:
        wire.close()
    eventually(lambda: _served(small), within_s=30, what="freed connections serve again")
    for wire in held:
        wire.close()

    # 6 + 3 connections over gRPC
    wires = [_connect(small.grpc_port, HTTP2_HELLO) for _ in range(9)]
    assert all(wire.recv(9) for wire in wires)
    with _connect(small.grpc_port, HTTP2_HELLO) as one_more:
        assert _closed(one_more)
    for wire in wires:
        wire.close()
    with stub(small.address) as calls:
        for name in ("a", "b", "c"):
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name), timeout=30, wait_for_ready=True)
        status, code, message, hint = refusal(
            lambda: calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="d"), timeout=30)
        )
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded")
        assert "3 workers" in message
        assert "max_workers" in hint
        again = calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="a"), timeout=30)
        assert again.world_size == 3, "a worker that comes back needs no new place"
        with channel(small.address) as own:
            RawSession(own).hello("c").wait_for("welcome")
        place = eventually(
            lambda: _registered(calls, "d"), within_s=60, what="a failed worker's place is free"
        )
        assert place.world_size == 3


def test_one_client_cannot_take_every_connection_nor_the_listener_of_metrics(tmp_path: Path) -> None:
    """Half-sent requests of one user are refused beyond that user's share; others, and health, are served."""
    server = Coordinator(
        tmp_path / "data",
        "--metrics-port",
        "0",
        env={"STRATA_MAX_CONNECTIONS": "40", "STRATA_TRUST_LOOPBACK": "1"},
    ).start()
    try:
        address = json.loads((tmp_path / "data" / "serving.json").read_text())
        held = [_connect(server.http_port, b"GET /api/health HTTP/1.1\r\nHost:") for _ in range(19)]
        assert _served(server), "the twentieth of twenty"
        held += [_connect(server.http_port) for _ in range(1)]
        with _connect(server.http_port) as one_more:
            answer = one_more.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connections already, which is the limit" in answer
        assert b"nosniff" in answer, "in answers that the application has not seen, too"
        with _connect(address["metrics"], b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n") as wire:
            assert wire.recv(100).startswith(b"HTTP/1.1 200 ")
        with _connect(address["metrics"], b"GET /api/workers HTTP/1.1\r\nHost: localhost\r\n\r\n") as wire:
            assert wire.recv(100).startswith(b"HTTP/1.1 404 "), "nothing else is there"
        if os.geteuid() == 0:
            with relayed(server.http_port) as port:
                with _connect(port, b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n") as wire:
                    assert wire.recv(100).startswith(b"HTTP/1.1 200 "), "another user"
        for wire in held:
            wire.close()
        eventually(lambda: _served(server), within_s=30, what="freed connections serve again")
    finally:
        server.stop()


def test_request_that_never_ends_is_given_up(shared: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's time is fifteen seconds; waiting for it is for the slow tests."""
    with _connect(shared.http_port, b"GET /api/health HTTP/1.1\r\nHost:") as wire:
        with _connect(shared.http_port, b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n") as other:
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        wire.sendall(b" localhost\r\n\r\n")
        assert wire.recv(100).startswith(b"HTTP/1.1 200 ")


def test_stalled_requests_are_given_up_in_time(shared: Coordinator) -> None:
    head = b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        _connect(shared.http_port) as silent,
        _connect(shared.http_port, b"GET /api/hea") as cut,
        _connect(shared.http_port, head + b"Content-Length: 50\r\n\r\n{") as no_body,
    ):
        for wire, code in ((silent, b"408"), (cut, b"408"), (no_body, b"408")):
            wire.settimeout(40)
            assert wire.recv(100).split()[1] == code
            assert _closed(wire)


@pytest.mark.parametrize("kind", ["heartbeats", "logs", "unary", "deaf"])
def test_flood_does_not_slow_the_others(
    shared: Coordinator, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = TrainingOrchestrator(shared.address, job_id="calm")
    try:
        worker.register_worker("calm")
        assert worker.wait_connected(30)
        measures: dict[str, Callable[[int], object]] = {
            "barrier": lambda n: worker.barrier(f"{kind}-{time.monotonic_ns()}", participants=1),
            "HTTP": lambda n: shared.get("/api/health"),
        }
        calm_s: dict[str, float] = {}
        flooded_s: dict[str, float] = {}

        def is_bearable() -> bool:
            calm_s.update({name: _median_s(call) for name, call in measures.items()})
            with flooding(shared.address, kind):
                time.sleep(0.5)
                flooded_s.update({name: _median_s(call) for name, call in measures.items()})
            return all(flooded_s[name] < SLOWER_AT_MOST * calm_s[name] for name in measures)

        # What else begins on this machine may slow one round of calls; a flood that slows others slows each.
        eventually(is_bearable, within_s=60, what=lambda: f"calm {calm_s}, flooded {flooded_s}")
        worker.deregister()
    finally:
        worker.close()
    with capsys.disabled():
        text = ", ".join(
            f"{name} {calm_s[name] * 1000:.1f} → {flooded_s[name] * 1000:.1f} ms" for name in measures
        )
        print(f"\n{kind}: {text}", end=" ")


def test_one_worker_cannot_take_up_every_barrier(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="opener", job_id="opener"))
        refused = 0
        for number in range(130):
            request = pb.WaitBarrierRequest(
                worker_id="opener", barrier_id=f"open-{number}", expected_participants=2, timeout_ms=600_000
            )
            wait = calls.WaitBarrier.future(request)
            refused += _refused(shared, wait, f"open-{number}")
            wait.cancel()  # Its caller is gone, but it has arrived.
        assert refused >= 20
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="other", job_id="other"))
        free = pb.WaitBarrierRequest(worker_id="other", barrier_id="b", expected_participants=1)
        assert calls.WaitBarrier(free, timeout=30).released


def test_session_that_does_not_read_is_ended_and_its_worker_failed(shared: Coordinator) -> None:
    with EventStream(shared.http_port) as events:
        with flooding(shared.address, "deaf"):
            joined = events.wait_for("worker_joined", lambda e: e["spec"]["worker_id"] == "flood")
            number = joined.data["incarnation"]
            failed = events.wait_for("worker_failed", lambda e: e["incarnation"] == number, within_s=60)
    assert "connection lost" in failed.data["reason"]
    said = [entry["message"] for entry in shared.get("/api/logs?level=warn")]
    assert "ending the session of 'flood', which does not read its messages" in said


def test_flood_of_log_lines_is_dropped_counted_and_reported(shared: Coordinator) -> None:
    before = metric(shared.url, 'strata_log_lines_dropped_total{why="rate"}')
    batch = pb.LogBatch(entries=[pb.LogEntry(timestamp=time.time(), message="again")] * 2_000)
    with stub(shared.address) as calls, channel(shared.address) as own:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="chatty", job_id="chatty"))
        session = RawSession(own).hello("chatty")
        for _ in range(12):  # Far more than its share, however long they take.
            session.send(logs=batch)
        eventually(
            lambda: metric(shared.url, 'strata_log_lines_dropped_total{why="rate"}') - before > 5_000,
            within_s=30,
        )
        told = eventually(
            lambda: [
                e for e in shared.get("/api/logs?worker_id=chatty&level=warn") if "dropped" in e["message"]
            ],
            within_s=30,
        )
        assert told[0]["source"] == "coordinator"
        session.close()


def test_readers_of_events_that_do_not_read_cost_little(shared: Coordinator) -> None:
    request = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    stalled = [_connect(shared.http_port, request, receive_buffer_bytes=4096) for _ in range(20)]
    process = psutil.Process(shared.pid)
    before_bytes = process.memory_info().rss
    with stub(shared.address) as calls, EventStream(shared.http_port) as reader:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="noisy", job_id="noisy"))
        for number in range(1_200):
            request_ = pb.WaitBarrierRequest(
                worker_id="noisy", barrier_id=f"{number}-{'x' * 200}", expected_participants=1
            )
            calls.WaitBarrier(request_, timeout=30)
        reader.wait_for("barrier_released", lambda e: e["barrier_id"].startswith("1199-"), within_s=30)
    grown_bytes = process.memory_info().rss - before_bytes
    for wire in stalled:
        wire.close()
    assert grown_bytes < 40_000_000, f"{grown_bytes / 1e6:.0f} MB for twenty stalled readers"


def _refused(coordinator: Coordinator, wait: Any, barrier: str) -> bool:
    """As soon as it can be told: of an arrival that was accepted the barrier is shown."""

    def accepted() -> bool:
        return any(b["name"] == barrier for b in coordinator.get("/api/barriers"))

    eventually(lambda: wait.done() or accepted(), within_s=30)
    return bool(wait.done() and wait.code() == grpc.StatusCode.RESOURCE_EXHAUSTED)


def _registered(calls: Any, name: str) -> Any:
    try:
        return calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id=name), timeout=30)
    except grpc.RpcError:
        return None


def _connect(port: int, data: bytes = b"", *, receive_buffer_bytes: int = 0) -> socket.socket:
    wire = socket.socket()
    if receive_buffer_bytes:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    wire.settimeout(30)
    wire.connect(("127.0.0.1", port))
    wire.sendall(data)
    return wire


def _closed(wire: socket.socket) -> bool:
    try:
        while wire.recv(65_536):
            pass
    except ConnectionResetError:
        pass
    return True


def _served(coordinator: Coordinator) -> bool:
    """Whoever is turned away may see the connection reset before it has read why."""
    with suppress(ConnectionError):
        with _connect(coordinator.http_port, b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n") as wire:
            return wire.recv(100).startswith(b"HTTP/1.1 200 ")
    return False


def _median_s(call: Callable[[int], Any], *, times: int = 40) -> float:
    taken = []
    for n in range(times):
        began_s = time.perf_counter()
        call(n)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)
