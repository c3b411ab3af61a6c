"""A job whose machines come and go: same data, same batch, same learning rate, nearly the same loss."""

from __future__ import annotations

from typing import Any

import pytest

from strata.chaos.evaluate import loss_of
from strata.chaos.run import ChaosRun
from strata.checkpoint.manager import CheckpointManager
from strata.cli.common import get
from strata.data.history import audit_epochs
from strata.launch.sample_job import DATASET
from strata.training.trace import last_footprint
from tests.e2e.conftest import StartRun
from tests.support import eventually

WAIT_S = 600.0


def world(run: ChaosRun) -> int:
    newest = last_footprint(run.job.name)
    return newest.world_size if newest is not None else 0


@pytest.mark.timeout(900)
def test_four_two_three_four_workers_in_one_run(start_run: StartRun) -> None:
    """Each agent stands for a machine with one worker."""
    options: dict[str, Any] = {"workers": 4, "global_batch": 12}
    run = start_run(name="resized", agents=4, steps=1_000_000, **options)
    eventually(lambda: world(run) == 4, within_s=120, what="a world of 4")
    for number in (2, 3):
        run.agents[number].kill()
    eventually(lambda: world(run) == 2, within_s=120, what="a world of 2")
    run.start_agent(2)
    eventually(lambda: world(run) == 3, within_s=120, what="a world of 3")
    run.start_agent(3)
    eventually(lambda: world(run) == 4, within_s=120, what="a world of 4 again")
    enough = run.step + 200
    eventually(lambda: run.step >= enough, within_s=120, what="some steps in the last world")
    for agent in run.agents:
        agent.stop()
    with CheckpointManager(run.job.checkpoints) as manager:
        latest = manager.get_latest()
    assert latest is not None
    reports = audit_epochs(run.job.checkpoints, DATASET)
    assert all(report.clean for report in reports), [report.reason for report in reports]
    rates = {
        w["metrics"].get("lr")
        for w in get(run.coordinator.api, "/api/workers")
        if w["job_id"] == run.job.name
    }
    assert rates <= {1e-3}

    undisturbed = start_run(name="constant", steps=latest.step, **options)
    undisturbed.wait(WAIT_S)
    ours, theirs = loss_of(run.job), loss_of(undisturbed.job)
    assert abs(ours - theirs) / theirs <= 0.01, (ours, theirs)
