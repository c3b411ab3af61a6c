"""Two coordinators over one Ray cluster: whoever leads next takes the runs over as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.etcd_server import EtcdServer
from tests.launch.ray_cluster import ENVIRONMENT, RayCluster, kept, ray_cluster
from tests.launch.test_ray import segments, with_mark
from tests.service.test_failover import Pair
from tests.support import Coordinator, eventually

SECRET = "correct-horse-battery-staple"
RECIPE = """
script = '{script}'
arguments = ['--steps', '{{steps}}', '--slow', '{slow}', '--say', 'SERVICE_KEY']
[config.steps]
type = 'integer'
[config.service_key]
type = 'secret'
"""
UP_S = 200.0
"""For whatever starts processes that import torch, several at a time."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2, cpus=1) as made:
        yield made


@pytest.fixture
def pair(cluster: RayCluster, tmp_path: Path) -> Iterator[Pair]:
    recipes, etcd_dir = tmp_path / "recipes", tmp_path / "etcd"
    recipes.mkdir()
    etcd_dir.mkdir()
    program = Path(__file__).parent.parent / "tasks" / "held.py"
    (recipes / "held.toml").write_text(RECIPE.format(script=program, slow=tmp_path / "slow"))
    etcd = EtcdServer(etcd_dir)
    etcd.start()
    env = {
        "STRATA_RECIPES_DIR": str(recipes),
        "STRATA_LAUNCHER": "ray",
        "STRATA_RAY_ADDRESS": cluster.address,
        "STRATA_HEARTBEAT_TIMEOUT": "60",
        **ENVIRONMENT,
    }
    try:
        with ExitStack() as stack:
            yield Pair(tmp_path, etcd.endpoint, stack, **env)
    finally:
        (tmp_path / "slow").unlink(missing_ok=True)
        etcd.stop()


def submit(server: Coordinator, *, steps: int) -> str:
    config = {"steps": steps, "service_key": SECRET}
    body = {"name": "held", "type": "held", "worker_count": 2, "config": config}
    status, created = server.post("/api/tasks", body)
    assert status == 201, created
    return str(created["task_id"])


def task(server: Coordinator, task_id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/api/tasks/{task_id}")
    return found


def log_of(server: Coordinator, task_id: str) -> str:
    entries = server.get(f"/api/tasks/{task_id}/logs?limit=5000")
    return "\n".join(entry["message"] for entry in entries)


def fail_over(pair: Pair) -> Coordinator:
    """The next leader; the one before is back, as a standby."""
    old = pair.leader()
    new = pair.other(old)
    old.kill()
    eventually(lambda: pair.is_led_by(new), within_s=60, what="the other leads")
    return new


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_leader_watches_a_run_shows_its_output_and_sees_it_end(
    cluster: RayCluster, pair: Pair, tmp_path: Path
) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    old = pair.leader()
    eventually(lambda: old.get("/api/status")["others"], within_s=60, what="they know of each other")
    task_id = submit(old, steps=400)
    eventually(lambda: task(old, task_id)["step"] > 0, within_s=UP_S, what="it trains", every_s=0.2)
    supervisors = kept(cluster.nodes)
    assert len(supervisors) == 2
    before = task(old, task_id)
    new = fail_over(pair)
    eventually(
        lambda: task(new, task_id)["step"] > before["step"] + 5,
        within_s=UP_S,
        what=lambda: f"it trains on: {task(new, task_id)} {''.join(new.output)}",
        every_s=0.2,
    )
    eventually(lambda: "slowly at" in log_of(new, task_id), within_s=60, what="its output is shown")
    now = task(new, task_id)
    assert (now["status"], now["attempts"], now["exit_cause"]) == ("running", 1, None), now
    assert kept(cluster.nodes) == supervisors, "no process was started anew"
    slow.unlink()
    eventually(
        lambda: task(new, task_id)["status"] == "completed",
        within_s=UP_S,
        what=lambda: f"it ends: {task(new, task_id)}",
        every_s=0.2,
    )
    assert task(new, task_id)["attempts"] == 1
    eventually(lambda: "all 400 steps are made" in log_of(new, task_id), within_s=60)
    assert SECRET not in log_of(new, task_id)
    assert with_mark(task_id) == []
    eventually(lambda: not segments(task_id), within_s=60, what="shared memory is free")
    eventually(lambda: cluster.free_cpus() == 2, within_s=60, what="nothing is reserved")
