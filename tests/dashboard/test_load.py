"""A large, busy fleet: the page stays smooth and does not grow."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from benchmarks.chromium import PATIENCE_S, Chromium
from benchmarks.dashboard import USEFUL, Load, run, say
from strata.bench.coordinator.fleet import Fleet
from strata.bench.coordinator.serving import HOST, served_coordinator
from tests.support_programs import program

pytestmark = pytest.mark.browser

SOAK_S = 600
SLICE_S = 30


@pytest.mark.slow
def test_the_benchmark_measures_every_metric(built: object) -> None:
    program("chromium")
    load = Load(fleet=20, paints=1, updates=1, clients=3, watch_s=0.5, busy_s=1.0)
    rows = [row.name for row in run(load)]
    for metric in (
        "JavaScript",
        "/api/dashboard",
        "first useful paint",
        "to the screen",
        "/workers",
        "/logs",
        "live clients",
    ):
        assert any(metric in name for name in rows), metric


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_page_left_open_neither_grows_nor_blocks(built: object) -> None:
    page = Watched()
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, 1_000) as fleet:
            beating = asyncio.create_task(fleet.beat(every_s=1.0))
            with page:
                page.before_every_page(USEFUL)
                await asyncio.to_thread(page.open, f"http://{HOST}:{coordinator.http_port}/logs")
                await asyncio.to_thread(page.evaluate, "window.usefulAt")
                await asyncio.to_thread(page.evaluate, "window.longTasks.length = 0")
                await asyncio.to_thread(page.watch)
                started_s, lines = time.monotonic(), 0
                while time.monotonic() - started_s < SOAK_S:
                    for _ in range(50):
                        say(fleet, lines % fleet.size, f"line {lines}: loss 2.31")
                        lines += 1
                    if lines % (1_000 * SLICE_S) == 0:
                        await asyncio.to_thread(page.look)
                    await asyncio.sleep(max(0.0, started_s + lines / 1_000 - time.monotonic()))
                blocked = await asyncio.to_thread(page.evaluate, "window.longTasks")
            beating.cancel()
    print(f"\n{lines:,} lines in {SOAK_S} s; heap in MB: {page.heaps_mb}; nodes: {page.nodes}")
    print(f"longest tasks in ms of processor time: {[round(task) for task in sorted(page.tasks_ms)[-10:]]}")
    print(f"longest the page was blocked, in ms: {sorted(round(task) for task in blocked)[-10:]}")
    assert max(page.heaps_mb[-4:]) < max(page.heaps_mb[2:6]) * 1.25
    assert max(page.nodes[-4:]) < max(page.nodes[2:6]) * 1.25
    assert len(page.tasks_ms) > SOAK_S
    assert max(page.tasks_ms) < 100


class Watched(Chromium):
    """Records memory and the main thread's task durations, slice by slice.

    Tasks are measured in CPU time: on a busy machine wall time says nothing about the page.
    """

    def __init__(self) -> None:
        program("chromium")
        super().__init__()
        self.heaps_mb: list[float] = []
        self.nodes: list[int] = []
        self.tasks_ms: list[float] = []

    def watch(self) -> None:
        self.call(
            "Tracing.start", transferMode="ReturnAsStream", traceConfig={"includedCategories": ["toplevel"]}
        )

    def look(self) -> None:
        self._take(self._traced())
        self.call("HeapProfiler.collectGarbage")
        self.heaps_mb.append(round(self.call("Runtime.getHeapUsage")["usedSize"] / 1e6, 1))
        self.nodes.append(self.call("Memory.getDOMCounters")["nodes"])
        self.watch()

    def _traced(self) -> list[dict[str, Any]]:
        self.call("Tracing.end")
        until_s = time.monotonic() + PATIENCE_S
        while not (done := [e for e in self._events if e["method"] == "Tracing.tracingComplete"]):
            self._events = [event for event in [self._next(until_s)] if "method" in event]
        stream, text = done[0]["params"]["stream"], ""
        while not (piece := self.call("IO.read", handle=stream, size=1 << 22))["eof"]:
            text += piece["data"]
        self.call("IO.close", handle=stream)
        self._events.clear()
        events: list[dict[str, Any]] = json.loads(text + piece["data"])["traceEvents"]
        return events

    def _take(self, events: list[dict[str, Any]]) -> None:
        main = {
            (event["pid"], event["tid"])
            for event in events
            if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
        }
        self.tasks_ms += [
            event["tdur"] / 1_000
            for event in events
            if event["name"].endswith("RunTask") and "tdur" in event and (event["pid"], event["tid"]) in main
        ]
