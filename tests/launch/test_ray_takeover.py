"""Two coordinators over one Ray cluster: whoever leads next takes the runs over as they are, and starts none a second time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.core.messages import TaskId
from strata.launch.protocol import Exited, LaunchPlan, Lost, Observation, Output
from strata.launch.ray.launcher import RayLauncher
from strata.launch.ray.messages import RayOptions
from tests.launch.ray_cluster import ENVIRONMENT, RayCluster, kept, ray_cluster
from tests.launch.test_ray import segments, stop, with_mark
from tests.rendezvous.etcd_server import EtcdServer
from tests.service.test_failover import Pair, status
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_leader_stops_a_run_of_one_that_is_paused_and_wakes(
    cluster: RayCluster, pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "slow").touch()
    old = pair.leader()
    new = pair.other(old)
    eventually(lambda: old.get("/api/status")["others"], within_s=60, what="they know of each other")
    task_id = submit(old, steps=100_000)
    eventually(lambda: task(old, task_id)["step"] > 0, within_s=UP_S, what="it trains", every_s=0.2)
    os.kill(old.pid, signal.SIGSTOP)  # Its driver, a process of its own, goes on.
    eventually(lambda: pair.is_led_by(new), within_s=60, what="the other leads")
    step = task(new, task_id)["step"]
    eventually(lambda: task(new, task_id)["step"] > step + 5, within_s=UP_S, what="it trains on", every_s=0.2)
    eventually(lambda: "slowly at" in log_of(new, task_id), within_s=60, what="its output is shown")
    os.kill(old.pid, signal.SIGCONT)
    eventually(lambda: status(old).get("led_by") == new.address, within_s=60, what="it follows")
    stop(new, task_id)
    now = task(new, task_id)
    assert (now["status"], now["attempts"]) == ("stopped", 1), now
    assert with_mark(task_id) == []
    eventually(lambda: not segments(task_id), within_s=60, what="shared memory is free")
    eventually(lambda: cluster.free_cpus() == 2, within_s=60, what="nothing is reserved")
    assert "Traceback" not in "".join([*old.output, *new.output])


# --- launchers alone: what two leaders do to one run ---------------------------------------------------------------------


PROGRAM = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"started-{os.environ['RANK']}-{os.getpid()}").touch()
print("signing in with", os.environ["SERVICE_KEY"], flush=True)
while not (folder / "go").exists():
    time.sleep(0.02)
"""


class Leading:
    """A launcher of one leader, and what it has observed."""

    def __init__(self, cluster: RayCluster, folder: Path, term: int) -> None:
        self.seen: list[Observation] = []
        options = RayOptions(address=cluster.address, namespace=f"takeover-{folder.name}", term=term)
        self.launcher = RayLauncher(self.seen.append, tasks_dir=folder / f"tasks-{term}", options=options)

    @property
    def ends(self) -> list[Observation]:
        return [each for each in self.seen if isinstance(each, Exited | Lost)]

    @property
    def output(self) -> str:
        return "\n".join(line.text for each in self.seen if isinstance(each, Output) for line in each.lines)


def kill_agent(cluster: RayCluster, namespace: str, name: str) -> None:
    """In a process of its own: this one is no part of the cluster."""
    code = "import ray, sys; ray.init(address=sys.argv[1], namespace=sys.argv[2]); ray.kill(ray.get_actor(sys.argv[3]))"
    command = [sys.executable, "-c", code, cluster.address, namespace, name]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, capture_output=True, timeout=120)


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(eventually, condition, within_s=UP_S, what=what, every_s=0.05)


@pytest.mark.timeout(600)
async def test_a_run_is_started_once_and_its_end_is_seen_whoever_leads(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """The first leader is not lost: it was paused, and believes that it leads."""
    (tmp_path / "program.py").write_text(PROGRAM)
    started = lambda: len(list(tmp_path.glob("started-*")))  # noqa: E731

    def plan(task: str, **known: Any) -> LaunchPlan:
        return LaunchPlan(task_id=TaskId(task), attempt=1, coordinator="", task_dir=tmp_path / task, **known)

    full = {
        "arguments": (str(tmp_path / "program.py"), str(tmp_path)),
        "worker_count": 1,
        "environment": {"SERVICE_KEY": SECRET},
        "secrets": (SECRET,),
        "warm": False,
    }
    known = {"arguments": (), "worker_count": 1}
    first, second, third = (Leading(cluster, tmp_path, term) for term in (1, 2, 3))
    try:
        await first.launcher.adopt([])
        await first.launcher.start(plan("t", **full))
        await until(lambda: started() == 1, "it runs")

        # The next one knows the run by its name alone.
        await second.launcher.adopt([plan("t", **known)])
        await first.launcher.start(plan("late", **full))
        await first.launcher.stop("t-1", patience_s=1.0)
        # Each line goes to one of them: to the first, where that was quick enough.
        await until(lambda: "signing in with (secret)" in first.output + second.output, "its output is seen")
        assert second.ends == []
        (tmp_path / "go").touch()
        await until(lambda: second.ends, "it ends")
        assert second.ends == [Exited(run_id="t-1", task_id=TaskId("t"), cause=None)]
        assert first.ends == []
        assert started() == 1, "nothing was started twice, and nothing by one who no longer leads"

        # The second is lost before it has recorded the end: the third finds it, though nothing of the run is left.
        await third.launcher.adopt([plan("t", **known), plan("never", **known)])
        assert third.ends[0] == Exited(run_id="t-1", task_id=TaskId("t"), cause=None)
        assert isinstance(third.ends[1], Lost)
        assert SECRET not in f"{first.output}{second.output}{third.output}"
        await until(lambda: cluster.free_cpus() == 2, "nothing is reserved")
    finally:
        for each in (first, second, third):
            await each.launcher.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_agents_that_were_not_started_when_the_leader_was_lost_are_started_by_the_next(
    cluster: RayCluster, tmp_path: Path, coordinator: Coordinator
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    plan = LaunchPlan(
        task_id=TaskId("partly"),
        attempt=1,
        coordinator=coordinator.address,
        task_dir=tmp_path / "partly",
        arguments=(str(tmp_path / "program.py"), str(tmp_path)),
        worker_count=2,
        environment={"SERVICE_KEY": SECRET},
        warm=False,
    )
    first, second = (Leading(cluster, tmp_path, term) for term in (1, 2))
    try:
        await first.launcher.adopt([])
        await first.launcher.start(plan)
        await until(lambda: len(kept(cluster.nodes)) == 2, "both agents run")
        await first.launcher.close()
        await asyncio.to_thread(kill_agent, cluster, f"takeover-{tmp_path.name}", "partly-1#1")
        await until(lambda: len(kept(cluster.nodes)) == 1, "as if it had never been started")
        await second.launcher.adopt([replace(plan, arguments=(), environment={})])
        await until(lambda: len(kept(cluster.nodes)) == 2, "it is started")
        await until(lambda: len(list(tmp_path.glob("started-1-*"))) > 0, "there are two ranks")
        (tmp_path / "go").touch()
        await until(lambda: second.ends, "it ends")
        assert second.ends == [Exited(run_id="partly-1", task_id=TaskId("partly"), cause=None)]
        await until(lambda: cluster.free_cpus() == 2, "nothing is reserved")
    finally:
        for each in (first, second):
            await each.launcher.close()
