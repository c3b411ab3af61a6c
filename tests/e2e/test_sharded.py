"""Models spread over their workers, killed and resized: the example as users run it, and the trainer with `parallel`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed import checkpoint as dcp

from strata.chaos.run import final_parameters
from strata.checkpoint.dcp import StrataStorageReader
from strata.data.history import audit_epochs
from strata.launch.sample_job import DATASET, SampleJob
from tests.e2e.example_runs import killed_twice
from tests.rendezvous.etcd_server import free_port

pytestmark = pytest.mark.timeout(900)

WAIT_S = 400.0
LOSS = re.compile(r"step (\d+): loss ([\d.]+)")
STEPS = 30


def test_two_kills_cost_a_sharded_job_two_restarts_and_nothing_else(tmp_path: Path) -> None:
    # The second kill comes in the second epoch, at the latest in its last steps.
    options = ("--tp=2", "--epochs=4", "--step-time=0.02")
    text = killed_twice(
        ["torchrun", "--nproc-per-node=2"], "fsdp2.py", *options, folder=tmp_path, lines_apart=3
    )
    assert "10,000 samples, each exactly once" in text
    assert len(re.findall(r"resumed at step [\d,]+ from MEMORY", text)) == 2, text


class Training:
    """The trainer under plain torchrun, a part of its steps at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.job = SampleJob(
            folder=folder,
            name=name,
            workers=2,
            steps=STEPS,
            text_bytes=50_000,
            width=32,
            global_batch=12,
            save_every=10,
            snapshot_every=5,
        )
        self.job.prepare()
        settings: dict[str, Any] = self.job.settings()
        settings["training"] |= {"log_interval": 1, "batch_size": 3}  # Several micro-batches in each step.
        settings["elastic"] |= {"min_nodes": 1, "max_nodes": 1}
        self.job.config.write_text(yaml.safe_dump(settings))

    def run(self, *, workers: int, steps: int, **parallel: Any) -> dict[int, float]:
        """The loss that rank 0 has printed, by step."""
        overrides = [f"parallel.{name}={value}" for name, value in parallel.items()]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "strata.cli.main", "torchrun", f"--nproc-per-node={workers}"),
                *(f"--master-port={free_port()}", "--max-restarts=0", "-m", "strata.trainer.train"),
                *("--config", str(self.job.config), f"training.max_steps={steps}", *overrides),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )
        self.output = done.stdout
        self.status = done.returncode
        return {int(step): float(loss) for step, loss in LOSS.findall(done.stdout)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spread")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """What one worker with the whole model ends with."""
    plain = Training(folder, "plain")
    plain.run(workers=1, steps=STEPS)
    assert plain.status == 0, plain.output
    return {n: t for n, t in final_parameters(plain.job.checkpoints).items() if isinstance(t, torch.Tensor)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_spread_trainer_ends_with_the_model_of_a_plain_one_whatever_its_worlds(
    folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    spread = Training(folder, "resized")
    for steps, workers, parallel in (
        (10, 4, {"tp": 2}),
        (20, 3, {"fsdp": "true"}),
        (STEPS, 2, {"dp": 1, "tp": 2, "fsdp": "false"}),
    ):
        spread.run(workers=workers, steps=steps, **parallel)
        assert spread.status == 0, spread.output
        assert f"Training complete! {steps} steps" in spread.output
    found = {name: torch.full_like(value, torch.nan) for name, value in undisturbed.items()}
    dcp.load({"model_state_dict": found}, storage_reader=StrataStorageReader(spread.job.checkpoints))
    for name, expected in undisturbed.items():
        apart = float((found[name] - expected).abs().max())
        assert apart <= 1e-4, f"{name} differs by {apart}"
    reports = audit_epochs(spread.job.checkpoints, DATASET)
    assert all(report.clean for report in reports), [report.reason for report in reports]


def test_a_world_that_does_not_fit_is_named_by_the_trainer(folder: Path) -> None:
    training = Training(folder, "unfit")
    training.run(workers=3, steps=5, tp=2)
    assert training.status != 0
    assert "3 workers cannot be divided into tensor-parallel groups of 2" in training.output
    assert "Traceback" not in training.output.partition("TopologyChangeError")[2].partition("\n")[0]
