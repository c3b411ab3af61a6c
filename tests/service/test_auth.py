"""Who may do what, over HTTP and over gRPC."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from strata.worker.errors import CoordinatorRefused
from tests.service.clients import SERVICE, channel, raw_call, stub
from tests.service.fleet import Fleet
from tests.support import Coordinator

ADMIN = "an-admin's-secret"
TOKENS = {"viewer": "token-of-a-viewer", "worker": "token-of-a-worker", "operator": "token-of-an-operator"}
TASK = {"name": "t", "type": "training"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("guarded")
    config = folder / "strata.toml"
    rows = "".join(f'{role} = "{token}"\n' for role, token in TOKENS.items())
    config.write_text(f"[coordinator.tokens]\n{rows}")
    server = Coordinator(folder / "data", "--config", str(config), env={"STRATA_TOKEN": ADMIN}).start()
    yield server
    server.stop()
    output = "".join(server.output)
    assert "Traceback" not in output
    assert all(secret not in output for secret in (ADMIN, *TOKENS.values())), "a secret was printed"


def ask(
    coordinator: Coordinator,
    method: str,
    path: str,
    *,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", coordinator.http_port, timeout=30)
    try:
        data = json.dumps(body) if body is not None else None
        content = {"Content-Type": "application/json"} if data else {}
        connection.request(method, path, body=data, headers={**content, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if text[:1] in (b"{", b"[") else text
    finally:
        connection.close()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        {"Authorization": ADMIN},
        {"Authorization": f"Basic {ADMIN}"},
        bearer(ADMIN + "x"),
        bearer(ADMIN[:-1]),
        {"Authorization": "Bearer \xff\xfe"},
    ],
)
def test_http_without_the_right_token_is_401(guarded: Coordinator, headers: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/api/workers"),
        ("GET", "/api/events"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("POST", "/api/tasks"),
        ("GET", "/nowhere"),
    ):
        status, answer = ask(guarded, method, path, headers=headers)
        assert status == 401, path
        assert answer["code"] == "forbidden"
        assert "Bearer" in answer["hint"]
    assert ask(guarded, "GET", "/api/health")[0] == 200, "health is for everyone"


def test_viewer_reads_and_operator_changes(guarded: Coordinator) -> None:
    for role in ("viewer", "worker", "operator"):
        assert ask(guarded, "GET", "/api/dashboard", headers=bearer(TOKENS[role]))[0] == 200
    for role in ("viewer", "worker"):
        status, answer = ask(guarded, "POST", "/api/tasks", body=TASK, headers=bearer(TOKENS[role]))
        assert status == 403
        assert role in answer["message"]
        assert "operator" in answer["message"]
    assert ask(guarded, "GET", "/api/tasks", headers=bearer(ADMIN))[1] == []
    for token in (TOKENS["operator"], ADMIN):
        assert ask(guarded, "POST", "/api/tasks", body=TASK, headers=bearer(token))[0] == 201


def test_grpc_needs_a_workers_token(guarded: Coordinator) -> None:
    def register(*metadata: tuple[str, str]) -> grpc.StatusCode:
        with stub(guarded.address) as calls:
            try:
                calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w"), metadata=metadata, timeout=30)
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                explained = any(word in str(error.details()) for word in ("STRATA_TOKEN", "role"))
                return code if explained else grpc.StatusCode.OK
        return grpc.StatusCode.OK

    assert register() == grpc.StatusCode.UNAUTHENTICATED
    assert register(("authorization", "Bearer wrong")) == grpc.StatusCode.UNAUTHENTICATED
    assert register(("authorization", f"Bearer {TOKENS['viewer']}")) == grpc.StatusCode.PERMISSION_DENIED
    assert register(("authorization", f"Bearer {TOKENS['worker']}")) == grpc.StatusCode.OK
    assert register(("authorization", f"Bearer {ADMIN}")) == grpc.StatusCode.OK


def test_streams_and_unknown_methods_are_guarded_too(guarded: Coordinator) -> None:
    with channel(guarded.address) as opened:
        stream = opened.stream_stream(
            SERVICE + "Session", request_serializer=bytes, response_deserializer=bytes
        )
        for call in (
            lambda: list(stream(iter([b""]), timeout=30)),
            lambda: raw_call(opened, "Nothing")(b"", timeout=30),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


def test_worker_library_presents_its_token(guarded: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_TOKEN", "wrong")
    worker = TrainingOrchestrator(guarded.address)
    with pytest.raises(CoordinatorRefused, match="STRATA_TOKEN"):
        worker.register_worker("w")
    worker.close()
    monkeypatch.setenv("STRATA_TOKEN", TOKENS["worker"])
    with TrainingOrchestrator(guarded.address) as worker:
        worker.register_worker("w")
        assert worker.wait_connected(30)
        assert worker.barrier("b", participants=1).participants == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1.evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:3000"},
        {"Host": ""},
    ],
)
def test_foreign_pages_cannot_change_anything(shared: Coordinator, headers: dict[str, str]) -> None:
    status, answer = ask(shared, "POST", "/api/tasks", body=TASK, headers=headers)
    assert status == 403, answer
    assert answer["code"] == "forbidden"
    assert answer["hint"]
    assert shared.get("/api/tasks") == []


def test_own_pages_and_programs_can(shared: Coordinator) -> None:
    port = shared.http_port
    for headers in (
        {},
        {"Origin": f"http://127.0.0.1:{port}"},
        {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"},
    ):
        status, _ = ask(shared, "POST", "/api/tasks/none/stop", headers=headers)
        assert status == 404, "past the middleware"


def test_worker_process_outlives_a_guarded_coordinator(
    guarded: Coordinator, request: pytest.FixtureRequest
) -> None:
    with Fleet(guarded.address, env={"STRATA_TOKEN": TOKENS["worker"]}) as fleet:
        first = fleet.register("survivor")[0]
        guarded.kill()
        guarded.start()
        assert fleet.call("survivor", "barrier", "b", participants=1, timeout_s=50)["participants"] == 1
        assert fleet.call("survivor", "topology")["generation"] >= first["generation"]
