"""A stall is counted against nobody: the time in which the event loop stood still, and not what a slow disk takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata.coordinator.engine import Engine, SystemClock
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import Event, Instant, LoopStalled, Observation, RegisterWorker
from tests.core.builders import worker_spec

STALL_S = 0.5


async def stood_still(over: asyncio.Event) -> float:
    """How long the loop did nothing for reasons of the machine, or of whoever blocked it, until `over`."""
    late_s, turn_s = 0.0, 0.01
    while not over.is_set():
        began_s = time.monotonic()
        await asyncio.sleep(turn_s)
        late_s += time.monotonic() - began_s - turn_s
    return late_s


class SlowJournal(SqliteJournal):
    def append(self, events: Sequence[Event]) -> None:
        time.sleep(STALL_S)
        super().append(events)


@pytest.mark.parametrize("stalled", ["disk", "loop"])
async def test_a_loop_that_stood_still_is_credited_and_a_slow_disk_is_not(
    tmp_path: Path, stalled: str
) -> None:
    make_journal = SlowJournal if stalled == "disk" else SqliteJournal
    engine = Engine(Cluster(), make_journal(tmp_path), SystemClock())
    credited_s: list[float] = []
    observe = engine.cluster.observe

    def noting(observation: Observation, now: Instant) -> None:
        if isinstance(observation, LoopStalled):
            credited_s.append(observation.stall_s)
        observe(observation, now)

    engine.cluster.observe = noting  # type: ignore[method-assign]
    over = asyncio.Event()
    running, standing = asyncio.create_task(engine.run()), asyncio.create_task(stood_still(over))
    for number in range(4):
        await engine.submit(RegisterWorker(spec=worker_spec(f"w{number}"), registration_id=f"r{number}"))
        if stalled == "loop":
            time.sleep(STALL_S)  # noqa: ASYNC251 - that is the point.
    await asyncio.sleep(0.2)
    engine.stop()
    await running
    engine.close()
    over.set()
    late_s = await standing
    if stalled == "loop":
        assert sum(credited_s) > 2 * STALL_S
    else:
        assert sum(credited_s) < late_s + 2 * STALL_S
