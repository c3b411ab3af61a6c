"""What the engine reports to whom: listeners receive only durable facts, and every fact is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import (
    ArriveAtBarrier,
    BarrierReleased,
    Event,
    Registered,
    RegisterWorker,
    WorkerId,
    WorkerJoined,
)
from tests.core.builders import worker_spec


async def test_listeners_see_the_release_and_only_the_count_shows_arrivals(tmp_path: Path) -> None:
    engine = Engine(Cluster(), SqliteJournal(tmp_path), SystemClock())
    heard: list[type[Event]] = []
    counts: list[int] = []

    def listen(events: Sequence[Event]) -> None:
        heard.extend(type(event) for event in events)

    engine.listeners.append(listen)
    engine.on_events = counts.append
    running = asyncio.create_task(engine.run())
    for name in ("a", "b"):
        joined = await engine.submit(RegisterWorker(spec=worker_spec(name), registration_id=name))
        assert isinstance(joined, Registered)
    for name in ("a", "b"):
        revision = engine.revision
        await engine.submit(
            ArriveAtBarrier(
                worker_id=WorkerId(name),
                incarnation=0,
                generation=0,
                barrier_id="step",
                step=1,
                expected=2,
                call_id=name,
                timeout_s=0.0,
            )
        )
        assert engine.revision > revision  # Pages show who has arrived, also before the release.
    engine.stop()
    await running
    engine.close()
    assert heard == [WorkerJoined, WorkerJoined, BarrierReleased]
    assert counts == [1, 1, 1, 2]
