"""What `job.log` costs a loop, and how fast a run's page and a zoom are read back: through a real coordinator.

    python -m benchmarks.metrics [--steps 1000000] [--runs 3]
    python -m benchmarks.metrics --page [--folder FOLDER]
    python -m benchmarks.metrics --targets [--folder FOLDER]

A worker per run registers and logs 50 metrics a step as fast as the coordinator takes them; then the API is read like a
dashboard reads it. With `--page`, the history of the same runs is written to its file without workers, which is sooner done, and
the dashboard's own pages are measured in a Chromium; `--folder` keeps that file for the next time. With `--targets`, that, what
`job.log` costs and the sizes of the scripts are put beside what they are to be. Prints a table; with `--json`, the figures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from strata.coordinator.metrics.run_history import RunHistory
from strata.core.telemetry.branches import Start
from strata.core.telemetry.run_metrics import MetricBatch, MetricRows
from strata.sinks import SinkRun
from strata.training.metrics.metric_log import MetricLog
from strata.worker.orchestrator import TrainingOrchestrator
from strata.worker.outbox import METRICS_KEPT_BYTES, MetricOutbox
from tests.dashboard.browser import Browser, build_dashboard
from tests.support import Coordinator

METRICS = 50
ZOOMS = 50
CALLS = 5_000
ROWS_AT_ONCE = 10_000
PAGES, PAGE_ZOOMS = 5, 12
THINKING_S = 1.0
"""Between two zooms: nobody drags over a chart in the moment in which it has changed."""


def log_costs() -> dict[str, float]:
    """Microseconds of one call with 50 values, the median."""
    outbox = MetricOutbox(generation=1, started_ms=1, resumed_step=0)
    run = SinkRun(run="cost", job="cost", generation=1, resumed_step=0)
    metric_log = MetricLog(run=run, outbox=outbox, step=lambda: 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    flat = {f"metric-{n}": float(n) for n in range(METRICS)}
    kinds: dict[str, dict[str, Any]] = {
        "50 numbers": flat,
        "50 numbers, nested": {"a": {"b": flat}},
        "49 numbers and a tensor": {**flat, "metric-0": torch.tensor(1.0, device=device)},
        f"50 tensors ({device})": {name: torch.tensor(value, device=device) for name, value in flat.items()},
    }
    found = {}
    for kind, values in kinds.items():
        times = []
        for step in range(CALLS):
            before = time.perf_counter()
            metric_log.log(values, step)
            times.append(time.perf_counter() - before)
            if step % 500 == 0:
                time.sleep(0.05)  # As a loop would let others run.
        found[kind] = statistics.median(times) * 1e6
    metric_log.close(failed=False)
    return found


def fill(address: str, run: str, steps: int) -> float:
    """Log a run; seconds until the coordinator has it on disk."""
    chance = np.random.default_rng(1)
    noise = chance.standard_normal((1_000, METRICS)).astype(np.float32).astype(np.float64)
    names = [f"metric-{n}" for n in range(METRICS)]
    began_s = time.monotonic()
    with TrainingOrchestrator(address, job_id=f"job-{run}") as orchestrator:
        orchestrator.register_worker(f"worker-{run}", run_id=run, run_generation=1)
        outbox = MetricOutbox(generation=1, started_ms=1, resumed_step=0)
        orchestrator.send_metrics(outbox)
        metric_log = MetricLog(
            run=SinkRun(run=run, job=run, generation=1, resumed_step=0), outbox=outbox, step=lambda: 0
        )
        rows = noise.tolist()
        for step in range(1, steps + 1):
            metric_log.log(dict(zip(names, rows[step % 1_000], strict=True)), step)
            while step % 100 == 0 and (
                outbox._bytes > METRICS_KEPT_BYTES // 2 or len(metric_log._rows) > 10_000
            ):
                time.sleep(0.01)  # No loop is this fast: wait for the coordinator instead of dropping.
        metric_log.close(failed=False)
        while not outbox.is_empty:
            time.sleep(0.02)
        if metric_log.dropped or outbox.dropped_total:
            raise SystemExit("values were dropped: the figures would not be of what they say")
    return time.monotonic() - began_s


def write_history(path: Path, runs: int, steps: int) -> None:
    """The runs that `fill` logs, in a history that no coordinator has open."""
    chance = np.random.default_rng(1)
    names = tuple(f"metric-{n}" for n in range(METRICS))
    history = RunHistory(path, limit_bytes=2_000_000_000)
    for run in range(runs):
        start = Start(generation=1, started_ms=int((time.time() - steps) * 1000), resumed_step=0)
        for number, first in enumerate(range(1, steps + 1, ROWS_AT_ONCE), start=1):
            at = np.arange(first, min(first + ROWS_AT_ONCE, steps + 1), dtype=np.int64)
            noise = chance.standard_normal((len(at), METRICS)).astype(np.float32).astype(np.float64)
            rows = MetricRows(
                names=names, steps=at, times=at + np.float64(start.started_ms / 1000), values=noise
            )
            batch = MetricBatch(number=number, start=start, rows=(rows,), dropped=0)
            history.put(f"run-{run}", f"job-run-{run}", batch, lambda: None)
            history.flush(600)
    history.close()


DRAWN = """
(() => {
  const main = document.querySelector("main");
  const seen = [...document.querySelectorAll("[data-panel]")].filter((p) => p.getBoundingClientRect().top < innerHeight);
  const done = (p) => p.querySelector("canvas") && !p.querySelector("[data-old]") && p.querySelector("[data-value]")?.textContent;
  return seen.length > 0 && !main.querySelector(".skeleton") && seen.every(done) ? seen.length : 0;
})()
"""
"""How many panels are in view, once every one of them is drawn."""

WHEN_DRAWN = f"""
new Promise((resolve) => {{
  const look = () => ({DRAWN} ? requestAnimationFrame(() => resolve(performance.now())) : requestAnimationFrame(look));
  look();
}})
"""

ZOOMED = """
new Promise((resolve) => {
  const over = [...document.querySelectorAll("[data-panel] .u-over")][PANEL];
  const box = over.getBoundingClientRect();
  const at = (type, share) => over.dispatchEvent(new MouseEvent(type, { bubbles: true, clientX: box.left + share * box.width, clientY: box.top + 40, button: 0, buttons: 1, movementX: 5 }));
  const up = (share) => document.dispatchEvent(new MouseEvent("mouseup", { bubbles: true, clientX: box.left + share * box.width, clientY: box.top + 40, button: 0, movementX: 5 }));
  const before = location.search;
  const drawn = new Set();
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...where) { drawn.add(this.canvas); return clear.apply(this, where); };
  const inView = () => [...document.querySelectorAll("[data-points]")].filter((p) => p.getBoundingClientRect().top < innerHeight);
  over.dispatchEvent(new MouseEvent("mouseenter", { clientX: box.left + FROM * box.width, clientY: box.top + 40 }));
  at("mousemove", FROM);
  at("mousedown", FROM);
  at("mousemove", TO);
  const began = performance.now();
  up(TO);
  let shown = null, finer = null;
  const end = (found) => { CanvasRenderingContext2D.prototype.clearRect = clear; resolve(found); };
  const look = () => {
    const old = document.querySelector("[data-panel] [data-old]") !== null;
    if (shown === null && inView().every((plot) => drawn.has(plot.querySelector("canvas")))) shown = performance.now() - began;
    if (shown !== null && finer === null && inView().every((plot) => Number(plot.dataset.points) >= FINE)) finer = performance.now() - began;
    if (finer !== null && location.search !== before && !old && DONE) end([shown, finer, performance.now() - began]);
    else if (performance.now() - began > 30000) end(null);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
"""
"""Milliseconds until the frame after which every chart in view was drawn again, has its finer points, and the page has followed."""

FINE = 300
"""Points in the range shown, of the 500 that a chart asks for: more of them are hardly seen."""


def page_cpu_ms(browser: Browser) -> float:
    """Processor time that the page's own thread has used so far: what a zoom costs however many others want the cores."""
    driver = psutil.Process(browser._process.pid)
    pages = [each for each in driver.children(recursive=True) if "--type=renderer" in each.cmdline()]
    used_ns = (
        int(Path(f"/proc/{each.pid}/task/{each.pid}/schedstat").read_text().split()[0]) for each in pages
    )
    return sum(used_ns) / 1e6


def measure_page(folder: Path, runs: int, steps: int) -> dict[str, Any]:
    """Of the dashboard in a Chromium: the page of a run, three runs over each other, and a zoom on each."""
    data = folder / "data"
    if not (data / "metrics.sqlite").exists():
        data.mkdir(parents=True, exist_ok=True)
        write_history(data / "metrics.sqlite", runs, steps)
    coordinator = Coordinator(data).start()
    assert coordinator.process is not None
    process = psutil.Process(coordinator.process.pid)
    figures: dict[str, Any] = {"rss_before_mb": process.memory_info().rss / 1e6}
    every = ",".join(f"run-{n}" for n in range(runs))
    pages = {"run": "/runs/run-0?tab=charts", "compare": f"/compare?runs={every}"}
    chance = np.random.default_rng(3)
    try:
        with Browser(coordinator.url) as browser:
            for page, address in pages.items():
                times = []
                for _ in range(PAGES):
                    browser.leave()
                    browser.open(address)
                    times.append(browser.evaluate(WHEN_DRAWN))
                figures[f"{page}_panels_in_view"] = browser.evaluate(DRAWN)
                figures[f"{page}_ms"] = times
                zooms, cpu = [], []
                used_s = process.cpu_times()
                for _ in range(PAGE_ZOOMS):
                    time.sleep(THINKING_S)
                    start = float(chance.uniform(0, 0.8))
                    places = {
                        "FROM": f"{start:.3f}",
                        "TO": f"{start + 0.15:.3f}",
                        "PANEL": "0",
                        "FINE": str(FINE),
                        "DONE": DRAWN,
                    }
                    script = ZOOMED
                    for name, value in places.items():
                        script = script.replace(name, value)
                    before_ms = page_cpu_ms(browser)
                    zooms.append(browser.evaluate(script))
                    cpu.append(page_cpu_ms(browser) - before_ms)
                    if None in zooms:
                        raise SystemExit(
                            "a chart could not be zoomed: the figures would not be of what they say"
                        )
                    if "zoom=" in browser.url and len(zooms) % 3 == 0:
                        browser.click("button", "Reset zoom")
                        browser.until(DRAWN)
                figures[f"{page}_zoom_range_ms"] = sorted(ms for ms, _, _ in zooms)
                figures[f"{page}_zoom_ms"] = sorted(ms for _, ms, _ in zooms)
                figures[f"{page}_zoom_followed_ms"] = sorted(ms for _, _, ms in zooms)
                figures[f"{page}_zoom_page_cpu_ms"] = sorted(cpu)
                now_s = process.cpu_times()
                spent_s = now_s.user + now_s.system - used_s.user - used_s.system
                figures[f"{page}_coordinator_ms_of_a_zoom"] = spent_s * 1000 / PAGE_ZOOMS
            browser.leave()
        figures["rss_after_mb"] = process.memory_info().rss / 1e6
        figures["load_after"] = os.getloadavg()[0]
    finally:
        coordinator.stop()
    return figures


def timed_ms(read: Callable[[], bytes]) -> tuple[float, int]:
    before = time.perf_counter()
    body = read()
    return (time.perf_counter() - before) * 1000, len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", action="store_true", help="measure the dashboard in a browser")
    parser.add_argument("--folder", type=Path, help="where --page keeps its history")
    parser.add_argument("--targets", action="store_true", help="all that has a target, beside it")
    given = parser.parse_args()
    if given.targets:
        targets(given.folder, given.runs, given.steps)
        return
    if given.page:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as made:
            found = measure_page(given.folder or Path(made), given.runs, given.steps)
        show({"load_before": load, **found}, as_json=given.json)
        return
    figures: dict[str, Any] = {"load_before": os.getloadavg()[0], "log_us": log_costs()}
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(Path(folder) / "data").start()
        assert coordinator.process is not None
        process = psutil.Process(coordinator.process.pid)
        figures["rss_before_mb"] = process.memory_info().rss / 1e6
        try:
            figures["fill_s"] = [
                fill(coordinator.address, f"run-{n}", given.steps) for n in range(given.runs)
            ]
            figures["rss_after_filling_mb"] = process.memory_info().rss / 1e6
            figures["file_mb"] = (
                sum(p.stat().st_size for p in Path(folder).glob("data/metrics.sqlite*")) / 1e6
            )
            base = f"http://127.0.0.1:{coordinator.http_port}/api/runs"
            every = "&".join(f"name=metric-{n}" for n in range(METRICS))

            def page() -> bytes:
                paths = ("metrics", f"metrics/series?points=1000&{every}")
                asked = [f"{base}/run-{n}/{path}" for n in range(given.runs) for path in paths]
                return b"".join(urllib.request.urlopen(each, timeout=60).read() for each in asked)

            pages = [timed_ms(page) for _ in range(5)]
            figures["page_ms"] = [ms for ms, _ in pages]
            figures["page_mb"] = pages[0][1] / 1e6
            chance = np.random.default_rng(3)

            def zoom() -> bytes:
                width = int(10 ** chance.uniform(2, np.log10(given.steps)))
                first = int(chance.integers(0, given.steps - width + 1))
                query = f"name=metric-7&from={first}&to={first + width}&points=1000"
                path = (
                    f"{base}/run-1/metrics/series?{query}"
                    if given.runs > 1
                    else f"{base}/run-0/metrics/series?{query}"
                )
                body: bytes = urllib.request.urlopen(path, timeout=60).read()
                return body

            zooms = sorted(ms for ms, _ in (timed_ms(zoom) for _ in range(ZOOMS)))
            figures["zoom_ms"] = {"median": zooms[ZOOMS // 2], "slowest": zooms[-1]}
            figures["rss_after_reading_mb"] = process.memory_info().rss / 1e6
        finally:
            coordinator.stop()
    show(figures, as_json=given.json)


def script_sizes() -> tuple[int, int]:
    """Bytes of all scripts of the dashboard, packed, and of those that its first page needs with its charts."""
    packed = {
        path.name: len(gzip.compress(path.read_bytes(), 9)) for path in build_dashboard.BUILT.rglob("*.js")
    }
    first = re.findall(r'/assets/([^"]+\.js)"', (build_dashboard.BUILT / "index.html").read_text())
    plot = [name for name in packed if name.startswith("Plot-")]
    return sum(packed.values()), sum(packed[name] for name in {*first, *plot})


def targets(folder: Path | None, runs: int, steps: int) -> None:
    load = os.getloadavg()[0]
    costs = log_costs()
    with tempfile.TemporaryDirectory() as made:
        page = measure_page(folder or Path(made), runs, steps)
    total, first = script_sizes()
    rows = [
        *((f"job.log: {kind}", f"{us:.1f} µs", 50, us) for kind, us in costs.items()),
        (
            "page of a run, median",
            f"{statistics.median(page['run_ms']):,.0f} ms",
            1_500,
            statistics.median(page["run_ms"]),
        ),
        *(
            (
                what,
                f"{statistics.median(page[key]):,.0f} ms (slowest {max(page[key]):,.0f})",
                100,
                statistics.median(page[key]),
            )
            for what, key in (
                ("zoom: range shown, median", "run_zoom_range_ms"),
                ("zoom: finer points of all panels, median", "run_zoom_ms"),
            )
        ),
        ("JavaScript, gzip", f"{total / 1000:.1f} KB", 300_000, total),
        ("JavaScript of the first page, gzip", f"{first / 1000:.1f} KB", 180_000, first),
        (
            "coordinator's memory, after beside before",
            f"{page['rss_after_mb']:.0f} / {page['rss_before_mb']:.0f} MB",
            2,
            page["rss_after_mb"] / page["rss_before_mb"],
        ),
    ]
    print(
        f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after; {runs} runs of {METRICS} metrics × {steps:,} steps"
    )
    for what, said, limit, value in rows:
        print(f"{what:45} {said:28} {'held' if value <= limit else 'NOT HELD'} (at most {limit:,})")
    others = {
        key: value
        for key, value in page.items()
        if key.startswith("compare") or "coordinator_ms" in key or "page_cpu" in key or "followed" in key
    }
    for key, value in others.items():
        print(f"{key}: {value}")


def show(figures: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
