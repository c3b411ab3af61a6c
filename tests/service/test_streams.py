"""Streams and pages: limits for each client, positions that are nonsense, and a page that its own policy allows."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import urllib.error
import urllib.request

import pytest

from tests.support import Coordinator, eventually

FOLLOWERS = 16


def follow(server: Coordinator, path: str, **headers: str) -> tuple[int, socket.socket]:
    wire = socket.create_connection(("127.0.0.1", server.http_port), timeout=30)
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
    wire.sendall("\r\n".join(lines).encode())
    return int(wire.recv(65_536).split()[1]), wire


def test_one_client_does_not_take_all_places_at_the_log(shared: Coordinator) -> None:
    held = [follow(shared, "/api/logs/live") for _ in range(FOLLOWERS)]
    try:
        assert [status for status, _ in held] == [200] * FOLLOWERS
        status, wire = follow(shared, "/api/logs/live")
        wire.close()
        assert status == 503
        assert urllib.request.urlopen(shared.url + "/api/logs", timeout=30).status == 200
    finally:
        for _, wire in held:
            wire.close()

    def served() -> bool:
        status, wire = follow(shared, "/api/logs/live")
        wire.close()
        return status == 200

    eventually(served, within_s=30, what="places are free again")


@pytest.mark.parametrize("path", ["/api/events", "/api/logs/live"])
@pytest.mark.parametrize("digits", ["9" * 5_000, "9" * 19, "-1", "٣", "0x1"])
def test_a_position_that_is_nonsense_is_no_position(shared: Coordinator, path: str, digits: str) -> None:
    with urllib.request.urlopen(shared.url + "/api/events", timeout=30) as stream:
        stream.readline()
        boot = "00000000"
    recent = shared.get("/api/events/recent")
    if recent:
        boot = recent[-1]["id"].rpartition("-")[0]
    for last in (f"{boot}-{digits}", digits, f"log_{digits}"):
        request = urllib.request.Request(shared.url + path)
        request.add_header("Last-Event-ID", last.encode().decode("latin-1"))
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
            assert answer.readline() == b"retry: 1000\n"
    assert "Traceback" not in "".join(shared.output)


@pytest.mark.parametrize("query", ["epoch", "limit", "offset"])
def test_a_number_of_thousands_of_digits_is_refused(shared: Coordinator, query: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        shared.get(f"/api/datasets/d/shards?{query}={'9' * 5_000}")
    assert refused.value.code == 422
    refused.value.close()
    assert "Traceback" not in "".join(shared.output)


def test_the_page_of_calls_is_allowed_by_its_own_policy(shared: Coordinator) -> None:
    with urllib.request.urlopen(shared.url + "/docs", timeout=30) as answer:
        policy, page = answer.headers["Content-Security-Policy"], answer.read().decode()
    allowed = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(styles) == 1
    digest = base64.b64encode(hashlib.sha256(styles[0].encode()).digest()).decode()
    assert allowed["style-src"] == f"'sha256-{digest}'"
    assert not re.search(r"<script|<link|<img|\sstyle=|\son\w+=|src=", page), (
        "nothing else needs a permission"
    )
