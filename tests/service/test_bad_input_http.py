"""Nothing anyone sends over HTTP gives a traceback, changes anything it should not, or goes unexplained."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from strata.client import ApiError, Client
from strata.rpc import coordinator_pb2 as pb
from tests.service.clients import stub
from tests.service.quiet import state
from tests.support import Coordinator

HUGE = "n" * 10_000_000
PLAIN: dict[str, Any] = {"dataset_id": "d", "path": "/d", "format": "parquet", "total_samples": 100}
TASK: dict[str, Any] = {"name": "t", "type": "training", "worker_count": 1}


@pytest.fixture(autouse=True)
def known(shared: Coordinator) -> None:
    status, _ = shared.post("/api/datasets", PLAIN)
    assert status in (200, 201)


def exchange(coordinator: Coordinator, request: bytes, *, more: tuple[bytes, ...] = ()) -> tuple[int, bytes]:
    """Raw bytes to the port; the status and body of what comes back."""
    with socket.create_connection(("127.0.0.1", coordinator.http_port), timeout=30) as wire:
        wire.sendall(request)
        try:
            for part in more:
                wire.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # It has answered and closed before it had read all of it.
        answer = b""
        try:
            while data := wire.recv(65_536):
                answer += data
        except ConnectionResetError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 "), answer[:200]
    return int(head.split()[1]), body


def post_raw(
    coordinator: Coordinator, path: str, body: bytes, kind: str = "application/json", **headers: str
) -> tuple[int, dict[str, Any]]:
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: 127.0.0.1:{coordinator.http_port}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    status, answer = exchange(coordinator, head, more=(body,))
    return status, json.loads(answer)


def explained(answer: dict[str, Any]) -> bool:
    return bool(answer["code"] and answer["message"] and answer["hint"]) and len(str(answer)) < 10_000


def nested(depth: int) -> bytes:
    return b'{"name": "t", "type": "x", "config": {"a": ' + b"[" * depth + b"]" * depth + b"}}"


DATASETS: dict[str, bytes] = {
    "empty id": json.dumps({**PLAIN, "dataset_id": ""}).encode(),
    "blank id": json.dumps({**PLAIN, "dataset_id": "  "}).encode(),
    "control characters": json.dumps({**PLAIN, "dataset_id": "a\x07"}).encode(),
    "lone surrogate": b'{"dataset_id": "\\ud800", "path": "/d", "format": "f", "total_samples": 1}',
    "surrogate as a key": b'{"\\ud800": 1}',
    "id of the wrong type": json.dumps({**PLAIN, "dataset_id": 7}).encode(),
    "no samples": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": 0}).encode(),
    "negative samples": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": -5}).encode(),
    "huge samples": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": 10**30}).encode(),
    "samples as text": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": "100"}).encode(),
    "fraction of a sample": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": 1.5}).encode(),
    "samples as true": json.dumps({**PLAIN, "dataset_id": "e", "total_samples": True}).encode(),
    "NaN samples": b'{"dataset_id": "e", "path": "/d", "format": "f", "total_samples": NaN}',
    "infinite samples": b'{"dataset_id": "e", "path": "/d", "format": "f", "total_samples": Infinity}',
    "1e999 samples": b'{"dataset_id": "e", "path": "/d", "format": "f", "total_samples": 1e999}',
    "a number of 5,000 digits": b'{"dataset_id": "e", "total_samples": ' + b"9" * 5_000 + b"}",
    "zero shard size": json.dumps({**PLAIN, "dataset_id": "e", "shard_size": 0}).encode(),
    "too many shards": json.dumps(
        {**PLAIN, "dataset_id": "e", "total_samples": 2**50, "shard_size": 1}
    ).encode(),
    "negative seed": json.dumps({**PLAIN, "dataset_id": "e", "seed": -1}).encode(),
    "shuffle as text": json.dumps({**PLAIN, "dataset_id": "e", "shuffle": "yes"}).encode(),
    "nested metadata": json.dumps({**PLAIN, "dataset_id": "e", "metadata": {"a": {"b": 1}}}).encode(),
    "huge metadata": json.dumps({**PLAIN, "dataset_id": "e", "metadata": {"a": "b" * 5_000}}).encode(),
    "unknown field": json.dumps({**PLAIN, "shard_sise": 5}).encode(),
    "missing fields": b"{}",
    "a list": b"[]",
    "null": b"null",
    "text": b'"text"',
    "empty": b"",
    "cut short": b'{"dataset_id": "d',
    "not JSON": b"dataset_id=d",
    "invalid UTF-8": b'{"dataset_id": "\xff\xfe", "path": "/d", "format": "f", "total_samples": 1}',
    "NUL bytes": b"\0" * 100,
    "100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "100,000 deep objects": b'{"a":' * 100_000,
}

TASKS: dict[str, bytes] = {
    "no workers": json.dumps({**TASK, "worker_count": 0}).encode(),
    "huge workers": json.dumps({**TASK, "worker_count": 10**9}).encode(),
    "empty name": json.dumps({**TASK, "name": ""}).encode(),
    "empty dataset": json.dumps({**TASK, "dataset_id": ""}).encode(),
    "deep config": nested(100_000),
    "rather deep config": nested(900),
    "NaN in config": b'{"name": "t", "type": "x", "config": {"lr": NaN}}',
    "infinity in config": b'{"name": "t", "type": "x", "config": {"lr": -Infinity}}',
    "surrogate in config": b'{"name": "t", "type": "x", "config": {"lr": "\\ud800"}}',
    "surrogate key in config": b'{"name": "t", "type": "x", "config": {"\\udfff": 1}}',
    "huge number in config": json.dumps({**TASK, "config": {"n": 10**400}}).encode(),
    "huge config": json.dumps({**TASK, "config": {"n": "x" * 300_000}}).encode(),
    "config is a list": json.dumps({**TASK, "config": []}).encode(),
    "unknown field": json.dumps({**TASK, "command": "rm -rf /"}).encode(),
}


def test_bodies_that_cannot_be_right_are_refused_and_change_nothing(shared: Coordinator) -> None:
    before = state(shared)
    for path, bodies in {"/api/datasets": DATASETS, "/api/tasks": TASKS}.items():
        for name, body in bodies.items():
            status, answer = post_raw(shared, path, body)
            assert status in (400, 422), f"{name}: {status} {answer}"
            assert answer["code"] in ("invalid_argument", "malformed"), f"{name}: {answer}"
            assert explained(answer), f"{name}: {answer}"
    assert state(shared) == before
    assert _no_traceback(shared)


def test_names_of_ten_megabytes_are_too_large(shared: Coordinator) -> None:
    before = state(shared)
    status, answer = post_raw(shared, "/api/datasets", json.dumps({**PLAIN, "dataset_id": HUGE}).encode())
    assert (status, answer["code"]) == (413, "too_large")
    assert explained(answer)
    for path in (f"/api/datasets/{HUGE[:30_000]}/shards", f"/api/tasks/{HUGE[:30_000]}/logs"):
        status, body = exchange(
            shared, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        assert status == 422
        assert explained(json.loads(body))
    status, body = exchange(shared, b"GET /api/tasks/", more=(HUGE.encode(), b"/logs HTTP/1.1\r\n\r\n"))
    assert status == 431
    assert explained(json.loads(body))
    assert state(shared) == before


def test_chunked_body_over_the_limit_is_cut_off(shared: Coordinator) -> None:
    head = (
        b"POST /api/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    status, body = exchange(shared, head, more=(chunk,) * 40)
    assert status == 413
    assert json.loads(body)["code"] == "too_large"


def test_length_that_is_no_number_is_refused(shared: Coordinator) -> None:
    for length in (b"-1", b"abc", b"9" * 5_000, b"1e3"):
        head = b"POST /api/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n"
        status, body = exchange(shared, head)
        assert status in (400, 413), length[:20]
        assert explained(json.loads(body))
    assert _no_traceback(shared)


def test_unknown_ids_are_not_found(shared: Coordinator) -> None:
    before = state(shared)
    for path in (
        "/api/datasets/nothing/shards",
        "/api/datasets/%ff%fe/shards",
        "/api/datasets/%00/shards",
        "/api/datasets/..%2f..%2fetc/shards",
        "/api/tasks/nothing/logs",
        "/api/nothing",
        "/API/workers",
    ):
        status, body = _get(shared, path)
        assert status == 404, path
        assert json.loads(body)["code"] == "not_found"
        assert explained(json.loads(body))
    status, answer = post_raw(shared, "/api/tasks/nothing/stop", b"")
    assert (status, answer["code"]) == (404, "not_found")
    status, answer = post_raw(shared, "/api/tasks", json.dumps({**TASK, "dataset_id": "nothing"}).encode())
    assert (status, answer["code"]) == (404, "not_found")
    assert state(shared) == before


def test_a_refusal_has_a_code_that_programs_can_tell_it_by(shared: Coordinator) -> None:
    with pytest.raises(ApiError, match="ghost") as caught:
        Client(shared.url).task("ghost")
    assert caught.value.answer_code == "not_found"


def test_paths_that_cannot_be_counted_are_refused(shared: Coordinator, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "garbage.parquet").write_bytes(os.urandom(1_000))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = state(shared)
    for path, kind in (
        ("/nowhere/at/all", "parquet"),
        ("/proc", "jsonl"),
        ("/dev/zero", "jsonl"),
        ("/dev/urandom", "text"),
        (str(tmp_path / "pipe.jsonl"), "jsonl"),
        (str(tmp_path / "garbage.parquet"), "parquet"),
        (str(tmp_path / "loop"), "jsonl"),
        ("x" * 4_000, "jsonl"),
        ("s3://", "jsonl"),
        ("s3://no-such-bucket.invalid/x", "jsonl"),
        (str(tmp_path), "no such format"),
    ):
        body = json.dumps({"dataset_id": "e", "path": path, "format": kind}).encode()
        status, answer = post_raw(shared, "/api/datasets", body)
        assert 400 <= status < 500, f"{path[:80]}: {answer}"
        assert explained(answer), path[:80]
    assert state(shared) == before
    assert _no_traceback(shared)


def test_previews_of_what_cannot_be_shown_are_refused(shared: Coordinator) -> None:
    with stub(shared.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="viewer", job_id="preview"))
        for number, meta in enumerate(({}, {"seq_length": "many"}, {"seq_length": "-1"})):
            body = {**PLAIN, "dataset_id": f"tokens-{number}", "format": "tokens", "metadata": meta}
            assert shared.post("/api/datasets", body)[0] == 201
            status, answer = _get(shared, f"/api/datasets/{quote(str(body['dataset_id']))}/preview")
            assert status == 422
            assert explained(json.loads(answer))
        for at in (float("nan"), float("inf"), -1e300, 1e300):
            position = pb.WorkerStatus(metrics={"data_position": at}, current_epoch=2**53)
            calls.Heartbeat(pb.HeartbeatRequest(worker_id="viewer", status=position))
            status, answer = _get(shared, "/api/datasets/d/preview?worker_id=viewer")
            assert status == 422
            assert explained(json.loads(answer))
        assert _get(shared, "/api/datasets/d/preview?worker_id=nobody")[0] == 404
        calls.DeregisterWorker(pb.DeregisterWorkerRequest(worker_id="viewer"))
    assert _no_traceback(shared)


def test_same_dataset_is_fine_and_a_different_one_a_conflict(shared: Coordinator) -> None:
    before = state(shared)
    assert shared.post("/api/datasets", PLAIN)[0] == 200
    for key, value in {
        "path": "/e",
        "format": "csv",
        "total_samples": 99,
        "shard_size": 7,
        "seed": 3,
    }.items():
        status, answer = shared.post("/api/datasets", {**PLAIN, key: value})
        assert (status, answer["code"]) == (409, "conflict")
        assert key in answer["message"]
        assert explained(answer)
    assert state(shared) == before


@pytest.mark.parametrize(
    "query",
    [
        "/api/logs?limit=0",
        "/api/logs?limit=-1",
        "/api/logs?limit=99999999999999999999",
        "/api/logs?limit=ten",
        "/api/logs?level=loud",
        "/api/logs?after=tomorrow",
        "/api/logs?after=log_" + "f" * 100,
        "/api/logs?q=" + "x" * 300,
        "/api/datasets/d/shards?epoch=-1",
        "/api/datasets/d/shards?epoch=1e3",
        "/api/datasets/d/shards?epoch=99999999999999999999999",
    ],
)
def test_questions_that_cannot_be_right_are_refused(shared: Coordinator, query: str) -> None:
    status, body = _get(shared, query)
    assert status == 422
    assert json.loads(body)["code"] == "invalid_argument"
    assert explained(json.loads(body))


def test_another_content_type_is_refused(shared: Coordinator) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "\x80",
    ):
        status, answer = post_raw(shared, "/api/datasets", json.dumps(PLAIN).encode(), kind=kind)
        assert 400 <= status < 500, kind
        assert explained(answer)


def test_noise_on_the_port_is_answered_in_kind(shared: Coordinator) -> None:
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /api/health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /api/health HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n",
    ):
        status, body = exchange(shared, noise)
        assert status == 400, noise[:40]
        assert explained(json.loads(body)), body
    assert shared.get("/api/health") == {"status": "ok"}
    assert _no_traceback(shared)


def test_endless_headers_are_cut_off(shared: Coordinator) -> None:
    head = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n"
    status, body = exchange(shared, head, more=(b"X-More: " + b"x" * 8_000 + b"\r\n",) * 1_000)
    assert status == 431
    assert explained(json.loads(body))


def test_wrong_method_is_refused(shared: Coordinator) -> None:
    for method, path in (("DELETE", "/api/datasets"), ("PUT", "/api/tasks"), ("POST", "/api/workers")):
        request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        status, body = exchange(shared, request.encode())
        assert status == 405
        assert explained(json.loads(body))


def _get(coordinator: Coordinator, path: str) -> tuple[int, bytes]:
    return exchange(
        coordinator, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )


def _no_traceback(coordinator: Coordinator) -> bool:
    return "Traceback" not in "".join(coordinator.output)
