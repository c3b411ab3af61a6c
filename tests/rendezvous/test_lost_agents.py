"""Real agents that meet at a real coordinator: how the others learn that one is lost, and that nobody is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rendezvous.torchrun_job import WORLD_S, Job, kill
from tests.service.clients import metric
from tests.support import Coordinator, eventually

pytestmark = pytest.mark.timeout(600)  # Torch is imported a dozen times.

DROPPED = "is lost: its connection dropped"
SILENT = "is lost: no keep-alive"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    server.stop()


@pytest.fixture
def job(tmp_path: Path, coordinator: Coordinator) -> Iterator[Job]:
    run_id = f"lost-agents-{time.monotonic_ns()}"
    job = Job(tmp_path, backend="strata", endpoint=coordinator.address, run_id=run_id)
    yield job
    job.end()


def until_connected(coordinator: Coordinator, agents: int) -> None:
    eventually(
        lambda: metric(coordinator.url, "strata_agents") == agents,
        within_s=WORLD_S,
        what=f"{agents} agents are connected",
    )


def worker_of(world: list[dict[str, Any]], agent: int) -> int:
    return int(next(event["pid"] for event in world if event["agent"] == agent))


def test_a_killed_agent_is_known_by_its_connection_a_frozen_one_by_its_keep_alives_and_nobody_by_a_restart_of_the_coordinator(
    job: Job, coordinator: Coordinator, tmp_path: Path
) -> None:
    one, two = job.start_agent(), job.start_agent()
    world = job.world_after(0, 2)
    until_connected(coordinator, 2)

    seen = len(job.events())
    coordinator.kill()
    coordinator.start()
    until_connected(coordinator, 2)
    assert len(job.events()) == seen, "a restart of the coordinator restarts nobody"
    assert " is lost: " not in job.log()

    kill(two.pid)  # A node: its agent and its worker.
    kill(worker_of(world, two.pid))
    (alone,) = job.world_after(seen, 1)
    assert alone["agent"] == one.pid
    assert DROPPED in job.log()
    assert SILENT not in job.log()

    seen = len(job.events())
    three = job.start_agent()
    world = job.world_after(seen, 2)
    seen, drops = len(job.events()), job.log().count(DROPPED)
    os.kill(three.pid, signal.SIGSTOP)  # Its connection stays, and nothing comes through it.
    kill(worker_of(world, three.pid))
    (alone,) = job.world_after(seen, 1)
    assert alone["agent"] == one.pid
    assert SILENT in job.log()
    assert job.log().count(DROPPED) == drops

    seen = len(job.events())
    os.kill(three.pid, signal.SIGCONT)
    world = job.world_after(seen, 2)
    assert {event["agent"] for event in world} == {one.pid, three.pid}
    (tmp_path / "stop").touch()
    assert [agent.wait(timeout=WORLD_S) for agent in (one, three)] == [0, 0]
    assert job.log().count(DROPPED) == drops, "leaving in good order is no loss"


def test_an_agent_that_dies_alone_is_replaced_though_the_workers_of_the_others_are_fine(
    job: Job, coordinator: Coordinator
) -> None:
    """Its worker is left alive and frozen, as if the machine had lost its power: no connection of the workers breaks."""
    one, two = job.start_agent(), job.start_agent()
    world = job.world_after(0, 2)
    until_connected(coordinator, 2)
    seen, orphan = len(job.events()), worker_of(world, two.pid)
    os.kill(orphan, signal.SIGSTOP)
    kill(two.pid)
    try:
        (alone,) = job.world_after(seen, 1)
    finally:
        kill(orphan)
    assert alone["agent"] == one.pid
    assert DROPPED in job.log()
