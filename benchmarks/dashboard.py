"""What the dashboard costs, and how soon it shows: measured in a real Chromium on a real coordinator with a fleet.

    python -m benchmarks.dashboard [--json] [--quick]

Browser, coordinator and fleet share this machine. Sizes do not depend on how quiet it is; times do, and their notes
tell how far the repetitions lie apart.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

from benchmarks.chromium import Chromium
from strata.bench.coordinator.browsers import Browser
from strata.bench.coordinator.fleet import Fleet
from strata.bench.coordinator.serving import HOST, Served, served_coordinator
from strata.bench.table import Row, report
from strata.coordinator.http.dashboard import BUILT
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb

TITLE = "Dashboard"

USEFUL = """
window.usefulAt = new Promise((resolve) => {
  const isUseful = () => {
    const main = document.querySelector("main");
    return main?.querySelector("h1") && !main.querySelector(".skeleton") && !document.querySelector("[role=alert]");
  };
  const look = () => (isUseful() ? requestAnimationFrame(() => resolve(performance.now())) : requestAnimationFrame(look));
  look();
});
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({ type: "longtask", buffered: true });
"""
"""Before any page: when is there a heading, and nothing left that stands for a value still to come."""

SEEN = """
new Promise((resolve, reject) => {
  const look = () => {
    if (document.querySelector("main")?.textContent.includes(%r)) requestAnimationFrame(() => resolve(Date.now()));
    else requestAnimationFrame(look);
  };
  setTimeout(() => reject(new Error("not seen")), 30000);
  look();
})
"""


class NotBuilt(StrataError):
    code = "not_built"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of everything. `QUICK` shows that the benchmark works; its results mean nothing."""

    fleet: int = 1_000
    paints: int = 5
    updates: int = 20
    clients: int = 200
    watch_s: float = 15.0
    busy_s: float = 20.0


QUICK = Load(fleet=20, paints=1, updates=2, clients=5, watch_s=1.0, busy_s=1.0)


def main(*, json: bool = False, quick: bool = False) -> None:
    report(TITLE, run(QUICK if quick else Load()), as_json=json)


def run(load: Load) -> Iterator[Row]:
    yield from _size_rows()
    yield from asyncio.run(_rows(load))


def _size_rows() -> Iterator[Row]:
    scripts = sorted(BUILT.rglob("*.js"))
    if not scripts:
        raise NotBuilt("The dashboard is not built.", hint="Run: make setup")
    index = (BUILT / "index.html").read_text()
    sizes = {path: len(gzip.compress(path.read_bytes(), 9)) for path in scripts}
    first = sum(size for path, size in sizes.items() if path.name in index)
    yield Row(
        name="JavaScript in total, gzip",
        measured=sum(sizes.values()) / 1000,
        unit="KB",
        target=300,
        better="lower",
        note=f"{len(sizes)} files; {first / 1000:.0f} KB of them with the first page",
    )


async def _rows(load: Load) -> list[Row]:
    with served_coordinator() as coordinator:
        async with Fleet(coordinator, load.fleet) as fleet:
            async with _beating(fleet):
                await asyncio.sleep(1.5)
                rows = [await _snapshot_row(coordinator, load)]
                with Chromium() as chromium:
                    chromium.before_every_page(USEFUL)
                    rows.append(await asyncio.to_thread(_paint_row, chromium, coordinator, load))
                    rows.append(await _update_row(chromium, coordinator, fleet, load))
                    rows += [
                        await _busy_row(chromium, coordinator, fleet, load, view)
                        for view in ("workers", "logs")
                    ]
                rows.append(await _clients_row(coordinator, load))
    return rows


@asynccontextmanager
async def _beating(fleet: Fleet) -> AsyncIterator[None]:
    task = asyncio.create_task(fleet.beat(every_s=1.0))
    try:
        yield
    finally:
        task.cancel()


async def _snapshot_row(coordinator: Served, load: Load) -> Row:
    browser = Browser(coordinator.http_port)
    size = len(await browser.get("/api/dashboard"))
    browser.close()
    return Row(
        name=f"/api/dashboard of {load.fleet:,} workers, gzip",
        measured=size / 1000,
        unit="KB",
        target=150,
        better="lower",
    )


def _paint_row(chromium: Chromium, coordinator: Served, load: Load) -> Row:
    times_ms = []
    for _ in range(load.paints):
        chromium.open(_url(coordinator, "/"))
        times_ms.append(float(chromium.evaluate("window.usefulAt")))
    return Row(
        name=f"first useful paint, {load.fleet:,} workers",
        measured=median(times_ms) / 1000,
        unit="s",
        target=1,
        better="lower",
        note=f"from the address to a page with its values, empty cache; median of {len(times_ms)}, "
        f"worst {max(times_ms) / 1000:.2f}",
    )


