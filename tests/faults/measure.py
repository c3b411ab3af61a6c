"""What attacks cost healthy workers, as a table: `python -m tests.faults.measure`. For a machine that does nothing else.

Calm and attacked windows alternate, so that what the machine does beside it falls on both.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from pathlib import Path

import psutil

from tests.faults.healthy import Healthy, p99
from tests.faults.test_attacks import attack_on
from tests.support import Coordinator

ATTACKS = (
    ("rapid_reset", 4, "streams opened and reset over 4 connections"),
    ("slowloris", 200, "200 requests that never end"),
    ("connections", 10_000, "10,000 connections"),
    ("unary", 0, "a client with 200 calls outstanding"),
    ("heartbeats", 0, "a session that sends without a pause"),
    ("logs", 0, "a session that floods the log"),
)


def main(*, windows: int = 4, window_s: float = 5.0) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print("| attack | calm p50 / p99 | attacked p50 / p99 | p99, times | coordinator's core |")
    print("|---|---|---|---|---|")
    for kind, count, text in ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            server = Coordinator(Path(folder) / "data").start()
            try:
                with Healthy(server) as healthy:
                    process = psutil.Process(server.pid)
                    calm: list[float] = []
                    attacked: list[float] = []
                    busy = []
                    for _ in range(windows):
                        calm += healthy.round_trips_s(window_s)
                        with attack_on(server, kind, count):
                            process.cpu_percent()
                            attacked += healthy.round_trips_s(window_s)
                            busy.append(process.cpu_percent())
                    healthy.check()
            finally:
                server.stop()
        times = p99(attacked) / p99(calm)
        print(
            f"| {text} | {_ms(calm)} | {_ms(attacked)} | {times:.1f} | {statistics.mean(busy):.0f} % |",
            flush=True,
        )


def _ms(taken_s: list[float]) -> str:
    return f"{statistics.median(taken_s) * 1e3:.1f} / {p99(taken_s) * 1e3:.1f} ms"


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    main(windows=1 if quick else 4, window_s=2.0 if quick else 5.0)
