"""A job that is killed again and again ends with the model of one that never was."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from strata.chaos.report import judge_checkpoints
from strata.chaos.run import ChaosRun, final_parameters
from strata.checkpoint.copying.staging import find_snapshots
from strata.data.history import audit_epochs
from strata.launch.sample_job import DATASET
from strata.shared_memory import run_folder
from tests.e2e.conftest import StartRun
from tests.rendezvous.etcd_server import EtcdServer
from tests.support import eventually

pytestmark = pytest.mark.timeout(900)

WAIT_S = 600.0
STEPS = 400
KILLS = 20
STEPS_BETWEEN_KILLS = 15
"""At most: however fast the machine is, the job does not end before its last kill."""


def assert_same_parameters(one: ChaosRun, other: ChaosRun) -> None:
    ours, theirs = final_parameters(one.job.checkpoints), final_parameters(other.job.checkpoints)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other_tensor = theirs[name]
        assert isinstance(tensor, torch.Tensor)
        assert isinstance(other_tensor, torch.Tensor)
        assert torch.equal(tensor, other_tensor), f"{name} differs"


def assert_exact(run: ChaosRun) -> None:
    reports = audit_epochs(run.job.checkpoints, DATASET)
    assert all(report.clean for report in reports), [report.reason for report in reports]
    assert reports[0].exact, reports[0].reason


def kill_a_worker(run: ChaosRun, choice: random.Random) -> None:
    """Whatever it is doing: importing, meeting the others, loading, training."""

    def killed() -> bool:
        pids = [pid for agent in run.agents for pid in agent.workers()]
        with suppress(ProcessLookupError):
            if pids:
                os.kill(choice.choice(pids), signal.SIGKILL)
                return True
        return False

    eventually(killed, within_s=60, what="a worker to kill")


def await_any_moment(run: ChaosRun, choice: random.Random, made: int) -> None:
    """Often while the job is still coming back, at the latest when it has made some steps after `made`."""
    moment_s = time.monotonic() + choice.uniform(0, 2)
    eventually(
        lambda: time.monotonic() >= moment_s or run.step >= made + STEPS_BETWEEN_KILLS,
        within_s=60,
        every_s=0.005,
    )


def await_new_step(run: ChaosRun, made: int) -> None:
    """One that had not been made when `made` was the newest; survivors may still have finished theirs."""
    eventually(
        lambda: run.step > made + 1 or not run.is_running,
        within_s=120,
        every_s=0.005,
        what=lambda: f"step {made + 2}\n{run.agents[0].tail()}",
    )
    assert run.is_running, f"The job has ended:\n{run.agents[0].tail()}"


@pytest.fixture(scope="module")
def calm(start_shared: StartRun) -> ChaosRun:
    """Two workers whom nobody disturbs, to the end."""
    run = start_shared(name="calm", workers=2, steps=STEPS)
    run.wait(WAIT_S)
    return run


def test_a_finished_job_leaves_no_shared_memory(calm: ChaosRun) -> None:
    assert not run_folder(calm.job.name).exists()
    assert not find_snapshots(f"job-{calm.job.name}")


def test_twenty_kills_of_any_rank_at_any_time_leave_no_trace_in_the_model(
    calm: ChaosRun, start_run: StartRun
) -> None:
    run = start_run(name="hurt", workers=2, steps=STEPS)
    choice = random.Random(1)
    for _ in range(KILLS // 2):
        made = run.step
        kill_a_worker(run, choice)
        await_any_moment(run, choice, made)
        kill_a_worker(run, choice)
        await_new_step(run, made)
    run.wait(WAIT_S)
    assert_same_parameters(calm, run)
    assert_exact(run)
    assert judge_checkpoints(run.job.checkpoints).passed


def test_three_workers_with_loaders_add_gradients_in_the_same_order_after_a_crash(
    start_run: StartRun,
) -> None:
    options = {"workers": 3, "steps": 110, "global_batch": 12}
    undisturbed = start_run(name="calm3", **options)
    undisturbed.wait(WAIT_S)
    run = start_run(name="hurt3", loader_workers=1, **options)
    run.inject(["kill"], patience_s=120.0)
    run.wait(WAIT_S)
    assert_same_parameters(undisturbed, run)
    assert_exact(run)


@pytest.mark.etcd
def test_training_continues_while_etcd_is_down_and_a_killed_worker_is_back_once_it_is(
    calm: ChaosRun, start_run: StartRun, tmp_path: Path
) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        run = start_run(name="etcd", workers=2, agents=2, steps=STEPS, etcd=server.endpoint)
        server.stop()
        made = run.step
        eventually(lambda: run.step >= made + 20, within_s=60, what="training without etcd")
        kill_a_worker(run, random.Random(2))
        made = run.step
        time.sleep(3.5)  # Longer than the keep-alive window: every node's heartbeat is late.
        assert run.step <= made + 1, "nobody can meet without etcd, and nobody trains alone"
        server.start()
        await_new_step(run, made)
        run.wait(WAIT_S)
    finally:
        server.stop()
    assert_same_parameters(calm, run)
    assert_exact(run)
