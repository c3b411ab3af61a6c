"""What workers report becomes figures, history, goodput, and the name of the rank the others wait for."""

from __future__ import annotations

import json
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from strata import TrainingOrchestrator
from strata.core.telemetry.stragglers import REPORTS
from tests.cli.running import strata
from tests.service.clients import EventStream
from tests.support import Coordinator, eventually


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    env = {"STRATA_HEARTBEAT_INTERVAL": "0.1"}
    server = Coordinator(tmp_path_factory.mktemp("watch") / "coordinator", env=env).start()
    yield server
    server.stop()


def report(worker: TrainingOrchestrator, step: int, *, own_s: float, training_s: float) -> None:
    """In lock step: everyone takes as long as the slowest, and waits for it."""
    figures = {"loss": 2.0, "tokens_per_second": 100.0, "samples_per_second": 8.0, "step_time_s": 0.5}
    times = {
        "account_began_s": 7.0,
        "training_total_s": training_s,
        "checkpoint_total_s": 1.0,
        "recovery_total_s": 0.5,
        "waiting_total_s": 0.5,
    }
    worker.heartbeat(step, 0, state="training", metrics={**figures, **times, "sync_wait_s": 0.5 - own_s})


def of_worker(coordinator: Coordinator, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(w for w in coordinator.get("/api/workers") if w["id"] == name)
    return found


def measured(history: dict[str, Any], name: str) -> list[float]:
    return [value for value in history["series"][name]["values"] if value is not None]


def test_job_is_measured_remembered_and_its_slow_rank_named(coordinator: Coordinator) -> None:
    began_s = time.time()
    workers = [TrainingOrchestrator(coordinator.address, job_id="run") for _ in range(3)]
    try:
        with EventStream(coordinator.http_port) as events:
            for rank, worker in enumerate(workers):
                worker.register_worker(f"run-rank{rank}")

            def slow_shown(step: int, own_s: float) -> dict[str, Any] | None:
                for rank, worker in enumerate(workers):
                    report(worker, step, own_s=own_s if rank == 2 else 0.1, training_s=8.0 + rank)
                time.sleep(0.3)
                shown = of_worker(coordinator, "run-rank2")
                return shown if shown["slow"] == (own_s > 0.2) else None

            steps = iter(range(10_000))
            slow = eventually(lambda: slow_shown(next(steps), 0.45), within_s=60)
            assert next(steps) >= REPORTS
            assert slow["reason"].startswith("450 ms/step, 4.5× the median of 100 ms")
            assert f"slow: {slow['reason']}" in strata("workers", "--api", coordinator.url).out
            heard = events.wait_for("worker_slow")
            assert (heard.data["worker_id"], heard.data["job_id"]) == ("run-rank2", "run")
            (line,) = coordinator.get("/api/logs?worker_id=run-rank2&q=slow")
            assert line["level"] == "warn"
            assert line["message"].startswith("run-rank2 is slow: 450 ms/step")

            spent = coordinator.get("/api/jobs/run/goodput")
            assert (spent["training_s"], spent["checkpoint_s"], spent["waiting_s"]) == (27.0, 3.0, 1.5)
            assert spent["goodput"] == pytest.approx(27 / 33)
            assert spent["processes"] == 3
            history = coordinator.get(
                f"/api/metrics/history?job_id=run&series=loss,step,slow_workers&since={began_s}"
            )
            assert history["step"] == 1
            assert {name: s["unit"] for name, s in history["series"].items()} == {
                "loss": "1",
                "step": "steps",
                "slow_workers": "workers",
            }
            assert set(history["series"]["loss"]["values"]) >= {2.0}
            assert 1.0 in history["series"]["slow_workers"]["values"]
            fleet = coordinator.get("/api/metrics/history?step=60")
            # In the first second of a minute nothing has been measured in it yet.
            assert measured(fleet, "active_workers")[-1] > 0
            assert measured(fleet, "memory")[-1] > 1e6

            eventually(lambda: slow_shown(next(steps), 0.1), within_s=60)
            events.wait_for("worker_caught_up")
    finally:
        for worker in workers:
            worker.close()


def written_down(coordinator: Coordinator, note: str = "goodput") -> bytes:
    path = coordinator.data_dir / "logs.sqlite"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
        row = db.execute("SELECT value FROM notes WHERE key = ?", (note,)).fetchone()
    return bytes(row[0]) if row is not None else b""


def test_goodput_survives_a_crash_of_the_coordinator(coordinator: Coordinator) -> None:
    with TrainingOrchestrator(coordinator.address, job_id="crash") as worker:
        worker.register_worker("w")
        report(worker, 1, own_s=0.5, training_s=8.0)
        eventually(lambda: b'"crash"' in written_down(coordinator), within_s=30)
        coordinator.kill()
        coordinator.start()
        assert coordinator.get("/api/jobs/crash/goodput")["training_s"] == 8.0
        report(worker, 2, own_s=0.5, training_s=9.0)
        eventually(lambda: coordinator.get("/api/jobs/crash/goodput")["training_s"] == 9.0, within_s=30)
        assert coordinator.get("/api/jobs/crash/goodput")["processes"] == 1


def test_what_a_job_reported_last_outlives_its_workers_and_the_coordinator(coordinator: Coordinator) -> None:
    def last() -> dict[str, Any] | None:
        found = [job for job in coordinator.get("/api/dashboard")["jobs"] if job["id"] == "stopped"]
        return found[0] if found else None

    with TrainingOrchestrator(coordinator.address, job_id="stopped") as worker:
        worker.register_worker("stopped-rank0")
        assert last() is None, "nothing was measured yet"
        assert coordinator.get("/api/jobs/stopped/goodput")["goodput"] is None
        report(worker, 41, own_s=0.5, training_s=8.0)
        eventually(last, within_s=30)
        eventually(lambda: b'"stopped"' in written_down(coordinator, "last_reported"), within_s=30)
        worker.deregister()
    coordinator.kill()
    coordinator.start()
    kept = last()
    assert kept is not None
    assert (kept["step"], kept["loss"], kept["goodput"]) == (41, 2.0, pytest.approx(0.8))


def test_each_worker_has_a_history_of_what_it_used(coordinator: Coordinator) -> None:
    with TrainingOrchestrator(coordinator.address, job_id="used") as worker:
        worker.register_worker("used-rank0")
        fresh = coordinator.get("/api/metrics/history?worker_id=used-rank0")
        assert fresh["step"] == 15
        assert not any(measured(fresh, name) for name in fresh["series"])
        report(worker, 1, own_s=0.5, training_s=8.0)
        found = eventually(
            lambda: measured(coordinator.get("/api/metrics/history?worker_id=used-rank0"), "step_time"),
            within_s=60,
        )
        assert set(found) == {0.5}
    for path in (
        "worker_id=nobody",
        "worker_id=used-rank0&job_id=another",
        "worker_id=used-rank0&series=loss",
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            coordinator.get(f"/api/metrics/history?{path}")
        refused.value.close()


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/metrics/history?series=nothing", 422, "coordinator_rps"),
        ("/api/metrics/history?series=loss", 422, "series"),
        ("/api/metrics/history?job_id=nobody", 404, "exists once"),
        ("/api/metrics/history?step=7", 422, "step"),
        ("/api/metrics/history?since=soon", 422, "since"),
        ("/api/jobs/nobody/goodput", 404, "reports"),
        ("/api/tasks/nobody/goodput", 404, "task"),
    ],
)
def test_wrong_questions_are_answered_properly(
    coordinator: Coordinator, path: str, status: int, words: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(coordinator.url + path, timeout=30)
    with refused.value as error:
        assert error.code == status
        answer = json.load(error)
        assert words in answer["message"] + answer["hint"]
