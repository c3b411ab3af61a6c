"""The commands the README begins with: a worker is killed twice, and each kill costs one restart and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.example_runs import killed_twice
from tests.rendezvous.etcd_server import free_port


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--workers", "2"],
        ["torchrun", "--nproc-per-node=2"],
        ["torchrun", "--nproc-per-node=2", "--master-port=PORT"],
    ],
    ids=lambda words: " ".join(words),
)
def test_two_kills_cost_two_restarts_and_the_job_ends_well(tmp_path: Path, command: list[str]) -> None:
    words = [word.replace("PORT", str(free_port())) for word in command]
    # With one epoch less, it may end before a busy machine comes to the second kill.
    text = killed_twice(words, "ddp_loop.py", "--epochs=3", "--step-time=0.02", folder=tmp_path)
    assert "10,000 samples, each exactly once" in text
