"""A job on a real Slurm while the coordinator changes: its agents find the next leader, which shows it and sees it end."""

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
from tests.rendezvous.etcd_server import EtcdServer
from tests.service.test_failover import Pair
from tests.support import Coordinator, eventually


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_trains_on_while_the_leader_is_lost_and_ends_at_the_next_one(tmp_path: Path) -> None:
    name = f"on-slurm-{os.getpid()}"
    job = SampleJob(folder=tmp_path, name=name, workers=2, agents=2, steps=400, save_every=50)
    job.prepare()
    script, etcd_dir = tmp_path / "job.sh", tmp_path / "etcd"
    etcd_dir.mkdir()
    etcd = EtcdServer(etcd_dir)
    etcd.start()
    with contextlib.ExitStack() as clearing:
        clearing.callback(etcd.stop)
        clearing.callback(forget_jobs, name)
        pair = Pair(tmp_path, etcd.endpoint, clearing, STRATA_HEARTBEAT_TIMEOUT="60")
        both = ",".join(each.address for each in pair.both)
        wrote = strata(
            *("slurm", str(job.config), "--name", name, "--nodes", "2", "--min-nodes", "1", "--time", "10"),
            *("--coordinator", both, "--python", sys.executable, "-o", str(script)),
        )
        assert wrote.code == 0, wrote.err
        cluster = clearing.enter_context(slurm(tmp_path / "slurm"))
        submitted = cluster.run("sbatch", "--parsable", str(script), cwd=tmp_path, GLOO_SOCKET_IFNAME="lo")
        job_id = submitted.split(";")[0]
        log = tmp_path / f"{name}-{job_id}.log"
        old = pair.leader()
        new = pair.other(old)

        def training(at: Coordinator) -> dict[str, int]:
            rows = at.get("/api/workers")
            return {row["id"]: row["current_step"] for row in rows if row["status"] == "training"}

        eventually(lambda: len(training(old)) == 2, within_s=120, what="two nodes train", every_s=0.2)
        incarnations = {row["id"]: row["incarnation"] for row in old.get("/api/workers")}
        old.kill()
        eventually(lambda: pair.is_led_by(new), within_s=60, what="the other leads")
        before = max(training(new).values(), default=0)
        eventually(
            lambda: len(training(new)) == 2 and min(training(new).values()) > before,
            within_s=120,
            what=lambda: f"it trains on: {new.get('/api/workers')} {log.read_text()}",
            every_s=0.2,
        )
        assert {row["id"]: row["incarnation"] for row in new.get("/api/workers")} == incarnations
        eventually(
            lambda: cluster.job(job_id)["JobState"] == "COMPLETED",
            within_s=200,
            what=lambda: f"it ends: {cluster.job(job_id)} {log.read_text()}",
            every_s=0.5,
        )
        saved = [row for row in new.get("/api/checkpoints") if row["status"] == "completed"]
        assert max(row["step"] for row in saved) == 400
        assert cluster.job(job_id)["Restarts"] == "0"
        assert "was killed" not in log.read_text()
        eventually(lambda: not training(new), within_s=60, what="its workers have left")
        assert "failed" not in {row["status"] for row in new.get("/api/workers")}
