"""The feed: what browsers receive stays small, however large the fleet."""

from __future__ import annotations

import orjson

from strata.coordinator.http.feed import Feed
from strata.core.messages import BarrierBroken, BarrierReleased, JobId, WorkerId

WORKERS = tuple(WorkerId(f"worker-{number:04}") for number in range(1_000))


async def told(event: BarrierReleased | BarrierBroken) -> bytes:
    feed = Feed("boot")
    start = feed.position
    feed.committed([event])
    async for chunk in feed.follow(start):
        if b"event: barrier" in chunk:
            return chunk
    raise AssertionError("the feed ended")


async def test_a_release_of_a_thousand_is_summarized() -> None:
    released = BarrierReleased(
        job_id=JobId("job"),
        barrier_id="step",
        step=7,
        round=0,
        generation=3,
        arrived=WORKERS,
        call_ids=tuple(f"call-{worker}" for worker in WORKERS),
        opened_at_s=1.0,
        waited_s=0.5,
        reason="all 1000 arrived within 500.0 ms",
        at_s=1.5,
    )
    chunk = await told(released)
    assert len(chunk) < 1_000
    data = orjson.loads(chunk.split(b"data: ", 1)[1])
    assert data["arrived"] == 1_000
    assert (data["barrier_id"], data["step"], data["reason"]) == ("step", 7, released.reason)


async def test_a_broken_barrier_still_names_who_is_missing() -> None:
    broken = BarrierBroken(
        job_id=JobId("job"),
        barrier_id="step",
        step=7,
        round=0,
        generation=3,
        arrived=WORKERS[1:],
        call_ids=tuple(f"call-{worker}" for worker in WORKERS[1:]),
        missing=WORKERS[:1],
        expected=1_000,
        opened_at_s=1.0,
        reason="999 of 1000 arrived and it timed out",
        at_s=1.5,
    )
    data = orjson.loads((await told(broken)).split(b"data: ", 1)[1])
    assert (data["missing"], data["arrived"], data["expected"]) == (["worker-0000"], 999, 1_000)