async def _update_row(chromium: Chromium, coordinator: Served, fleet: Fleet, load: Load) -> Row:
    await asyncio.to_thread(chromium.open, _url(coordinator, "/logs"))
    await asyncio.to_thread(chromium.evaluate, "window.usefulAt")
    taken_s = []
    for number in range(load.updates):
        text = f"update {number} of {time.monotonic_ns()}"
        seeing = asyncio.create_task(asyncio.to_thread(chromium.evaluate, SEEN % text))
        await asyncio.sleep(0.3)
        said_s = time.time()
        say(fleet, 0, text)
        taken_s.append(float(await seeing) / 1000 - said_s)
    return Row(
        name="from a worker's event to the screen",
        measured=max(taken_s),
        unit="s",
        target=1,
        better="lower",
        note=f"the worst of {len(taken_s)}, median {median(taken_s):.2f}; {load.fleet:,} workers beating",
    )


async def _busy_row(chromium: Chromium, coordinator: Served, fleet: Fleet, load: Load, view: str) -> Row:
    """Every worker beats and writes a line each second while the page is looked at."""
    await asyncio.to_thread(chromium.open, _url(coordinator, f"/{view}"))
    await asyncio.to_thread(chromium.evaluate, "window.usefulAt")
    await asyncio.to_thread(chromium.evaluate, "window.longTasks.length = 0")
    worked_s = await asyncio.to_thread(chromium.worked_s)
    began_s, lines = time.monotonic(), 0
    while time.monotonic() - began_s < load.busy_s:
        for _ in range(max(1, fleet.size // 20)):
            say(fleet, lines % fleet.size, f"line {lines}: loss 2.31, 41,000 tokens/s")
            lines += 1
        await asyncio.sleep(max(0.0, began_s + lines / fleet.size - time.monotonic()))
    share = (await asyncio.to_thread(chromium.worked_s) - worked_s) / (time.monotonic() - began_s)
    tasks: list[float] = await asyncio.to_thread(chromium.evaluate, "window.longTasks")
    blocked = [duration for duration in tasks if duration > 100]
    return Row(
        name=f"/{view}: longest the page was blocked, {fleet.size:,} workers × 1 line/s",
        measured=max(tasks, default=0.0),
        unit="ms",
        target=100,
        better="lower",
        note=f"{len(blocked)} times more than 100 ms in {load.busy_s:.0f} s; {len(tasks)} times more than 50 ms; "
        f"the page's thread used {share:.0%} of a core",
    )


async def _clients_row(coordinator: Served, load: Load) -> Row:
    """As the page itself does it: an event stream each, and a snapshot every two seconds and two milliseconds a worker."""
    every_s = 2.0 + 0.002 * load.fleet
    before = coordinator.cost()
    await asyncio.sleep(load.watch_s)
    alone = coordinator.cost().percent_since(before)
    browsers = [Browser(coordinator.http_port) for _ in range(load.clients)]
    taken_s: list[float] = []
    tasks = [asyncio.create_task(browser.watch()) for browser in browsers]
    tasks += [
        asyncio.create_task(
            browser.poll(
                "/api/dashboard",
                every_s=every_s,
                first_after_s=every_s * place / load.clients,
                taken_s=taken_s,
            )
        )
        for place, browser in enumerate(browsers)
    ]
    await asyncio.sleep(min(1.0, load.watch_s))
    before = coordinator.cost()
    await asyncio.sleep(load.watch_s)
    watched = coordinator.cost().percent_since(before)
    for task in tasks:
        if task.done():
            task.result()  # None ends by itself: this says why it did.
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for browser in browsers:
        browser.close()
    return Row(
        name=f"{load.clients} live clients: CPU of the coordinator",
        measured=max(0.0, watched - alone),
        unit="% of a core",
        target=30,
        better="lower",
        note=f"beside {alone:.0f} % for {load.fleet:,} workers at 1 Hz that nobody watches; "
        f"{len(taken_s)} snapshots, median {_median_ms(taken_s)}",
    )


def _median_ms(taken_s: list[float]) -> str:
    return f"{median(taken_s) * 1000:.1f} ms" if taken_s else "none"


def say(fleet: Fleet, place: int, text: str) -> None:
    entry = pb.LogEntry(timestamp=time.time(), level="info", message=text, source="training")
    fleet.workers[place].say(pb.WorkerMessage(logs=pb.LogBatch(entries=[entry])))


def _url(coordinator: Served, path: str) -> str:
    return f"http://{HOST}:{coordinator.http_port}{path}"


if __name__ == "__main__":
    main(json="--json" in sys.argv, quick="--quick" in sys.argv)
