"""A job under real torchrun meets through a real etcd, and continues when workers, agents or the etcd are lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]  # Torch is imported a dozen times.
WORLD_S = 120.0

WORKER = """
import json, os, sys, time
import torch, torch.distributed as dist
out = sys.argv[1]
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
line = {"pid": os.getpid(), "agent": os.getppid(), "rank": dist.get_rank(), "world": int(one.item()),
        "attempt": os.environ["MASTER_PORT"]}
with open(f"{out}/events", "a") as events:
    events.write(json.dumps(line) + "\\n")
stopping = torch.zeros(1)
while not stopping.item():  # agreed: a rank that left alone would fail the step of the others
    time.sleep(0.02)
    stopping.fill_(os.path.exists(f"{out}/stop"))
    dist.all_reduce(stopping, op=dist.ReduceOp.MAX)
dist.barrier()
dist.destroy_process_group()
"""


class Job:
    """Agents of one run on this host, each standing for a node."""

    def __init__(self, folder: Path, endpoint: str, run_id: str) -> None:
        self.folder, self.endpoint, self.run_id = folder, endpoint, run_id
        self.agents: list[subprocess.Popen[bytes]] = []
        (folder / "worker.py").write_text(WORKER)

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--rdzv-backend=etcd", f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={self.run_id}"),
            *(
                "--local-addr=127.0.0.1",
                "--max-restarts=20",
                str(self.folder / "worker.py"),
                str(self.folder),
            ),
        ]
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        with open(self.folder / "agents.log", "ab") as log:
            agent = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)
        return agent

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def world_after(self, seen: int, size: int) -> list[dict[str, Any]]:
        """The members of the first complete world of `size` whose events came after the first `seen` ones."""
        deadline_s = time.monotonic() + WORLD_S
        while time.monotonic() < deadline_s:
            fresh = [event for event in self.events()[seen:] if event["world"] == size]
            for event in fresh:
                world = {e["rank"]: e for e in fresh if e["attempt"] == event["attempt"]}
                if len(world) == size:
                    return [world[rank] for rank in sorted(world)]
            time.sleep(0.05)
        raise AssertionError(f"no world of {size}:\n{(self.folder / 'agents.log').read_text()[-6000:]}")

    def end(self) -> None:
        for agent in self.agents:
            for pid in {event["pid"] for event in self.events() if event["agent"] == agent.pid}:
                _kill(pid)
            _kill(agent.pid)
            agent.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, "", f"torchrun-{time.monotonic_ns()}")
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
        _kill(two.pid)  # a node: its agent and its worker
        _kill(next(event["pid"] for event in world if event["agent"] == two.pid))
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
        assert "Exception while registering" not in (tmp_path / "agents.log").read_text()
    finally:
        server.stop()
