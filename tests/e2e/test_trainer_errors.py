"""The guide's errors, each produced for real under torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.checkpoint.manager import CheckpointManager
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import TorchrunSpec

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SampleJob:
    job = SampleJob(
        folder=tmp_path_factory.mktemp("errors"),
        name="errors",
        workers=1,
        steps=30,
        text_bytes=50_000,
        width=32,
        save_every=10,
        snapshot_every=5,
    )
    job.prepare()
    return job


def train(job: SampleJob, tmp_path: Path, **sections: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the trainer once, alone, with some settings changed."""
    settings = job.settings()
    settings["elastic"]["job_id"] = tmp_path.name
    settings["checkpoint"]["nvme_path"] = str(tmp_path / "checkpoints")
    for name, values in sections.items():
        settings[name].update(values)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    spec = TorchrunSpec(
        run_id=tmp_path.name,
        arguments=["-m", "elastic_harness.train", "--config", str(config)],
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        environment={"AWS_EC2_METADATA_DISABLED": "true"},
    )
    return subprocess.run(
        spec.command(), env=spec.variables(), capture_output=True, text=True, timeout=LIMIT_S
    )


def test_training_ends_with_the_promised_words(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout
    assert (tmp_path / "checkpoints" / "checkpoint_step_00000030.pt").exists()


def test_a_missing_index_is_named_with_the_command_that_builds_it(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path, data={"index_file": str(tmp_path / "none.index")})
    assert done.returncode != 0
    assert (
        f"DataLoadingError: Failed to load data from '{job.text}': Token index file not found" in done.stderr
    )
    assert "elastic_harness.data.index_builder" in done.stderr
    assert (
        "Traceback" not in done.stderr.split("elastic_harness.train FAILED")[0].split("torch/distributed")[0]
    )


def test_too_few_workers_is_a_topology_error(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path, elastic={"min_nodes": 4, "max_nodes": 4})
    assert done.returncode != 0
    assert (
        "TopologyChangeError: Topology change (4 -> 1 workers) failed: World size below min_nodes"
        in done.stderr
    )


def test_an_unknown_strategy_is_refused_before_anything_starts(job: SampleJob, tmp_path: Path) -> None:
    done = train(job, tmp_path, scaling={"strategy": "invalid"})
    assert done.returncode != 0
    assert (
        "ConfigurationError: Configuration error in 'scaling': Unknown scaling strategy 'invalid'. "
        "Valid options: ['variable_batch', 'constant_batch']" in done.stderr
    )


def test_without_torchrun_the_missing_variables_are_named(job: SampleJob) -> None:
    import os
    import sys

    bare = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "elastic_harness.train", "--config", str(job.config)]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "Missing required environment variables: ['RANK', 'LOCAL_RANK', 'WORLD_SIZE']" in done.stderr
    assert "torchrun" in done.stderr


def test_a_snapshot_that_does_not_fit_in_memory_does_not_stop_training(
    job: SampleJob, tmp_path: Path
) -> None:
    done = train(job, tmp_path, checkpoint={"max_memory_mb": 0.1})
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout
    assert "Cannot save snapshot" in done.stderr


def test_an_unreachable_bucket_does_not_stop_training_when_the_policy_is_warn(
    job: SampleJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    done = train(job, tmp_path, checkpoint={"s3_bucket": "nowhere", "async_save_policy": "warn"})
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout
    assert "[S3]" in done.stderr
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        latest = manager.get_latest()
    assert latest is not None
    assert latest.step == 30
