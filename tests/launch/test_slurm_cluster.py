"""The batch script on a real Slurm of three nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from strata.launch.sample_job import SampleJob
from strata.shared_memory import forget_jobs
from tests.cli.running import strata
from tests.launch.slurm_cluster import slurm
from tests.support import Coordinator, eventually


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_trains_on_all_nodes_saves_before_its_time_limit_and_comes_back(
    tmp_path: Path, coordinator: Coordinator
) -> None:
    name = f"on-slurm-{os.getpid()}"
    job = SampleJob(folder=tmp_path, name=name, workers=3, agents=3, steps=100_000, save_every=1_000_000)
    job.prepare()
    script = tmp_path / "job.sh"
    wrote = strata(
        *("slurm", str(job.config), "--name", name, "--nodes", "3", "--min-nodes", "1"),
        *("--time", "4", "--warning", "75", "--coordinator", coordinator.address, "--python", sys.executable),
        *("-o", str(script)),
    )
    assert wrote.code == 0, wrote.err
    with contextlib.ExitStack() as clearing:
        clearing.callback(forget_jobs, name)
        cluster = clearing.enter_context(slurm(tmp_path / "slurm"))
        submitted = cluster.run("sbatch", "--parsable", str(script), cwd=tmp_path, GLOO_SOCKET_IFNAME="lo")
        job_id = submitted.split(";")[0]
        log = tmp_path / f"{name}-{job_id}.log"
        workers = lambda: [w for w in coordinator.get("/api/workers") if w["status"] == "training"]  # noqa: E731
        eventually(lambda: len(workers()) == 3, within_s=90, what="three nodes train", every_s=0.5)

        # Slurm warns; workers save and leave; the job is requeued and continues from what was saved.
        eventually(
            lambda: "the time limit is near" in log.read_text(), within_s=150, what="warned", every_s=0.5
        )
        eventually(lambda: cluster.job(job_id)["Restarts"] == "1", within_s=90, what="requeued", every_s=0.5)
        # No interval has passed: what is there was made because of the warning.
        saved = max(c["step"] for c in coordinator.get("/api/checkpoints") if c["status"] == "completed")
        eventually(
            lambda: len(workers()) == 3 and min(w["current_step"] for w in workers()) > saved,
            within_s=120,
            what="it continues",
            every_s=0.5,
        )
        cluster.run("scancel", job_id)
        eventually(lambda: not workers(), within_s=60, what="the workers left", every_s=0.5)
