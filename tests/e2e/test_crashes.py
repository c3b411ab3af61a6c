"""A job that is killed again and again ends with the model of one that never was."""

from __future__ import annotations

import pytest
import torch

from strata.chaos.report import judge_checkpoints
from strata.chaos.run import ChaosRun, final_parameters
from strata.cli.common import get
from strata.data.history import audit_epochs
from strata.launch.sample_job import DATASET
from tests.e2e.conftest import StartRun
from tests.support import eventually

WAIT_S = 600.0


def assert_same_parameters(one: ChaosRun, other: ChaosRun) -> None:
    ours, theirs = final_parameters(one.job.checkpoints), final_parameters(other.job.checkpoints)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, theirs[name]), f"{name} differs"


def assert_exact(run: ChaosRun) -> None:
    reports = audit_epochs(run.job.checkpoints, DATASET)
    assert all(report.clean for report in reports), [report.reason for report in reports]
    assert reports[0].exact, reports[0].reason


@pytest.mark.timeout(900)
def test_twenty_kills_of_any_rank_leave_no_trace_in_the_model(start_run: StartRun) -> None:
    steps = 800
    undisturbed = start_run(name="calm", workers=2, steps=steps)
    undisturbed.wait(WAIT_S)
    run = start_run(name="hurt", workers=2, steps=steps, seed=1)
    for _ in range(20):
        injury = run.hurt(["kill"], patience_s=120.0)
        assert injury.recovery_s is not None, run.agents[0].tail()
    assert run.step < steps, "the job ended before its last kill"
    run.wait(WAIT_S)
    assert_same_parameters(undisturbed, run)
    assert_exact(run)
    assert judge_checkpoints(run.job.checkpoints).passed


def test_three_workers_add_gradients_in_the_same_order_after_a_crash(start_run: StartRun) -> None:
    undisturbed = start_run(name="calm3", workers=3, steps=150, global_batch=12)
    undisturbed.wait(WAIT_S)
    run = start_run(name="hurt3", workers=3, steps=150, global_batch=12)
    run.hurt(["kill"], patience_s=120.0)
    run.wait(WAIT_S)
    assert_same_parameters(undisturbed, run)
    assert_exact(run)


def test_a_recovery_is_traced_by_phase_and_shown(start_run: StartRun) -> None:
    run = start_run(name="traced", workers=2, steps=100_000)
    eventually(lambda: run.step > run.job.snapshot_every + 1, within_s=60, what="the first snapshot")
    run.hurt(["kill"], patience_s=120.0)
    api = run.coordinator.api

    def mine() -> list[dict[str, object]]:
        return [r for r in get(api, "/api/recoveries") if r["job_id"] == run.job.name]

    found = eventually(mine, within_s=30, what="the recovery at the coordinator")[0]
    assert set(found["phases_s"]) == {"detect", "rendezvous", "spawn", "load", "first_step"}
    assert found["tier"] == "MEMORY"
    assert found["lost_steps"] <= run.job.snapshot_every


def test_the_coordinator_may_die_while_training_goes_on(start_run: StartRun) -> None:
    run = start_run(name="orphan", workers=2, steps=100_000)
    before = run.step
    injury = run.hurt(["coordinator"], patience_s=60.0)
    assert injury.recovery_s is not None
    assert run.step > before

    def training() -> bool:
        workers = [w for w in get(run.coordinator.api, "/api/workers") if w["job_id"] == run.job.name]
        return len(workers) == 2 and all(w["connected"] for w in workers)

    eventually(training, within_s=30, what="both workers at the restarted coordinator")
    run.hurt(["kill"], patience_s=120.0)
