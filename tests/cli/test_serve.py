"""`strata serve`: starts with its settings, refuses what cannot work, and stops without a trace."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from strata import TrainingOrchestrator
from tests.cli.running import strata
from tests.service.clients import EventStream
from tests.service.fleet import Fleet
from tests.support import Coordinator, eventually


def refused(*arguments: str, **env: str) -> str:
    with patch.dict(os.environ, {"STRATA_TOKEN": "", **env}):
        ran = strata("serve", *arguments)
    assert ran.code in (1, 2), ran
    return f"{ran.code} {ran.err}"


def test_port_zero_picks_a_free_one_and_prints_it(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "deep" / "er" / "data").start()
    try:
        assert (server.data_dir / "journal.sqlite").exists()
        assert (server.data_dir / "lock").stat().st_mode & 0o077 == 0
        text = "".join(server.output)
        http = re.search(r"Dashboard: (http://127\.0\.0\.1:\d+)", text)
        grpc = re.search(r"Workers join at (127\.0\.0\.1:\d+)", text)
        assert http is not None
        assert grpc is not None
        with urllib.request.urlopen(http[1] + "/api/health", timeout=30) as answer:
            assert answer.read() == b'{"status":"ok"}'
        with TrainingOrchestrator(f"http://{grpc[1]}") as worker:
            assert worker.register_worker("w").rank == 0
        assert server.get("/api/status")["address"] == grpc[1]

        # A second coordinator is refused, with the reason.
        said = refused("--data-dir", str(server.data_dir), "--grpc-port", "0", "--http-port", "0")
        assert said.startswith("1 ")
        assert "Another coordinator is using" in said
        said = refused(
            "--data-dir", str(tmp_path / "b"), "--grpc-port", "0", "--http-port", str(server.http_port)
        )
        assert f"HTTP port {server.http_port} on 127.0.0.1 cannot be opened" in said
        assert "--http-port" in said
        said = refused(
            "--data-dir", str(tmp_path / "c"), "--grpc-port", str(server.grpc_port), "--http-port", "0"
        )
        assert f"gRPC port {server.grpc_port} on 127.0.0.1 cannot be opened" in said
        assert server.get("/api/health") == {"status": "ok"}, "the first one is not disturbed"
    finally:
        server.stop()


def test_every_problem_of_a_configuration_is_reported_at_once(tmp_path: Path) -> None:
    config = tmp_path / "strata.toml"
    config.write_text("[coordinator]\nhost = '0.0.0.0'\nhearbeat_timeout = 3\n")
    said = refused("--config", str(config), "--grpc-port", "70000", STRATA_HTTP_PORT="web")
    assert said.startswith("2 ")
    for words in (
        "4 problems",
        "did you mean 'heartbeat_timeout'?",
        "--grpc-port: must be between 0 and 65,535",
        "STRATA_HTTP_PORT: must be a whole number",
        "set a token (STRATA_TOKEN) or mutual TLS",
    ):
        assert words in said


def test_address_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    said = refused("--host", "192.0.2.1", "--data-dir", str(tmp_path), STRATA_TOKEN="t" * 16)
    assert "192.0.2.1 cannot be opened" in said


def test_wrong_log_levels_are_reported(tmp_path: Path) -> None:
    assert "STRATA_LOG: 'loud'" in refused("--data-dir", str(tmp_path), STRATA_LOG="loud")


def test_open_address_serves_with_a_token(tmp_path: Path) -> None:
    server = Coordinator(
        tmp_path / "data", "--host", "0.0.0.0", env={"STRATA_TOKEN": "a-secret-of-some-length"}
    ).start()
    try:
        request = urllib.request.Request(
            server.url + "/api/workers", headers={"Authorization": "Bearer a-secret-of-some-length"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.read() == b"[]"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url + "/api/workers", timeout=30)
    finally:
        server.stop()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_loopback_serves(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    server = Coordinator(tmp_path / "data", "--host", "::1").start()
    try:
        assert f"http://[::1]:{server.http_port}" in "".join(server.output)
        with urllib.request.urlopen(f"http://[::1]:{server.http_port}/api/health", timeout=30) as answer:
            assert answer.status == 200
        with TrainingOrchestrator(f"[::1]:{server.grpc_port}") as worker:
            worker.register_worker("w")
    finally:
        server.stop()


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 3], ids=["term", "impatient"])
def test_signal_stops_it_in_seconds_and_leaves_nothing_but_its_records(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    server = Coordinator(tmp_path / "data").start()
    with Fleet(server.address) as fleet, EventStream(server.http_port):
        first = fleet.register("a", "b", "c")
        waiting = fleet.begin("a", "barrier", "across", participants=3)
        eventually(lambda: server.get("/api/barriers"), within_s=30)
        process = psutil.Process(server.pid)
        children = process.children(recursive=True)
        began_s = time.monotonic()
        assert server.process is not None
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.02)
        assert server.process.wait(30) == 0
        elapsed_s = time.monotonic() - began_s
        assert elapsed_s < 20, f"it took {elapsed_s:.1f} s to stop"
        assert not any(child.is_running() for child in children)
        assert sorted(os.listdir(server.data_dir)) == [
            "audit.jsonl",
            "journal.sqlite",
            "lock",
            "logs.sqlite",
            "metrics.sqlite",
            "reserve",
            "task-tokens.key",
        ]
        assert "Traceback" not in "".join(server.output), "".join(server.output)
        for port in (server.grpc_port, server.http_port):
            socket.create_server(("127.0.0.1", port)).close()

        server.start()
        # A clean stop fails nobody: everyone is who they were, and the barrier they wait at continues.
        for name in ("b", "c"):
            fleet.begin(name, "barrier", "across", participants=3)
        assert waiting.result(60).value["participants"] == 3
        workers = {w["id"]: (w["incarnation"], w["status"]) for w in server.get("/api/workers")}
        assert workers == {w["worker_id"]: (w["incarnation"], "active") for w in first}
    server.stop()


def test_starts_without_torch(tmp_path: Path) -> None:
    script = "import sys; import strata.coordinator.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
