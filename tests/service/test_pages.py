"""Pages: what all readers request is created once, is never older than the question, and never takes over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.http import pages as pages_module
from strata.coordinator.http.pages import Pages
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import CreateTask, TaskId, TaskSpec


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(Cluster(), SqliteJournal(tmp_path), SystemClock())
    running = asyncio.create_task(engine.run())
    yield engine
    engine.stop()
    await running
    engine.close()


async def create_task(engine: Engine, name: str) -> None:
    spec = TaskSpec(
        task_id=TaskId(name), name=name, type="training", dataset_id=None, worker_count=1, config_json="{}"
    )
    await engine.submit(CreateTask(spec=spec))


def names(cluster: Cluster) -> list[str]:
    return list(cluster.tasks.tasks)


async def test_a_page_shows_what_was_acknowledged_before_it_was_asked_for(engine: Engine) -> None:
    pages = Pages(engine)
    pages.define("tasks", names)
    for count in range(20):
        await create_task(engine, f"task-{count}")
        assert len(orjson.loads((await pages.get("tasks")).body)) == count + 1


async def test_readers_at_the_same_time_share_one_page(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "SOFT_AGE_S", 60.0)  # However long this machine takes for two hundred.
    made = 0

    def count(cluster: Cluster) -> int:
        nonlocal made
        made += 1
        return made

    pages = Pages(engine)
    pages.define("count", count)
    shared = await asyncio.gather(*(pages.get("count") for _ in range(200)))
    assert {page.body for page in shared} == {b"1"}


async def test_a_dear_page_leaves_time_for_the_rest_while_everything_changes(engine: Engine) -> None:
    spent_s = 0.0

    def dear(cluster: Cluster) -> list[str]:
        nonlocal spent_s
        # By the thread's own clock: a time in which it was not let to run is not spent on the page.
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.02:
            pass
        spent_s += time.thread_time() - began_s
        return names(cluster)

    pages = Pages(engine)
    pages.define("dear", dear)
    over = asyncio.Event()

    async def read() -> None:
        while not over.is_set():
            before = len(engine.cluster.tasks.tasks)
            assert len(orjson.loads((await pages.get("dear")).body)) >= before

    readers = [asyncio.create_task(read()) for _ in range(20)]
    began_s, count = time.monotonic(), 0
    while time.monotonic() - began_s < 1.0:
        await create_task(engine, f"task-{count}")
        count += 1
    elapsed_s = time.monotonic() - began_s
    over.set()
    await asyncio.gather(*readers)
    assert 0 < spent_s < 0.5 * elapsed_s
