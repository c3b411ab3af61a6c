"""`strata doctor` finds what is wrong on this machine, with real servers, ports, disks and buckets."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from strata.cli.doctor import doctor
from strata.diagnostics import network
from strata.stores import open_store
from tests.rendezvous.etcd_server import EtcdServer, free_port
from tests.stores.mounts import small_tmpfs
from tests.support_seaweed import READER_KEY, WRITER_KEY, seaweed

app = typer.Typer()
app.command()(doctor)

CONFOUNDERS = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "COORDINATOR_ADDR",
        "COORDINATOR_URL",
    ),
    *("STRATA_API_URL", "ETCD_ENDPOINT", "AWS_REGION", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CONFOUNDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "TIMEOUT_S", 30.0)  # What is there answers, however busy the machine is.


def examine(*words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the checks by name. The ports are ours to choose, so that other tests do not disturb."""
    ports = () if "--port" in words else ("--port", str(free_port()))
    result = CliRunner().invoke(app, ["--json", *ports, *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    document = json.loads(result.output)
    assert document["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in document["checks"]}


def test_a_machine_without_servers_passes_and_every_check_answers(tmp_path: Path) -> None:
    code, checks = examine("--checkpoint-dir", str(tmp_path))
    assert code == 0
    assert {
        "versions",
        "gpu",
        "shared memory",
        "limits",
        "environment",
        "network cards",
        "etcd",
        "disk",
        "s3",
    } <= set(checks)
    assert checks["versions"]["verdict"] == "ok"
    assert "torch" in checks["versions"]["found"]
    assert checks["s3"]["verdict"] == "skip"
    assert not any("could not be checked" in check["found"] for check in checks.values())


def test_table_lists_verdicts_and_fixes(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--checkpoint-dir", str(tmp_path / "absent")])
    assert result.exit_code == 1
    assert "fail" in result.output
    assert f"mkdir -p {tmp_path / 'absent'}" in result.output.replace("\n", "")


def test_named_servers_must_answer(tmp_path: Path) -> None:
    dead = free_port()
    code, checks = examine(
        *(
            "--etcd",
            f"localhost:{dead}",
            "--coordinator",
            f"localhost:{dead}",
            "--api",
            f"http://localhost:{dead}",
        )
    )
    assert code == 1
    assert checks["etcd"]["verdict"] == "fail"
    assert checks["etcd"]["found"].startswith(f"Failed to connect to etcd at localhost:{dead}")
    assert "start_etcd.sh start" in checks["etcd"]["fix"]
    assert checks["coordinator (gRPC)"]["verdict"] == checks["coordinator (HTTP)"]["verdict"] == "fail"
    assert "strata serve" in checks["coordinator (HTTP)"]["fix"]


@pytest.mark.etcd
def test_real_etcd_is_found_healthy(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        code, checks = examine("--etcd", server.endpoint)
    finally:
        server.stop()
    assert (code, checks["etcd"]["verdict"]) == (0, "ok")
    assert "healthy, version 3." in checks["etcd"]["found"]
    assert "v2 API off" in checks["etcd"]["found"]


def test_real_coordinator_is_found_and_its_clock_agrees(tmp_path: Path) -> None:
    grpc_port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "strata.cli.main", "serve", "--data-dir", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--grpc-port", str(grpc_port), "--http-port", str(http_port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + 60
        while True:
            code, checks = examine(
                *("--coordinator", f"127.0.0.1:{grpc_port}", "--api", f"http://127.0.0.1:{http_port}"),
                *("--port", str(grpc_port)),
            )
            served = code == 0 and "clock" in checks  # It may come up between one check and the next.
            if served or time.monotonic() > deadline_s or process.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert code == 0, checks
    assert checks["coordinator (gRPC)"]["verdict"] == checks["coordinator (HTTP)"]["verdict"] == "ok"
    assert checks["clock"]["verdict"] == "ok"
    assert "held by the coordinator" in checks[f"port {grpc_port}"]["found"]


@contextmanager
def coordinator_with_clock(offset_s: float) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(time.time() + offset_s, usegmt=True)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("offset_s", "verdict", "said"), [(120, "fail", "behind"), (-10, "warn", "ahead of")]
)
def test_clock_that_is_off_is_reported(offset_s: float, verdict: str, said: str) -> None:
    with coordinator_with_clock(offset_s) as address:
        _, checks = examine("--api", f"http://{address}", "--coordinator", address)
    assert checks["clock"]["verdict"] == verdict
    assert said in checks["clock"]["found"]
    assert "NTP" in checks["clock"]["fix"]


def test_slow_answer_is_no_wrong_clock() -> None:
    asked_s = 1_700_000_000.0
    for read_s, verdict in ((0.0, "ok"), (6.0, "ok"), (-10.0, "warn"), (16.0, "warn"), (-60.0, "fail")):
        date = formatdate(asked_s + read_s, usegmt=True)
        assert network.clock(date, asked_s, asked_s + 6.0).verdict == verdict, read_s


def test_port_in_use_names_the_process_that_holds_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, checks = examine("--port", str(port))
    assert code == 1
    assert "Address already in use" in checks[f"port {port}"]["found"]
    assert f"process {os.getpid()}" in checks[f"port {port}"]["found"]
    assert f"lsof -i :{port}" in checks[f"port {port}"]["fix"]


def test_stale_and_contradictory_torchrun_variables_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    code, checks = examine()
    assert (code, checks["environment"]["verdict"]) == (1, "fail")
    assert (
        "missing ['LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']" in checks["environment"]["found"]
    )
    for name, value in {
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert "outside the world" in examine()[1]["environment"]["found"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, checks = examine()
    assert (checks["environment"]["verdict"], checks["master address"]["verdict"]) == ("ok", "fail")


def test_variables_that_nothing_reads_are_named_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert examine()[1]["variables"]["verdict"] == "ok"
    monkeypatch.setenv("STRATA_HTP_PORT", "4000")
    monkeypatch.setenv("S3_BUCKET", "models")
    code, checks = examine()
    assert (code, checks["variables"]["verdict"]) == (0, "warn")
    assert checks["variables"]["found"] == (
        "the environment variable S3_BUCKET changes nothing (did you mean CHECKPOINT_BUCKET?); "
        "the environment variable STRATA_HTP_PORT changes nothing (did you mean STRATA_HTTP_PORT?)"
    )
    assert "unset" in checks["variables"]["fix"]


def test_network_card_that_does_not_exist_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    code, checks = examine()
    assert (code, checks["network cards"]["verdict"]) == (1, "fail")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    assert examine()[1]["network cards"]["verdict"] == "ok"


def test_full_disk_fails(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", size_bytes=64 << 10) as disk:
        (disk / "filler").write_bytes(b"x" * (64 << 10))
        code, checks = examine("--checkpoint-dir", str(disk))
    assert (code, checks["disk"]["verdict"]) == (1, "fail")
    assert "No space left on device" in checks["disk"]["found"]


@pytest.mark.s3
def test_bucket_is_tried_with_every_right_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seaweed(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        # The first object of a bucket makes its volumes, which may take longer than a probe waits.
        store = open_store("s3://probe", **server.options())
        store.put("first", b"x")
        store.delete("first")
        code, checks = examine("--s3-bucket", "s3://probe")
        assert code == 0, checks
        assert [checks[f"s3 {step}"]["verdict"] for step in ("write", "read", "list", "delete")] == ["ok"] * 4
        assert list(store.list()) == []

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
        code, checks = examine("--s3-bucket", "probe")
        assert (code, checks["s3 write"]["verdict"], checks["s3 list"]["verdict"]) == (1, "fail", "ok")
        assert "s3:PutObject" in checks["s3 write"]["fix"]

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", WRITER_KEY)
        code, checks = examine("--s3-bucket", "probe")
        assert (checks["s3 write"]["verdict"], checks["s3 list"]["verdict"]) == ("ok", "fail")

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stranger")
        code, checks = examine("--s3-bucket", "probe")
        assert (code, checks["s3 write"]["verdict"]) == (1, "fail")


def test_bucket_without_credentials_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    code, checks = examine("--s3-bucket", "some-bucket")
    assert (code, checks["s3"]["verdict"]) == (1, "fail")
    assert "NoCredentialsError" in checks["s3"]["found"]
    assert "AWS_ACCESS_KEY_ID" in checks["s3"]["fix"]
