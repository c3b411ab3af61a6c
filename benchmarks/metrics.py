"""What `job.log` costs a loop, and how fast a run's page and a zoom are read back: through a real coordinator.

    python -m benchmarks.metrics [--steps 1000000] [--runs 3]

A worker per run registers and logs 50 metrics a step as fast as the coordinator takes them; then the API is read like a
dashboard reads it. Prints a table; with `--json`, the figures.
"""

from __future__ import annotations

import argparse
import json
import os
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

from strata.sinks import SinkRun
from strata.training.metric_log import MetricLog
from strata.worker.orchestrator import TrainingOrchestrator
from strata.worker.outbox import METRICS_KEPT_BYTES, MetricOutbox
from tests.support import Coordinator

METRICS = 50
ZOOMS = 50
CALLS = 5_000


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


def timed_ms(read: Callable[[], bytes]) -> tuple[float, int]:
    before = time.perf_counter()
    body = read()
    return (time.perf_counter() - before) * 1000, len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
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
    if given.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
