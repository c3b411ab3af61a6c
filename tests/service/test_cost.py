"""`strata cost` and its call, of what real workers have reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from strata.config import ConfigError
from strata.coordinator.settings import read_settings
from tests.cli.running import strata
from tests.support import Coordinator, eventually


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    folder = tmp_path_factory.mktemp("cost")
    config = folder / "strata.toml"
    config.write_text(
        '[coordinator]\nprice_per_gpu_hour = 2.0\ncurrency = "EUR"\n[coordinator.prices]\n"llm-*" = 3.6\n'
    )
    env = {"STRATA_HEARTBEAT_INTERVAL": "0.1"}
    server = Coordinator(folder / "coordinator", "--config", str(config), env=env).start()
    with TrainingOrchestrator(server.address, job_id="llm-7b") as worker:
        worker.register_worker("llm-7b-rank0", gpu_count=2)
        times = {
            "account_began_s": 1.0,
            "training_total_s": 8_000.0,
            "recovery_total_s": 1_000.0,
            "checkpoint_total_s": 1_000.0,
            "step_time_s": 10.0,
        }
        worker.heartbeat(1_241, 0, state="training", metrics=times)
        eventually(lambda: "llm-7b" in {view["job_id"] for view in server.get("/api/goodput")}, within_s=60)
        worker.notify_checkpoint("c", 1_200, 0, "/c", 1, status="completed", tiers=["local"])
        worker.report_recovery(
            {"load": 30.0},
            resumed_step=1_240,
            lost_steps=7,
            tier="memory",
            world_before=1,
            world_after=1,
            reason="r",
        )
        yield server
    assert server.stop() == 0


def test_a_run_is_reckoned_with_its_price(coordinator: Coordinator) -> None:
    found = coordinator.get("/api/runs/llm-7b/cost")
    assert (found["price_per_gpu_hour"], found["currency"], found["counted"]) == (3.6, "EUR", "gpu")
    assert found["spent"]["cost"] == pytest.approx(20.0)
    lost = {loss["cause"]: (loss["incidents"], loss["cost"]) for loss in found["lost_by_cause"]}
    assert lost["unknown"] == (1, pytest.approx(0.2)), "(30 s and 7 steps of 10 s) on 2 GPUs"
    assert lost["recovery"] == (0, pytest.approx(1.8))
    assert found["saved"] == {
        "recoveries": 1,
        "steps": 40,
        "hours": pytest.approx(800 / 3600),
        "cost": pytest.approx(0.8),
    }


def test_the_command_shows_it_and_takes_another_price(coordinator: Coordinator) -> None:
    ran = strata("cost", "llm-7b", "--api", coordinator.url)
    assert ran.code == 0
    assert "20.00 EUR" in ran.out
    assert "40 steps that 1 recovery did not train again" in ran.out
    ran = strata("cost", "llm-7b", "--price", "36", "--json", "--api", coordinator.url)
    assert json.loads(ran.out)["spent"]["cost"] == pytest.approx(200.0)


def test_another_run_or_another_job_is_not_known(coordinator: Coordinator) -> None:
    assert strata("cost", "nobody", "--api", coordinator.url).code == 1
    status, answer = coordinator.call("GET", "/api/runs/llm-7b/cost?job_id=other")
    assert (status, answer["code"]) == (404, "not_found")
    status, _ = coordinator.call("GET", "/api/runs/llm-7b/cost?price_per_gpu_hour=-1")
    assert status == 422


def test_it_outlives_a_crash_of_the_coordinator(coordinator: Coordinator) -> None:
    before = coordinator.get("/api/runs/llm-7b/cost")
    note = coordinator.data_dir / "logs.sqlite-wal"
    eventually(lambda: note.exists() and b'"gpus": 2' in note.read_bytes(), within_s=60)
    coordinator.kill()
    coordinator.start()
    assert coordinator.get("/api/runs/llm-7b/cost") == before


def test_a_price_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text('[coordinator]\nprice_per_gpu_hour = -1\n[coordinator.prices]\na = "much"')
    with pytest.raises(ConfigError) as refused:
        read_settings(file=file, environ={})
    assert "prices.a must be a number, not 'much'" in str(refused.value)
    assert "price_per_gpu_hour in" in str(refused.value)
