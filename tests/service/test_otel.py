"""Figures reach an OpenTelemetry collector, and a missing package is said plainly."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from strata.coordinator.metrics import otel
from strata.coordinator.metrics.otel import OtelExport
from strata.errors import MissingDependency
from tests.support import Coordinator, eventually

try:
    INSTALLED = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
except ModuleNotFoundError:
    INSTALLED = False
needs_sdk = pytest.mark.skipif(not INSTALLED, reason="needs strata-runtime[otel]")


@needs_sdk
def test_metrics_are_sent_under_their_own_names() -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    made = Counter("things", "Things made", ["kind"], registry=registry)
    level = Gauge("level", "How high", registry=registry)
    taken = Histogram("took_seconds", "How long", registry=registry)
    export = OtelExport(registry, reader=reader)
    made.labels("good").inc(3)
    level.set(0.5)
    taken.observe(2.0)
    export.refresh()
    data = reader.get_metrics_data()
    assert data is not None
    found = {
        (metric.name, tuple(point.attributes.items())): point.value  # type: ignore[union-attr]
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert found == {
        ("things_total", (("kind", "good"),)): 3.0,
        ("level", ()): 0.5,
        ("took_seconds_count", ()): 1.0,
        ("took_seconds_sum", ()): 2.0,
    }
    export.close()


class Receiver(HTTPServer):
    """An OTLP collector that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.bodies: list[bytes] = []


class _Take(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        assert self.path == "/v1/metrics"
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@needs_sdk
def test_coordinator_sends_its_metrics_to_a_collector(receiver: Receiver, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{receiver.server_port}/"
    server = Coordinator(tmp_path / "coordinator", env={"STRATA_OTEL_ENDPOINT": endpoint}).start()
    server.get("/api/health")
    assert server.stop() == 0, "the last figures are sent before the end"
    eventually(lambda: receiver.bodies, within_s=30)
    assert b"strata_workers" in receiver.bodies[-1]
    assert b"strata_log_lines_total" in receiver.bodies[-1]
    assert b"strata-coordinator" in receiver.bodies[-1]


@needs_sdk
@pytest.mark.slow
def test_collector_that_is_away_does_no_harm(tmp_path: Path) -> None:
    server = Coordinator(tmp_path / "c", env={"STRATA_OTEL_ENDPOINT": "http://127.0.0.1:9"}).start()
    assert server.get("/api/health") == {"status": "ok"}
    assert server.stop() == 0


def test_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(MissingDependency, match=r"strata-runtime\[otel\]") as missing:
        OtelExport(CollectorRegistry(), endpoint="http://127.0.0.1:9")
    assert missing.value.package == "opentelemetry-sdk"
    assert otel.EXPORT_EVERY_S > 0


def test_coordinator_without_the_package_says_so(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['opentelemetry.sdk.metrics'] = None; from strata.cli.main import main; main()"
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            hide,
            "serve",
            "--data-dir",
            str(tmp_path),
            "--grpc-port",
            "0",
            "--http-port",
            "0",
        ],
        env={"STRATA_OTEL_ENDPOINT": "http://127.0.0.1:9", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "opentelemetry-sdk" in ended.stderr
    assert "Traceback" not in ended.stderr
