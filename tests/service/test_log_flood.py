"""Twenty thousand lines a second: memory stays bounded, every line is accounted for, nobody is taken for dead."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from strata import TrainingOrchestrator
from strata.coordinator.logs import store
from tests.support import Coordinator, eventually

LINES_PER_SECOND = 20_000
GROWS_BY_AT_MOST_BYTES = 150_000_000
HEARTBEAT_TIMEOUT_S = 10


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    env = {"STRATA_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S), "STRATA_LOG_LIMIT_MB": "50"}
    server = Coordinator(tmp_path / "coordinator", env=env).start()
    yield server
    server.stop()


def measured(coordinator: Coordinator) -> dict[str, float]:
    """Totals of all series, over their labels."""
    with urllib.request.urlopen(coordinator.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + (f" {sample.labels['why']}" if "why" in sample.labels else "")
            totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def flood(coordinator: Coordinator, *, sessions: int, seconds: int) -> dict[str, Any]:
    """What was sent, and what the coordinator was like meanwhile."""
    process = psutil.Process(coordinator.pid)
    began_s = time.monotonic()
    arguments = [coordinator.address, str(sessions), str(LINES_PER_SECOND), str(seconds)]
    flooding = subprocess.Popen(
        [sys.executable, "-m", "tests.service.log_flood", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert flooding.stdout is not None
    try:
        assert flooding.stdout.readline() == "under way\n"
        before_bytes, most_bytes, slowest_s, ages_s = process.memory_info().rss, 0, 0.0, []
        while flooding.poll() is None:
            asked_s = time.monotonic()
            (calm,) = (w for w in coordinator.get("/api/workers") if w["id"] == "calm")
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            ages_s.append(time.time() - calm["last_heartbeat"])
            assert calm["status"] != "failed", calm["reason"]
            most_bytes = max(most_bytes, process.memory_info().rss)
            time.sleep(0.2)
        sent = int(flooding.stdout.readline())
    finally:
        flooding.kill()
        flooding.wait(30)
        flooding.stdout.close()
    return {
        "sent": sent,
        "took_s": time.monotonic() - began_s,
        "grew_bytes": most_bytes - before_bytes,
        "oldest_heartbeat_s": max(ages_s),
        "slowest_answer_s": slowest_s,
    }


def check_flood(
    coordinator: Coordinator, capsys: pytest.CaptureFixture[str], *, sessions: int, seconds: int
) -> dict[str, float]:
    worker = TrainingOrchestrator(coordinator.address, job_id="calm", ship_logs=True)
    try:
        worker.register_worker("calm")
        assert worker.wait_connected(30)
        before = measured(coordinator)
        seen = flood(coordinator, sessions=sessions, seconds=seconds)
        assert worker.connected
        after = measured(coordinator)
        worker.deregister()
    finally:
        worker.close()
    change = {name: after[name] - before.get(name, 0.0) for name in after}
    kept, dropped = change["strata_log_lines_total"], change["strata_log_lines_dropped_total rate"]
    with capsys.disabled():
        lost = change["strata_log_lines_dropped_total disk"]
        counts = f"kept {kept:.0f}, dropped {dropped:.0f}, not on disk {lost:.0f}"
        print(f"\n{sessions} workers, {seconds} s: {seen}, {counts}", end=" ")
    assert seen["sent"] <= kept + dropped <= seen["sent"] + 1_000, (
        "every line, and a few of the coordinator's own"
    )
    share = store.LINES_PER_SECOND * (store.BURST_S + seen["took_s"])
    assert kept <= sessions * share + 1_000, "no more of anybody than its share, however long it took"
    assert seen["grew_bytes"] < GROWS_BY_AT_MOST_BYTES
    assert after["strata_worker_failures_total"] == 0, "nobody was taken for dead"
    assert seen["oldest_heartbeat_s"] < HEARTBEAT_TIMEOUT_S

    def told() -> bool:
        reports = coordinator.get("/api/logs?level=warn&limit=10000&q=were+dropped")
        assert {e["worker_id"] for e in reports} <= {f"chatty-{n}" for n in range(sessions)}
        return sum(int(e["message"].split()[0].replace(",", "")) for e in reports) == dropped

    eventually(told, within_s=30, what="the log says how many lines of whom were dropped")
    return change


def test_flood_is_bounded_counted_and_does_no_harm(
    coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    check_flood(coordinator, capsys, sessions=4, seconds=5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minute_of_flood_from_many_workers(
    coordinator: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each within its share, so that all of it has to be kept."""
    change = check_flood(coordinator, capsys, sessions=40, seconds=60)
    assert change["strata_log_lines_total"] > 0.5 * 60 * LINES_PER_SECOND
    size = sum(path.stat().st_size for path in coordinator.data_dir.glob("logs.sqlite*"))
    assert size < 50_000_000 * 1.5
