"""What a run of this machine opens to others: nothing beyond loopback, and nothing that is unpickled."""

from __future__ import annotations

import base64
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from strata.torch_compat.stores import TCPStore
from tests.rendezvous.etcd_server import free_port
from tests.support import Coordinator, eventually
from tests.tasks.conftest import Tasks

SCRIPT = """
import sys, time, pathlib, torch
from torch import distributed
distributed.init_process_group("gloo")
distributed.all_reduce(torch.ones(4))
folder = pathlib.Path(sys.argv[1])
(folder / f"ready-{distributed.get_rank()}").touch()
while not (folder / "go").exists():
    time.sleep(0.02)
distributed.barrier()
distributed.destroy_process_group()
"""


def tree(*roots: int) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in roots]
    return [*found, *(child for process in found for child in process.children(recursive=True))]


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Addresses at which any of them accepts connections."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # One that has ended meanwhile listens nowhere.
            found |= {
                (connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
            }
    return found


def beyond_loopback(addresses: set[tuple[str, int]]) -> set[tuple[str, int]]:
    return {(ip, port) for ip, port in addresses if ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")}


class Runs:
    """Agents of one training on this machine, ended whatever happens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, cold: bool = False) -> subprocess.Popen[str]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.endswith("_IFNAME")},
            "STRATA_TOKEN": "",
        }
        if any("endpoint" in flag for flag in flags):
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        start = ["--start-method=spawn"] if cold else []
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "strata.launch.agent", *flags, *start),
                *(str(self.script), str(self.folder)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.agents.append(agent)
        return agent

    def ready(self, workers: int) -> list[psutil.Process]:
        paths = [self.folder / f"ready-{rank}" for rank in range(workers)]
        eventually(lambda: all(path.exists() for path in paths), within_s=90, what="the workers to meet")
        return tree(*(agent.pid for agent in self.agents))

    def finish(self) -> list[str]:
        (self.folder / "go").touch()
        said = []
        for agent in self.agents:
            _, stderr = agent.communicate(timeout=60)
            assert agent.returncode == 0, stderr
            said.append(stderr)
        return said

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                for process in reversed(tree(agent.pid)):
                    with suppress(psutil.NoSuchProcess):  # An agent that fails ends its workers itself.
                        process.kill()
                agent.communicate()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("cold", [False, True], ids=["forked", "spawned"])
def test_a_run_of_one_machine_listens_on_loopback_alone(runs: Runs, cold: bool) -> None:
    runs.start("--nproc-per-node=2", cold=cold)
    addresses = listening(runs.ready(2))
    assert addresses  # The workers meet somewhere.
    assert not beyond_loopback(addresses)
    runs.finish()


@pytest.mark.parametrize("cold", [False, True], ids=["forked", "spawned"])
def test_agents_that_meet_through_the_coordinator_listen_at_their_own_address_alone(
    runs: Runs, tmp_path: Path, cold: bool
) -> None:
    coordinator = Coordinator(tmp_path / "data").start()
    try:
        for _ in range(2):
            runs.start(
                *("--nnodes=2", "--rdzv-id=two", f"--rdzv-endpoint={coordinator.address}"),
                "--local-addr=127.0.0.1",
                cold=cold,
            )
        addresses = listening(runs.ready(2))
        assert addresses
        assert not beyond_loopback(addresses)
        runs.finish()
    finally:
        coordinator.stop()


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    made = Tasks(tmp_path / "data", {"STRATA_TASK_WORKERS": "2"})
    made.server.start()
    yield made
    made.close()


def test_a_task_listens_on_loopback_alone(tasks: Tasks) -> None:
    task_id = tasks.submit(
        workers=2,
        steps=100_000,
        batch_size=2,
        seq_length=32,
        model={"n_layer": 1, "n_head": 2, "n_embd": 16},
        device="cpu",
    )
    tasks.until(task_id, lambda task: task["step"] > 0)
    task_processes = tasks.processes(task_id)
    addresses = listening([each for each in psutil.process_iter() if each.pid in task_processes])
    assert addresses
    assert not beyond_loopback(addresses)
    tasks.server.post(f"/api/tasks/{task_id}/stop", {})
    tasks.ended(task_id)


ANSWER_S = 60.0
"""For a store on a busy machine; what is none never answers."""


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.proof,)


def attack(addresses: set[tuple[str, int]], run_id: str, proof: Path) -> int:
    """Write a pickle wherever torch's rendezvous keeps its state; how many stores took it."""
    payload = base64.b64encode(pickle.dumps(Payload(proof)))
    forking = multiprocessing.get_context("fork")
    attempts = [
        forking.Process(target=_write, args=(port, f"torch.rendezvous.{run_id}", payload))
        for _, port in addresses
    ]
    for attempt in attempts:
        attempt.start()
    eventually(
        lambda: any(attempt.exitcode == 0 for attempt in attempts), within_s=ANSWER_S, what="a store takes it"
    )
    for attempt in attempts:
        attempt.join(5)
        if attempt.is_alive():  # It is not a store, and never answers.
            attempt.kill()
            attempt.join()
    return sum(attempt.exitcode == 0 for attempt in attempts)


def _write(port: int, key: str, payload: bytes) -> None:
    try:
        TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=ANSWER_S)).set(key, payload)  # type: ignore[arg-type]
    except Exception:
        os._exit(1)
    os._exit(0)


def test_torchs_own_rendezvous_runs_what_a_stranger_wrote_and_ours_does_not(runs: Runs) -> None:
    proof = runs.folder / "proof"
    port = free_port()
    agent = runs.start("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=victim")
    addresses = listening(runs.ready(1))
    assert beyond_loopback(addresses)
    assert attack(addresses, "victim", proof)
    eventually(proof.exists, within_s=30, what="the agent to unpickle what it was given")
    runs.close()
    stderr = agent.stderr
    assert stderr is not None
    runs.agents.clear()
    proof.unlink()
    (runs.folder / "ready-0").unlink()

    runs.start("--rdzv-id=victim", "--max-restarts=3")
    processes = runs.ready(1)
    assert attack(listening(processes), "victim", proof)
    (runs.folder / "ready-0").unlink()
    worker = [process for process in processes if process.name().startswith(("python", "pt_"))][-1]
    worker.kill()  # The agent meets again.
    runs.ready(1)
    runs.finish()
    assert not proof.exists()


def test_who_asks_for_torchs_rendezvous_is_warned_what_it_opens(runs: Runs) -> None:
    runs.start("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=mine")
    runs.ready(1)
    (said,) = runs.finish()
    assert "warning: --rdzv-backend=c10d" in said
    assert "can run code as you" in said
