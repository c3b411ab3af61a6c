"""The benchmarks of restoring and recovering run without a device too, small, through the job's own path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.bench.checkpoint.gpu import restore_rows
from strata.bench.checkpoint.suite import QUICK
from strata.bench.recovery import gpu as recovery_gpu
from strata.cli.bench import app


@pytest.mark.timeout(300)
def test_a_killed_job_with_a_state_comes_back_and_its_restore_is_measured(tmp_path: Path) -> None:
    rows = {row.name: row for row in recovery_gpu.run(recovery_gpu.QUICK, device="cpu", folder=tmp_path)}
    killed, restored, peer = rows.values()
    assert "SIGKILL" in killed.name
    assert "from MEMORY" in killed.note
    assert 0 < restored.measured < killed.measured
    assert "torch.save" in peer.name
    assert list(tmp_path.iterdir()) == []


def test_the_jobs_restore_is_measured_with_and_without_page_locking() -> None:
    locked, first = restore_rows(QUICK, device="cpu")
    assert locked.unit == "GB/s"
    assert first.unit == "s"
    assert min(locked.measured, first.measured) > 0


def test_what_runs_on_a_gpu_machine_needs_no_store_client_web_server_or_settings_library() -> None:
    program = """
import sys
for name in ("obstore", "fastapi", "uvloop", "omegaconf", "typer", "rich", "yaml", "orjson", "pydantic"):
    sys.modules[name] = None
import strata.bench.checkpoint.suite, strata.bench.checkpoint.gpu, strata.bench.recovery.gpu, strata.bench.recovery.large_job
import strata, strata.launch.agent, strata.training.job, strata.agent.warm
strata.elastic, strata.ElasticLoader, strata.ElasticSampler, strata.CheckpointManager
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bench", ["checkpoint", "recovery"])
def test_without_a_device_one_sentence_says_so(bench: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    said = CliRunner().invoke(app, [bench, "--gpu"])
    assert said.exit_code == 2
    assert "no CUDA device" in said.output
