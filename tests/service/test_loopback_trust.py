"""On loopback the coordinator's own user is trusted, by the owner of the connection, and nobody else is."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from pathlib import Path

import grpc
import pytest

from strata.coordinator.auth.peers import PeerOwners, is_loopback, parse_grpc_peer
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import refusal, stub
from tests.service.other_user import UID, needs_root, relayed
from tests.support import Coordinator


def ask(
    port: int, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        body = json.loads(answer.read())
        return answer.status, body if isinstance(body, dict) else {}
    finally:
        connection.close()


@needs_root
def test_another_local_user_needs_a_token_and_learns_how_to_get_one(shared: Coordinator) -> None:
    with relayed(shared.http_port) as port:
        for method, path in (("GET", "/api/workers"), ("GET", "/api/events"), ("POST", "/api/tasks/x/stop")):
            status, answer = ask(port, path, method=method)
            assert (status, answer["code"]) == (401, "forbidden"), path
            assert "token is required" in answer["message"]
            assert f"user {UID}" in answer["message"]
            assert "strata token create" in answer["hint"]
        assert ask(port, "/api/health")[0] == 200
    with relayed(shared.grpc_port) as port, stub(f"127.0.0.1:{port}") as calls:
        refused, code, message, _ = refusal(
            lambda: calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="intruder"), timeout=30)
        )
        assert (refused, code) == (grpc.StatusCode.UNAUTHENTICATED, "forbidden")
        assert f"user {UID}" in message
    assert all(worker["id"] != "intruder" for worker in shared.get("/api/workers"))


def test_own_user_needs_nothing(shared: Coordinator) -> None:
    assert shared.get("/api/session")["role"] == "admin"
    assert f"(uid {os.geteuid()})" in shared.get("/api/session")["name"]


def test_a_cookie_that_has_ended_is_no_sign_in(shared: Coordinator) -> None:
    cookie = {"Cookie": f"strata_session_{shared.http_port}=of-an-earlier-coordinator"}
    status, session = ask(shared.http_port, "/api/session", headers=cookie)
    assert (status, session["role"]) == (200, "admin")
    assert not session["signed_in"]


@needs_root
def test_everyone_on_this_machine_is_trusted_with_the_flag_alone(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "data", "--trust-loopback").start()
    try:
        with relayed(server.http_port) as port:
            assert ask(port, "/api/workers")[0] == 200
        assert "every user of this machine is an admin" in "".join(server.output)
    finally:
        server.stop()


@needs_root
def test_a_token_lets_another_user_in_with_its_role(shared: Coordinator) -> None:
    status, made = shared.post("/api/tokens", {"name": "colleague", "role": "viewer", "expires": "1h"})
    assert status == 201
    bearer = {"Authorization": f"Bearer {made['token']}"}
    with relayed(shared.http_port) as port:
        assert ask(port, "/api/workers", headers=bearer)[0] == 200
        assert ask(port, "/api/tasks/none/stop", method="POST", headers=bearer)[0] == 403
        assert shared.call("DELETE", f"/api/tokens/{made['id']}")[0] == 204
        assert ask(port, "/api/workers", headers=bearer)[0] == 401


@needs_root
def test_owner_is_the_one_of_this_connection_and_a_closed_one_has_none() -> None:
    owners = PeerOwners()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with relayed(port) as through:
            client = socket.create_connection(("127.0.0.1", through))
            server, peer = listener.accept()
            assert owners.owner_of(peer, server.getsockname()) == UID
            client.close()
            assert server.recv(1) == b""
            # The relay has closed its end; the kernel would say 0 for a socket without an owner.
            assert owners.owner_of(peer, server.getsockname()) in (None, UID)
            server.close()
        with socket.create_connection(("127.0.0.1", port)) as own:
            server, peer = listener.accept()
            assert owners.owner_of(peer, server.getsockname()) == os.geteuid()
            own.shutdown(socket.SHUT_WR)
            assert owners.owner_of(peer, server.getsockname()) == os.geteuid()
            server.close()
    owners.close()


@needs_root
def test_a_user_whose_process_has_ended_is_not_taken_for_root() -> None:
    """An orphaned socket has user id 0 in the kernel's answer."""
    owners = PeerOwners()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        child = os.fork()
        if child == 0:
            os.setuid(UID)
            wire = socket.create_connection(("127.0.0.1", port))
            wire.sendall(b"GET /api/workers HTTP/1.1\r\n\r\n")
            os._exit(0)
        server, peer = listener.accept()
        os.waitpid(child, 0)
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            assert owners.owner_of(peer, server.getsockname()) in (None, UID)
            if owners.owner_of(peer, server.getsockname()) is None:
                break
        assert owners.owner_of(peer, server.getsockname()) is None
        server.close()
    owners.close()


def test_owner_is_unknown_where_it_cannot_be_known() -> None:
    owners = PeerOwners()
    assert owners.owner_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert owners.owner_of(("192.0.2.1", 1), ("127.0.0.1", 2)) is None
    assert owners.owner_of(("::1", 1), ("127.0.0.1", 2)) is None
    assert owners.owner_of(("not an address", 1), ("127.0.0.1", 2)) is None
    owners.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:[::1]:5000", ("::1", 5000)),
        ("unix:/tmp/x", None),
        ("unknown", None),
    ],
)
def test_addresses_as_grpc_writes_them(peer: str, address: tuple[str, int] | None) -> None:
    assert parse_grpc_peer(peer) == address


def test_mapped_addresses_are_loopback_too() -> None:
    assert is_loopback("::ffff:127.0.0.1")
    assert is_loopback("127.8.9.10")
    assert not is_loopback("::ffff:192.0.2.1")
    assert not is_loopback("evil.example")


@pytest.mark.parametrize(
    "path", ["/api/workers", "/api/events", "/api/logs/live", "/api/health", "/metrics", "/", "/docs"]
)
def test_a_page_of_another_name_sees_nothing(shared: Coordinator, path: str) -> None:
    """DNS rebinding: a foreign name that points to this machine reaches the port, with a foreign Host."""
    status, answer = ask(shared.http_port, path, headers={"Host": f"evil.example:{shared.http_port}"})
    assert (status, answer["code"]) == (403, "forbidden")
    assert "evil.example" in answer["message"]


def test_rebinding_does_not_reach_a_coordinator_on_every_address(tmp_path: Path) -> None:
    server = Coordinator(
        tmp_path / "data", "--host", "0.0.0.0", "--trust-loopback", env={"STRATA_TOKEN": "x" * 16}
    ).start()
    try:
        assert ask(server.http_port, "/api/workers", headers={"Host": "evil.example"})[0] == 403
        assert ask(server.http_port, "/api/workers", headers={"Host": "localhost"})[0] == 200
    finally:
        server.stop()


@pytest.mark.parametrize(
    "path", ["/", "/api/workers", "/api/health", "/docs", "/metrics", "/nowhere", "/openapi.json"]
)
def test_browsers_do_not_guess_what_an_answer_is(shared: Coordinator, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.http_port, timeout=30)
    try:
        connection.request("GET", path)
        assert connection.getresponse().getheader("X-Content-Type-Options") == "nosniff"
    finally:
        connection.close()
