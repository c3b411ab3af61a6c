"""A job whose machines come and go: same data, same batch, same learning rate, nearly the same loss."""

from __future__ import annotations

import re

import pytest

from strata.agent.trace import last_footprint
from strata.chaos.report import loss_of
from strata.chaos.run import ChaosRun
from strata.checkpoint.manager import CheckpointManager
from strata.cli.common import get
from strata.data.history import audit_epochs
from strata.launch.sample_job import DATASET
from tests.e2e.conftest import StartRun
from tests.support import eventually

WAIT_S = 600.0
MEET_S = 300.0
"""For several agents that start at once, and for a hundred steps of four workers, on two cores that others use too."""


def await_world(run: ChaosRun, size: int) -> None:
    def reached() -> bool:
        newest = last_footprint(run.job.name)
        return newest is not None and newest.world_size == size

    eventually(reached, within_s=MEET_S, what=lambda: f"a world of {size}\n{state_of_agents(run)}")


def state_of_agents(run: ChaosRun) -> str:
    """For whoever reads of a failure: who lives, and what each said last."""
    return "\n".join(
        f"agent {number}: {'running' if agent.is_running else f'ended with {agent.process.returncode}'}, "
        f"workers {agent.workers()}\n{agent.tail(5)}"
        for number, agent in enumerate(run.agents)
    )


def learning_rates(run: ChaosRun) -> list[float | None]:
    workers = get(run.coordinator.api, "/api/workers")
    return [w["metrics"].get("lr") for w in workers if w["job_id"] == run.job.name]


@pytest.mark.timeout(900)
def test_four_workers_too_few_two_three_and_four_again_in_one_run(start_run: StartRun) -> None:
    """Each agent stands for a machine with one worker."""
    run = start_run(name="resized", agents=4, min_agents=2, workers=4, global_batch=12, steps=1_000_000)
    await_world(run, 4)
    for number in (1, 2, 3):
        run.agents[number].kill()
    # Where the last machine goes late, the others may have met without the first two.
    refusal = (
        r"TopologyChangeError: Topology change \([432] -> 1 workers\) failed: World size below min_nodes"
    )
    eventually(
        lambda: re.search(refusal, run.agents[0].tail(200)),
        within_s=MEET_S,
        what="one worker is too few",
        every_s=0.2,
    )
    for number in (1, 2, 3):
        run.start_agent(number)
        await_world(run, number + 1)
    enough = run.step + 100
    eventually(lambda: run.step >= enough, within_s=MEET_S, what="some steps in the last world")
    # Before they leave one by one: those who stay meet anew, and have no figures yet.
    eventually(lambda: learning_rates(run) == [1e-3] * 4, within_s=60, what=lambda: str(learning_rates(run)))
    for agent in run.agents:
        agent.stop()
    with CheckpointManager(run.job.checkpoints) as manager:
        latest = manager.get_latest()
    assert latest is not None
    reports = audit_epochs(run.job.checkpoints, DATASET)
    assert all(report.clean for report in reports), [report.reason for report in reports]

    # The same batches, and nobody to wait for.
    undisturbed = start_run(name="constant", steps=latest.step, workers=1, global_batch=12)
    undisturbed.wait(WAIT_S)
    ours, theirs = loss_of(run.job), loss_of(undisturbed.job)
    assert abs(ours - theirs) / theirs <= 0.01, (ours, theirs)
