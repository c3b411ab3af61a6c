"""A real training that loses a worker: its figures arrive, and its time is accounted for."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from typing import Any

import pytest

from strata.chaos.run import ChaosRun
from tests.e2e.conftest import StartRun
from tests.support import eventually

pytestmark = pytest.mark.timeout(600)


def get(run: ChaosRun, path: str) -> Any:
    with urllib.request.urlopen(run.coordinator.api + path, timeout=30) as answer:
        return json.load(answer)


def test_metrics_of_a_training_arrive_and_its_time_is_accounted_for(start_run: StartRun) -> None:
    began_s = time.time()
    run = start_run(name="observed", steps=100_000)
    job = run.job.name

    def spent(part: str) -> float:
        return sum(float(s[part]) for s in get(run, "/api/goodput") if s["job_id"] == job)

    def processes() -> int:
        return int(get(run, f"/api/jobs/{job}/goodput")["processes"])

    stepped_s = time.time()
    eventually(
        lambda: spent("training_s") > 1 and processes() == 2, within_s=120, what="two workers in training"
    )
    os.kill(run.agents[0].workers()[1], signal.SIGKILL)
    recovered = eventually(
        lambda: [r for r in get(run, "/api/recoveries") if r["job_id"] == job],
        within_s=120,
        what="a recovery",
    )[0]
    eventually(lambda: spent("recovery_s") >= recovered["total_s"], within_s=60, what="what it took")
    before_s = spent("training_s")
    eventually(
        lambda: spent("training_s") > before_s + 1 and processes() == 4, within_s=120, what="more training"
    )

    def workers() -> list[dict[str, Any]]:
        return [w for w in get(run, "/api/workers") if w["job_id"] == job]

    def measured() -> dict[str, Any] | None:
        found = workers()
        names = {"loss", "tokens_per_second", "samples_per_second", "step_time_s", "sync_wait_s"}
        ready = len(found) == 2 and all(names <= w["metrics"].keys() for w in found)
        return found[0]["metrics"] if ready else None

    figures = eventually(measured, within_s=60, what="figures of both workers")
    assert 0 < figures["loss"] < 10
    assert 0 <= figures["sync_wait_s"] < figures["step_time_s"] < 10
    assert figures["tokens_per_second"] > figures["samples_per_second"] > 0
    asked_s = time.time()
    eventually(
        lambda: all(w["last_heartbeat"] > asked_s for w in workers()),
        within_s=60,
        what="word from both of what was until now",
    )
    total_s = spent("total_s")
    assert total_s < 2 * (time.time() - began_s), "no second is counted twice"
    assert total_s > 0.6 * 2 * (asked_s - stepped_s), "every second of both workers is somewhere"
    assert spent("checkpoint_s") > 0
    assert spent("waiting_s") > 0
    assert processes() == 4

    def figures_over_time(series: str) -> list[float]:
        history = get(run, f"/api/metrics/history?job_id={job}&series=loss,step")["series"]
        return [value for value in history[series]["values"] if value is not None]

    eventually(
        lambda: (steps := figures_over_time("step")) and steps[-1] > steps[0], within_s=60, what="more steps"
    )
    assert figures_over_time("loss")
