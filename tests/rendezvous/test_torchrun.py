"""A job under real torchrun meets through a real etcd, and continues when workers, agents or the etcd are lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rendezvous.etcd_server import EtcdServer
from tests.rendezvous.torchrun_job import WORLD_S, Job, kill

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]  # Torch is imported a dozen times.


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, backend="etcd", endpoint="", run_id=f"torchrun-{time.monotonic_ns()}")
    yield job
    job.end()


def test_job_survives_lost_workers_lost_agents_a_joiner_and_an_etcd_outage(job: Job, tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    job.endpoint = server.endpoint
    try:
        one, two = job.start_agent(), job.start_agent()
        world = job.world_after(0, 2)

        seen = len(job.events())
        kill(two.pid)  # a node: its agent and its worker
        kill(next(event["pid"] for event in world if event["agent"] == two.pid))
        three = job.start_agent()  # a new node, while the loss is still being noticed
        world = job.world_after(seen, 2)
        assert {event["agent"] for event in world} == {one.pid, three.pid}

        seen = len(job.events())
        server.stop()
        shutil.rmtree(server.folder / "data")  # it comes back without its memory
        time.sleep(3.5)  # longer than the keep-alive window: every heartbeat is late
        server.start()
        time.sleep(1.5)
        assert len(job.events()) == seen, "an etcd outage must not restart anybody"
        assert all(Path(f"/proc/{event['pid']}").exists() for event in world)
        os.kill(world[0]["pid"], signal.SIGKILL)  # a worker: rank 0, which hosts the group's store
        job.world_after(seen, 2)

        (tmp_path / "stop").touch()
        assert [agent.wait(timeout=WORLD_S) for agent in (one, three)] == [0, 0]

        (tmp_path / "stop").unlink()
        seen = len(job.events())
        again = job.start_agent()  # the same id, at once
        job.world_after(seen, 1)
        (tmp_path / "stop").touch()
        assert again.wait(timeout=WORLD_S) == 0
        assert "Exception while registering" not in job.log()
    finally:
        server.stop()
