"""A small job under real torchrun agents, of which each stands for a node: it trains nothing, and says in which world it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from strata.shared_memory import forget_jobs

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
    """Agents of one run on this host, each standing for a node with one worker."""

    def __init__(self, folder: Path, *, backend: str, endpoint: str, run_id: str) -> None:
        self.folder, self.backend, self.endpoint, self.run_id = folder, backend, endpoint, run_id
        self.agents: list[subprocess.Popen[bytes]] = []
        (folder / "worker.py").write_text(WORKER)

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *(
                f"--rdzv-backend={self.backend}",
                f"--rdzv-endpoint={self.endpoint}",
                f"--rdzv-id={self.run_id}",
            ),
            *("--local-addr=127.0.0.1", "--max-restarts=20", "--monitor-interval=0.1"),
            *(str(self.folder / "worker.py"), str(self.folder)),
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
        raise AssertionError(f"no world of {size}:\n{self.log()[-6000:]}")

    def log(self) -> str:
        return (self.folder / "agents.log").read_text()

    def end(self) -> None:
        for agent in self.agents:
            for pid in {event["pid"] for event in self.events() if event["agent"] == agent.pid}:
                kill(pid)
            kill(agent.pid)
            agent.wait()
        forget_jobs(self.run_id)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
