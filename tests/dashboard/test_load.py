"""A large fleet that talks all the time: the page stays smooth, and as small as it was."""

from __future__ import annotations

import asyncio
import time

import pytest

from strata.bench.chromium import Chromium
from strata.bench.dashboard import USEFUL, Load, run, say
from strata.bench.fleet import Fleet
from strata.bench.serving import HOST, served_coordinator

pytestmark = pytest.mark.browser

SOAK_S = 600


@pytest.mark.slow
def test_the_benchmark_measures_every_figure(built: object) -> None:
    load = Load(fleet=20, paints=1, updates=1, clients=3, watch_s=0.5, busy_s=1.0)
    rows = [row.name for row in run(load)]
    for figure in (
        "JavaScript",
        "/api/dashboard",
        "first useful paint",
        "to the screen",
        "/workers",
        "/logs",
        "live clients",
    ):
        assert any(figure in name for name in rows), figure


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_page_left_open_neither_grows_nor_blocks(built: object) -> None:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, 1_000) as fleet:
            beating = asyncio.create_task(fleet.beat_at_1_hz())
            with Chromium() as chromium:
                chromium.before_every_page(USEFUL)
                await asyncio.to_thread(chromium.open, f"http://{HOST}:{coordinator.http_port}/logs")
                await asyncio.to_thread(chromium.evaluate, "window.usefulAt")
                await asyncio.to_thread(chromium.evaluate, "window.longTasks.length = 0")
                worked_s = await asyncio.to_thread(chromium.worked_s)
                heaps, nodes = [], []
                began_s, lines = time.monotonic(), 0
                while time.monotonic() - began_s < SOAK_S:
                    for _ in range(50):
                        say(fleet, lines % fleet.size, f"line {lines}: loss 2.31")
                        lines += 1
                    if lines % 30_000 == 0:
                        await asyncio.to_thread(chromium.call, "HeapProfiler.collectGarbage")
                        used = await asyncio.to_thread(chromium.call, "Runtime.getHeapUsage")
                        counted = await asyncio.to_thread(chromium.call, "Memory.getDOMCounters")
                        heaps.append(used["usedSize"] / 1e6)
                        nodes.append(counted["nodes"])
                    await asyncio.sleep(max(0.0, began_s + lines / 1_000 - time.monotonic()))
                worked_s = await asyncio.to_thread(chromium.worked_s) - worked_s
                tasks = await asyncio.to_thread(chromium.evaluate, "window.longTasks")
            beating.cancel()
    longest = sorted(round(task) for task in tasks)[-10:]
    print(f"\n{lines:,} lines in {SOAK_S} s; the page's thread worked {worked_s / SOAK_S:.0%} of the time")
    print(f"heap in MB: {[round(heap, 1) for heap in heaps]}; nodes: {nodes}")
    print(f"{len(tasks)} tasks of more than 50 ms, the longest in ms: {longest}")
    assert max(heaps[-4:]) < max(heaps[2:6]) * 1.25
    assert max(nodes[-4:]) < max(nodes[2:6]) * 1.25
    assert max(longest, default=0) < 100
