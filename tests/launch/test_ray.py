"""Tasks over a real Ray cluster of three nodes on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from strata.launch.ray.placement import capacity_of, workers_by_agent
from strata.shared_memory import folders_of
from tests.launch.ray_cluster import ENVIRONMENT, agents_on, kept, ray_cluster
from tests.support import Coordinator, eventually

TASK: dict[str, Any] = {
    "name": "over three nodes",
    "type": "training",
    "worker_count": 3,
    "config": {
        "steps": 100_000,
        "seq_length": 32,
        "batch_size": 2,
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 16},
        "snapshot_interval": 5,
        "checkpoint_interval": 1_000,
        "log_interval": 1,
        "device": "cpu",
    },
}
UP_S = 200.0
"""For whatever starts processes that import torch, several at a time."""


@pytest.mark.parametrize(
    ("workers", "rooms", "expected"),
    [
        (3, [4, 4, 4], [1, 1, 1]),
        (1, [2, 2], [1]),
        (8, [4, 4], [4, 4]),
        (18, [8, 8, 2], [8, 8, 2]),
        (5, [2, 2, 2], [2, 2, 1]),
        (3, [0, 3, 0], [3]),
        (4, [1, 1], None),
        (1, [], None),
    ],
)
def test_workers_spread_as_evenly_as_capacity_allows(
    workers: int, rooms: list[int], expected: list[int] | None
) -> None:
    assert workers_by_agent(workers, rooms) == expected


def test_a_nodes_capacity_is_what_it_has_least_of() -> None:
    assert capacity_of({"CPU": 7.0}, cpus=2.0, gpus=0) == 3
    assert capacity_of({"CPU": 64.0, "GPU": 4.0}, cpus=1.0, gpus=1) == 4
    assert capacity_of({"CPU": 2.0, "GPU": 4.0}, cpus=1.0, gpus=1) == 2
    assert capacity_of({"CPU": 2.0}, cpus=1.0, gpus=1) == 0
    assert capacity_of({"CPU": 0.3 * 3}, cpus=0.3, gpus=0) == 3


@pytest.mark.timeout(600)
def test_a_task_spreads_over_nodes_outlives_one_of_them_and_stops_without_a_trace(tmp_path: Path) -> None:
    with ray_cluster(3, cpus=2) as cluster:
        flags = ("--launcher", "ray", "--ray-address", cluster.address)
        server = Coordinator(tmp_path / "data", *flags, env=ENVIRONMENT).start()
        try:
            status, created = server.post("/api/tasks", TASK)
            assert status == 201, created
            task_id = created["task_id"]

            # It spreads: an agent on each node, three workers altogether. Who is there first begins without the others.
            eventually(
                lambda: task(server)["step"] >= 10 and len(task(server)["worker_ids"]) == 3,
                within_s=UP_S,
                what="all three train",
                every_s=0.2,
            )
            assert [agents_on(node) for node in cluster.nodes] == [1, 1, 1]

            # Logs by rank, as with the local launcher.
            eventually(
                lambda: "started on 3 nodes of the Ray cluster" in messages(server, task_id), within_s=60
            )
            said = f"/api/tasks/{task_id}/logs?worker_id={task_id}-rank0"
            eventually(lambda: any("loss" in entry["message"] for entry in server.get(said)), within_s=60)

            # A node is lost: its agent is started on another one, and training continues from what was saved.
            lost_at = time.time()
            cluster.lose(cluster.nodes[1])
            eventually(
                lambda: sorted(map(agents_on, cluster.nodes)) == [1, 2],
                within_s=UP_S,
                what="the agent is started on another node",
                every_s=0.2,
            )
            recoveries = lambda: [r for r in server.get("/api/recoveries") if r["at"] > lost_at]  # noqa: E731
            eventually(
                lambda: any(r["world_after"] == 3 for r in recoveries()),
                within_s=UP_S,
                what="all three train again",
                every_s=0.2,
            )
            assert all(r["resumed_step"] > 0 for r in recoveries()), "not from the beginning"
            eventually(lambda: "was started again on node" in messages(server, task_id), within_s=60)
            assert "is lost with node" in messages(server, task_id)
            before = task(server)["step"]
            eventually(
                lambda: task(server)["step"] > before + 10, within_s=60, what="it continues", every_s=0.2
            )
            now = task(server)
            assert (now["status"], now["attempts"]) == ("running", 1), now
            assert 0 < now["progress"] < 100

            # Stopping leaves nothing behind: no process, no shared memory, no reservation.
            stop(server, task_id)
            assert [agents_on(node) for node in cluster.nodes] == [0, 0]
            assert with_mark(task_id) == []
            eventually(lambda: not segments(task_id), within_s=60, what="shared memory is free")
            eventually(lambda: cluster.free_cpus() == 4, within_s=60, what="nothing is reserved")
        finally:
            server.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_task_outlives_coordinator_and_driver_and_a_failing_one_says_why(tmp_path: Path) -> None:
    with ray_cluster(2, cpus=1) as cluster:
        flags = ("--launcher", "ray", "--ray-address", cluster.address)
        server = Coordinator(tmp_path / "data", *flags, env=ENVIRONMENT).start()
        try:
            created = server.post("/api/tasks", {**TASK, "worker_count": 2})[1]
            eventually(lambda: task(server)["step"] >= 10, within_s=120, what="steps are made", every_s=0.2)
            supervisors = kept(cluster.nodes)

            server.kill()
            server.start()
            before = task(server)["step"]
            eventually(
                lambda: task(server)["step"] > before + 10, within_s=120, what="it continues", every_s=0.2
            )
            (driver,) = [
                p for p in psutil.Process(server.pid).children() if "spawn_main" in " ".join(p.cmdline())
            ]
            driver.kill()
            before = task(server)["step"]
            eventually(
                lambda: task(server)["step"] > before + 10, within_s=120, what="and again", every_s=0.2
            )
            assert kept(cluster.nodes) == supervisors, "no process was started anew"
            assert task(server)["attempts"] == 1
            stop(server, created["task_id"])
            assert with_mark(created["task_id"]) == []

            # One that cannot work fails with the reason of the worker that found out.
            wrong = {**TASK["config"], "model": {"n_layer": 1, "n_head": 3, "n_embd": 16}}
            created = server.post("/api/tasks", {**TASK, "worker_count": 2, "config": wrong})[1]
            eventually(lambda: task(server)["status"] == "failed", within_s=120, what="it fails", every_s=0.2)
            cause = task(server)["exit_cause"]
            assert "must be a multiple of n_head" in cause["traceback"]
            assert "ended with status 2" in cause["message"]
            assert "on node 127.0.0.1" in cause["message"]
            assert with_mark(created["task_id"]) == []
            eventually(lambda: not segments(created["task_id"]), within_s=60, what="shared memory is free")
            eventually(lambda: cluster.free_cpus() == 2, within_s=60, what="nothing is reserved")
        finally:
            server.stop()


def task(server: Coordinator) -> dict[str, Any]:
    """The newest one."""
    tasks: list[dict[str, Any]] = server.get("/api/tasks")
    return max(tasks, key=lambda t: float(t["created_at"]))


def stop(server: Coordinator, task_id: str) -> None:
    """An answer comes after ten seconds at the latest: before whoever asks would give up."""
    eventually(
        lambda: server.post(f"/api/tasks/{task_id}/stop?wait=10", {})[1]["status"] == "stopped",
        within_s=UP_S,
        what="it stops",
    )


def messages(server: Coordinator, task_id: str) -> str:
    return "\n".join(entry["message"] for entry in server.get(f"/api/tasks/{task_id}/logs?limit=1000&q=node"))


def segments(task_id: str) -> list[Path]:
    """What the task and its first attempt have in shared memory."""
    folders = [folder for job in (task_id, f"{task_id}-1") for folder in folders_of(job)]
    return [folder for folder in folders if folder.exists()]


def with_mark(task_id: str) -> list[str]:
    """Processes that were started for the task."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STRATA_TASK_ID") == task_id:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
