"""Heartbeats while the journal is compacted, beside heartbeats while it is not: `python -m benchmarks.compaction`.

A coordinator with a large state (30,000 checkpoints, 10,000 tasks) in a process of its own. One client sends heartbeats one after another over
gRPC and times each; another reports checkpoints, so that there is always something to commit. The coordinator compacts never, all the time in
the background, or all the time in one piece, as it did before. Rounds alternate, because the machine is not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc

from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core.cluster import Cluster
from strata.core.messages import CreateTask, Event, Instant, RegisterWorker
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.stubs import Stubs
from tests.core.builders import notice, task_spec, worker_spec

SERVE = """
import sys
from strata.coordinator import engine
way = sys.argv[1]
engine.SNAPSHOT_EVERY = 10**9 if way == "never" else 1
engine.SNAPSHOT_BYTES = 10**12
if way == "at once":
    engine.Engine._start_compaction = engine.Engine._snapshot
    engine.SNAPSHOT_EVERY = 2_000
from strata.cli.main import app
sys.argv = ["strata", "serve", "--grpc-port", "0", "--http-port", "0", "--data-dir", sys.argv[2]]
app()
"""


def prepare(folder: Path, *, checkpoints: int, tasks: int) -> None:
    cluster, events = Cluster(), list[Event]()
    now = Instant(mono_s=1.0, wall_s=time.time())

    def do(command: object) -> None:
        events.extend(cluster.handle(command, now).events)  # type: ignore[arg-type]

    do(RegisterWorker(spec=worker_spec("a"), registration_id="r"))
    for number in range(checkpoints):
        do(notice("a", f"old-{number}", number, status="in_progress", path="p" * 200))
    for number in range(tasks):
        do(CreateTask(spec=task_spec(f"task-{number}", config_json='{"a": 1}')))
    journal = SqliteJournal(folder, reserve_bytes=4096)
    journal.append(events)
    journal.close()


def measure(folder: Path, way: str, *, seconds: float) -> list[float]:
    env = {
        **os.environ,
        "STRATA_LAUNCHER": "none",
        "STRATA_HEARTBEAT_TIMEOUT": "600",
        "STRATA_DISK_RESERVE_MB": "1",
    }
    (folder / "serving.json").unlink(missing_ok=True)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, way, str(folder)], env=env, stdout=subprocess.DEVNULL
    )
    try:
        while not (folder / "serving.json").exists():
            assert server.poll() is None, "the coordinator ended"
            time.sleep(0.1)
        address = f"127.0.0.1:{json.loads((folder / 'serving.json').read_text())['grpc']}"
        with grpc.insecure_channel(address) as opened:
            stubs = Stubs(opened)
            stubs.call("RegisterWorker", pb.RegisterWorkerRequest(worker_id="b"), timeout=60)
            over = threading.Event()

            def write() -> None:
                number = 0
                while not over.is_set():
                    number += 1
                    request = pb.NotifyCheckpointRequest(
                        worker_id="b",
                        checkpoint_id=f"{way}-{time.time_ns()}",
                        step=number,
                        path="/c",
                        status=pb.CHECKPOINT_STATUS_IN_PROGRESS,
                    )
                    stubs.call("NotifyCheckpoint", request, timeout=60)

            writer = threading.Thread(target=write)
            writer.start()
            times_s = []
            beat = pb.HeartbeatRequest(worker_id="b")
            time.sleep(2.0)
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                started_s = time.perf_counter()
                stubs.call("Heartbeat", beat, timeout=60)
                times_s.append(time.perf_counter() - started_s)
                time.sleep(0.002)
            over.set()
            writer.join()
        return times_s
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--checkpoints", type=int, default=30_000)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--ways", nargs="+", default=["never", "in pieces", "at once"])
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            with tempfile.TemporaryDirectory() as folder:
                prepare(Path(folder), checkpoints=arguments.checkpoints, tasks=arguments.tasks)
                times_s = sorted(measure(Path(folder), way, seconds=arguments.seconds))
            p50, p99 = (times_s[int(len(times_s) * q)] for q in (0.5, 0.99))
            found.setdefault(way, []).append((p50, p99, times_s[-1]))
            print(
                f"{way}: {len(times_s)} heartbeats, p50 {p50 * 1e3:.1f}, p99 {p99 * 1e3:.1f}, worst {times_s[-1] * 1e3:.1f} ms",
                flush=True,
            )
    print("| compaction | p50 ms | p99 ms | worst ms |\n|---|---|---|---|")
    for way, rounds in found.items():
        p50, p99, worst = (statistics.median(each[i] for each in rounds) * 1e3 for i in range(3))
        print(f"| {way} | {p50:.1f} | {p99:.1f} | {worst:.1f} |")


if __name__ == "__main__":
    main()
