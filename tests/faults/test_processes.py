"""A coordinator that is stopped for a while, whose disk fills up, whose clock is set back, or beside which another is started."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import strata
from tests.faults.healthy import Healthy
from tests.service.test_full_disk import fill
from tests.stores.mounts import small_tmpfs
from tests.support import Coordinator, eventually
from tests.support_programs import program

TIMEOUT_S = 6.0
QUICK = {"STRATA_HEARTBEAT_TIMEOUT": f"{TIMEOUT_S:g}", "STRATA_DISCONNECT_GRACE": "30"}
MB = 1 << 20


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "data", env=QUICK).start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output), "".join(server.output)


def test_a_coordinator_that_stood_still_for_longer_than_the_timeout_fails_nobody(
    coordinator: Coordinator,
) -> None:
    with Healthy(coordinator) as healthy:
        os.kill(coordinator.pid, signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 1.0)  # The fault itself.
        os.kill(coordinator.pid, signal.SIGCONT)
        healthy.round_trips_s(2 * TIMEOUT_S / 3)
        healthy.check()


def test_a_disk_that_fills_up_under_load_and_is_freed_loses_nothing_and_fails_nobody(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "disk", size_bytes=24 * MB) as disk:
        server = Coordinator(disk / "data", env=QUICK).start()
        try:
            with Healthy(server) as healthy:
                ballast = fill(disk)
                eventually(lambda: server.get("/api/status")["storage"]["is_full"], within_s=30)
                time.sleep(TIMEOUT_S + 0.5)  # Longer than the timeout: heartbeats need no disk.
                statuses = {row["id"]: row["status"] for row in server.get("/api/workers")}
                assert "failed" not in statuses.values(), statuses
                ballast.unlink()
                eventually(lambda: not server.get("/api/status")["storage"]["is_full"], within_s=30)
                healthy.round_trips_s(0.5)
                healthy.check()
        finally:
            assert server.stop() == 0
        assert "Traceback" not in "".join(server.output), "".join(server.output)


def test_a_clock_that_is_set_back_by_an_hour_fails_nobody_and_numbers_continue(tmp_path: Path) -> None:
    program("faketime")
    library = next(Path("/usr/lib").rglob("libfaketime.so.1"))
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    env = {
        **QUICK,
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    server = Coordinator(tmp_path / "data", env=env).start()
    try:
        with Healthy(server) as healthy:
            before_s = server.get("/api/dashboard")["coordinator"]["server_time"]
            clock.write_text("-3600\n")
            eventually(
                lambda: server.get("/api/dashboard")["coordinator"]["server_time"] < before_s - 3_000,
                within_s=30,
            )
            healthy.round_trips_s(TIMEOUT_S + 1.0)
            healthy.check()
            clock.write_text("+0\n")
            healthy.round_trips_s(0.5)
            statuses = {row["id"]: row["status"] for row in server.get("/api/workers")}
            assert "failed" not in statuses.values(), statuses
    finally:
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.output), "".join(server.output)


def test_a_second_coordinator_on_the_data_directory_is_refused_and_the_first_not_disturbed(
    coordinator: Coordinator,
) -> None:
    with Healthy(coordinator) as healthy:
        ran = strata("serve", "--data-dir", str(coordinator.data_dir), "--grpc-port", "0", "--http-port", "0")
        assert ran.code == 1
        assert "Another coordinator is using" in ran.err
        assert (
            json.loads((coordinator.data_dir / "serving.json").read_text())["grpc"] == coordinator.grpc_port
        )
        healthy.check()
