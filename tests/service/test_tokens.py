"""Tokens that are given out: kept as digests, bound to a job, ended by time and by revoking; and how guessing is met."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from strata.coordinator.auth.gatekeeper import (
    FAILURES_AT_ONCE,
    AccessRules,
    Certificate,
    Connection,
    Gatekeeper,
    parse_subject,
    role_of,
)
from strata.coordinator.auth.peers import PeerOwners
from strata.coordinator.auth.principals import Forbidden
from strata.coordinator.auth.tokens import TaskTokens, TokenFileError, TokenStore, parse_expiry
from strata.core.messages import InvalidArgument, Unknown
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.cas import CoordinatorCasClient
from tests.cli.running import strata
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually
from tests.support_programs import program


def test_a_token_is_kept_as_a_digest_in_a_private_file(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    secret, token = store.create(name="ci", role="viewer")
    assert secret not in store.path.read_text()
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert len(secret) > 32
    assert store.find(secret) == token
    assert store.find(secret + "x") is None
    assert store.find(token.digest) is None, "what is in the file is not enough"


def test_tokens_end_by_time_and_by_revoking_in_other_processes_too(tmp_path: Path) -> None:
    store, other = TokenStore(tmp_path), TokenStore(tmp_path)
    secret, token = store.create(name="short", role="viewer", expires_s=60)
    assert other.find(secret) == token
    assert other.find(secret, now_s=time.time() + 61) is None
    other.revoke(token.id)
    assert store.find(secret) is None
    with pytest.raises(Unknown, match="strata token ls"):
        store.revoke(token.id)


def test_expired_tokens_do_not_stay_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TokenStore(tmp_path)
    store.create(name="old", role="viewer", expires_s=1)
    now_s = time.time()
    monkeypatch.setattr("strata.coordinator.auth.tokens.time.time", lambda: now_s + 3 * 86_400)
    store.create(name="new", role="viewer")
    assert [token.name for token in store.all()] == ["new"]


@pytest.mark.parametrize("damage", [b"{", b'{"tokens": [{}]}', b'{"tokens": 3}', b"\xff"])
def test_a_damaged_file_is_an_error_and_lets_nobody_in(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "tokens.json").write_bytes(damage)
    with pytest.raises(TokenFileError, match=r"tokens\.json"):
        TokenStore(tmp_path).find("anything")


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604_800), ("12h", 43_200), ("1.5m", 90), ("never", None)]
)
def test_time_spans(text: str, seconds: float | None) -> None:
    assert parse_expiry(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "7 days", "9999999d", "1e3s"])
def test_what_is_no_time_span_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_expiry(text)


def test_the_token_of_a_task_cannot_be_made_for_another(tmp_path: Path) -> None:
    tokens = TaskTokens(tmp_path)
    token = tokens.of("task-1")
    assert tokens.task_of(token) == "task-1"
    assert TaskTokens(tmp_path).task_of(token) == "task-1", "after a restart too"
    assert tokens.task_of(token.replace("task-1", "task-2")) is None
    assert tokens.task_of(token[:-1]) is None
    shutil.rmtree(tmp_path)
    assert TaskTokens(tmp_path).task_of(token) is None, "another coordinator's"
    assert stat.S_IMODE((tmp_path / "task-tokens.key").stat().st_mode) == 0o600


def gatekeeper(tmp_path: Path, rules: AccessRules | None = None, **clock: object) -> Gatekeeper:
    return Gatekeeper(
        rules or AccessRules(secrets={"the right token": "viewer"}, needs_credentials=True),
        tokens=TokenStore(tmp_path),
        task_tokens=TaskTokens(tmp_path),
        is_live=lambda task_id: True,
        **clock,  # type: ignore[arg-type]
    )


def from_address(address: str) -> Connection:
    return Connection((address, 4000), ("192.0.2.9", 3000), PeerOwners())


def test_guessing_is_slow_and_does_not_lock_out_those_who_know(tmp_path: Path) -> None:
    now_s = 1_000.0
    failures: list[str] = []
    keeper = gatekeeper(tmp_path, clock=lambda: now_s, on_failure=failures.append)
    attacker, colleague = from_address("192.0.2.1"), from_address("192.0.2.2")
    right = "Bearer the right token"
    assert keeper.identify(attacker, authorization=right).role == "viewer"

    def guess(authorization: str) -> int:
        with pytest.raises(Forbidden) as refused:
            keeper.identify(attacker, authorization=authorization)
        return refused.value.status

    answers = [guess(f"Bearer {number}") for number in range(1_000)]
    assert answers.count(401) <= FAILURES_AT_ONCE + 1
    assert answers[-1] == 429
    assert guess("Bearer another right one") == 429, "not looked at"
    assert keeper.identify(attacker, authorization=right).role == "viewer", "right before, from here"
    assert keeper.identify(colleague, authorization=right).role == "viewer", "from elsewhere"
    assert len(failures) == 1_001
    now_s += 10_000
    assert guess("Bearer wrong again") == 401


def test_digests_can_be_configured_instead_of_tokens(tmp_path: Path) -> None:
    from strata.coordinator.auth.tokens import digest_of

    secrets = {f"sha256:{digest_of('known to me alone')}": "operator"}
    keeper = gatekeeper(tmp_path, AccessRules(secrets=secrets, needs_credentials=True))  # type: ignore[arg-type]
    here = from_address("192.0.2.1")
    assert keeper.identify(here, authorization="Bearer known to me alone").role == "operator"
    with pytest.raises(Forbidden):
        keeper.identify(here, authorization=f"Bearer {next(iter(secrets))}")


@pytest.mark.parametrize(
    ("common", "units", "role", "job"),
    [
        ("node-7", (), "worker", None),
        ("alice", (), "operator", "her-run"),
        ("somebody", ("admin",), "admin", None),
        ("somebody", ("Research", "worker:big"), "worker", "big"),
        ("somebody", ("Research",), None, None),
        ("node-7", ("admin",), "worker", None),
        ("broken", (), None, None),
    ],
)
def test_certificates_have_the_role_they_were_given(
    common: str, units: tuple[str, ...], role: str | None, job: str | None
) -> None:
    roles = {"node-*": "worker", "alice": "operator:her-run", "broken": "emperor"}
    assert role_of(Certificate(common_name=common, units=units), roles) == (role, job)


def test_a_subject_cannot_pretend_to_be_two() -> None:
    assert parse_subject(r"CN=a\,OU=admin,OU=worker") == Certificate(
        common_name="a,OU=admin", units=("worker",)
    )
    assert parse_subject("OU=admin,CN=root of all") == Certificate(
        common_name="root of all", units=("admin",)
    )


# --- a running coordinator --------------------------------------------------------------------------------------


def test_guesses_are_throttled_and_counted(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "data", env={"STRATA_TOKEN": "the-right-token"}).start()
    try:
        assert server.call("GET", "/api/workers", token="the-right-token")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
        statuses = []
        for number in range(FAILURES_AT_ONCE + 50):
            connection.request("GET", "/api/workers", headers={"Authorization": f"Bearer {number}"})
            answer = connection.getresponse()
            answer.read()
            statuses.append((answer.status, answer.getheader("Retry-After")))
        assert statuses[0] == (401, None)
        # About one more in a second is looked at after all: it may be the last.
        assert statuses.count((429, "1")) >= 40
        connection.close()
        status, page = server.call("GET", "/metrics", token="the-right-token")
        assert status == 200, "it was right from here before"
        counted = next(
            line for line in page.decode().splitlines() if 'refused_total{reason="throttled"}' in line
        )
        assert float(counted.split()[-1]) >= 40
    finally:
        server.stop()


def test_weak_tokens_are_refused_where_other_machines_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TOKEN", "x")
    ports = ("--http-port", "0", "--grpc-port", "0")
    ran = strata("serve", "--host", "0.0.0.0", *ports, "--data-dir", str(tmp_path))
    assert ran.code == 2
    assert "shorter than 16 characters" in ran.err
    assert "Traceback" not in ran.err


def test_a_strong_token_without_tls_is_warned_about(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "data", "--host", "0.0.0.0", env={"STRATA_TOKEN": "x" * 32}).start()
    server.stop()
    assert "without TLS" in "".join(server.output)


def test_command_line_creates_lists_and_revokes(shared: Coordinator) -> None:
    made = strata(
        "token", "create", "--role", "worker", "--job", "mine", "--expires", "7d", "--api", shared.url
    )
    assert made.code == 0, made.err
    secret = made.out.strip()
    assert "worker of job 'mine'" in made.err
    listed = json.loads(strata("token", "ls", "--json", "--api", shared.url).out)
    token = next(token for token in listed if token["job_id"] == "mine")
    assert secret not in json.dumps(listed)
    assert token["id"] in strata("token", "ls", "--api", shared.url).out
    with stub(shared.address) as calls:
        beside = (("authorization", f"Bearer {secret}"),)
        with pytest.raises(grpc.RpcError, match="bound to job 'mine'"):
            calls.RegisterWorker(
                pb.RegisterWorkerRequest(worker_id="x", job_id="other"), metadata=beside, timeout=30
            )
    assert strata("token", "revoke", token["id"], "--api", shared.url).code == 0
    assert strata("token", "revoke", token["id"], "--api", shared.url).code == 1
    wrong = strata("token", "create", "--role", "emperor", "--api", shared.url)
    assert wrong.code != 0
    assert "Traceback" not in wrong.err


def test_tokens_can_be_made_before_there_is_a_coordinator(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    made = strata("token", "create", "--role", "viewer", "--data-dir", data)
    assert made.code == 0, made.err
    server = Coordinator(tmp_path / "data", env={"STRATA_TOKEN": "the-admins-own-token"}).start()
    try:
        assert server.call("GET", "/api/workers", token=made.out.strip())[0] == 200
        listed = json.loads(strata("token", "ls", "--json", "--data-dir", data).out)
        assert strata("token", "revoke", listed[0]["id"], "--data-dir", data).code == 0
        assert server.call("GET", "/api/workers", token=made.out.strip())[0] == 401, "without a restart"
    finally:
        server.stop()


def test_streams_end_with_the_token_they_were_opened_with(shared: Coordinator) -> None:
    _, made = shared.post("/api/tokens", {"role": "worker", "job_id": "brief", "name": "brief"})
    beside = (("authorization", f"Bearer {made['token']}"),)
    with stub(shared.address) as calls, channel(shared.address) as own:
        registered = calls.RegisterWorker(
            pb.RegisterWorkerRequest(worker_id="brief", job_id="brief"), metadata=beside, timeout=30
        )
        session = RawSession(own, metadata=beside).hello("brief", incarnation=registered.incarnation)
        session.wait_for("welcome")
        assert shared.call("DELETE", f"/api/tokens/{made['id']}")[0] == 204
        assert session.ended.wait(60), "the stream of a revoked token is open"


def test_a_sign_in_ends_with_the_token_it_came_from_by_link_too(tmp_path: Path) -> None:
    keeper = gatekeeper(tmp_path)
    here = from_address("192.0.2.1")
    secret, token = keeper.tokens.create(name="t", role="operator")
    maker = keeper.identify(here, authorization=f"Bearer {secret}")
    by_token = keeper.sign_in(secret, here)
    by_link = keeper.sign_ins.redeem(keeper.sign_ins.create_link(maker))
    visitor = keeper.identify(here, cookie=by_link)
    assert visitor.role == "operator"
    with pytest.raises(Forbidden, match="cannot create links"):
        keeper.sign_ins.create_link(visitor)
    keeper.tokens.revoke(token.id)
    for cookie in (by_token, by_link):
        with pytest.raises(Forbidden):
            keeper.identify(here, cookie=cookie)


def test_audit_log_on_the_command_line(shared: Coordinator) -> None:
    shared.post("/api/tasks", {"name": "unfit", "type": "nothing"})
    ran = strata("audit-log", "--api", shared.url, "--grep", "POST /api/tasks")
    assert ran.code == 0, ran.err
    assert f"uid {os.geteuid()}" in ran.out
    entries = [
        json.loads(line) for line in strata("audit-log", "--json", "--api", shared.url).out.splitlines()
    ]
    assert any(entry["action"] == "POST /api/tasks" and entry["outcome"] == "failed" for entry in entries)


def test_a_damaged_file_of_tokens_costs_those_tokens_and_nothing_else(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "data", env={"STRATA_TOKEN": "the-admins-own-token"}).start()
    try:
        _, made = server.post("/api/tokens", {"role": "viewer"}, token="the-admins-own-token")
        assert server.call("GET", "/api/workers", token=made["token"])[0] == 200
        (tmp_path / "data" / "tokens.json").write_text('{"tokens": [{"id": 3}]}')
        status, answer = server.call("GET", "/api/workers", token=made["token"])
        assert (status, answer["code"]) == (401, "forbidden")
        assert "tokens.json" not in json.dumps(answer), "not for strangers"
        with stub(server.address) as calls, pytest.raises(grpc.RpcError) as refused:
            calls.ListDatasets(
                pb.ListDatasetsRequest(), metadata=(("authorization", f"Bearer {made['token']}"),), timeout=30
            )
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert server.call("GET", "/api/workers", token="the-admins-own-token")[0] == 200
        status, answer = server.call("GET", "/api/tokens", token="the-admins-own-token")
        assert (status, answer["code"]) == (503, "tokens")
        assert "Restore the file" in answer["hint"]
    finally:
        server.stop()
    output = "".join(server.output)
    assert "Traceback" not in output
    assert output.count("cannot be read") == 1, "logged once"


def test_foreign_names_and_paths_that_are_not_read_are_in_the_audit_log(
    shared: Coordinator, tmp_path: Path
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", shared.http_port, timeout=30)
    connection.request("GET", "/api/workers", headers={"Host": "rebound.example"})
    assert connection.getresponse().read()
    connection.close()
    body = {"dataset_id": "passwords", "path": "/etc/passwd", "format": "text", "total_samples": 1}
    assert shared.post("/api/datasets", body)[0] == 201
    assert shared.call("GET", "/api/datasets/passwords/preview")[0] == 403
    assert shared.post("/api/session", {"token": "wrong"})[0] == 401
    refused = [e for e in shared.get("/api/audit-log?limit=200") if e["outcome"] == "refused"]
    for action, reason in (
        ("GET /api/workers", "rebound.example"),
        ("GET /api/datasets/passwords/preview", "/etc/passwd"),
        ("POST /api/session", "not valid"),
    ):
        assert any(e["action"] == action and reason in e["reason"] for e in refused), action


# --- certificates ---------------------------------------------------------------------------------------------


def test_certificates_of_the_command_line_carry_roles_and_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    made = strata("certs", "init", "--dir", str(certs), "--host", "127.0.0.1", "--host", "localhost")
    assert made.code == 0, made.err
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in certs.glob("*.key"))
    again = strata("certs", "init", "--dir", str(certs))
    assert again.code == 1
    assert "exists already" in again.err
    issued = strata("certs", "issue", "bound", "--role", "worker", "--job", "mine", "--dir", str(certs))
    assert issued.code == 0, issued.err
    env = {
        "STRATA_TLS_CERT": str(certs / "coordinator.pem"),
        "STRATA_TLS_KEY": str(certs / "coordinator.key"),
        "STRATA_TLS_CLIENT_CA": str(certs / "ca.pem"),
    }
    server = Coordinator(tmp_path / "data", env=env).start()
    try:

        def act_as(name: str) -> None:
            monkeypatch.setenv("STRATA_TLS_CA", str(certs / "ca.pem"))
            monkeypatch.setenv("STRATA_TLS_CERT", str(certs / f"{name}.pem"))
            monkeypatch.setenv("STRATA_TLS_KEY", str(certs / f"{name}.key"))

        api = f"https://127.0.0.1:{server.http_port}"
        act_as("worker")
        assert strata("workers", "--api", api).code == 0
        refused = strata("token", "ls", "--api", api)
        assert refused.code == 1
        assert "needs admin" in refused.err
        client = CoordinatorCasClient(server.address, timeout_s=20)
        assert client.cas("key", b"value", None)[0]
        client.close()
        act_as("bound")
        assert "bound to job 'mine'" in strata("workers", "--api", api).err
        client = CoordinatorCasClient(server.address, timeout_s=20)
        assert client.get("key") is None, "values of its own job alone"
        client.close()
        act_as("admin")
        assert strata("token", "ls", "--api", api).code == 0

        before = _serial(server.http_port)
        renewed = tmp_path / "renewed"
        renewed.mkdir()
        for name in ("ca.pem", "ca.key"):
            shutil.copy(certs / name, renewed / name)
        args = ("--host", "127.0.0.1", "--host", "localhost", "--dir", str(renewed))
        assert strata("certs", "issue", "coordinator", *args).code == 0
        for name in ("coordinator.key", "coordinator.pem"):
            os.replace(renewed / name, certs / name)
        for port in (server.http_port, server.grpc_port):
            eventually(lambda: _serial(port) != before, within_s=60, what=f"port {port} has the new one")  # noqa: B023
        assert strata("workers", "--api", api).code == 0
    finally:
        server.stop()


def _serial(port: int) -> str:
    shown = subprocess.run(
        [program("openssl"), "s_client", "-connect", f"127.0.0.1:{port}"],
        input=b"",
        capture_output=True,
        timeout=30,
        check=False,
    )
    told = subprocess.run(
        [program("openssl"), "x509", "-noout", "-serial"],
        input=shown.stdout,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return told.stdout.decode()
