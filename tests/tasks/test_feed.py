"""Whoever follows the events of a task sees its progress in them."""

from __future__ import annotations

import json

from strata.coordinator.http.feed import Feed
from strata.core.messages import TaskId, TaskProgressed, WorkerId


async def test_progress_comes_with_its_percentage_and_the_time_left() -> None:
    feed = Feed(boot_id="boot")
    event = TaskProgressed(
        task_id=TaskId("t"),
        attempt=1,
        worker_ids=(WorkerId("t-rank0"),),
        step=25,
        total_steps=100,
        steps_per_s=5.0,
        reason="reported by its workers",
        at_s=1.0,
    )
    stream = feed.follow(None)
    await anext(stream)
    feed.committed([event])
    kind, data = (await anext(stream)).decode().splitlines()[1:3]
    await stream.aclose()
    assert kind == "event: task_progressed"
    told = json.loads(data.removeprefix("data: "))
    assert (told["task_id"], told["step"], told["progress"], told["eta_s"]) == ("t", 25, 25.0, 15.0)
