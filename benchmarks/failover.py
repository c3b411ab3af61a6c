"""How fast a journal in etcd takes events, and for how long nobody leads when a leader is lost.

    python -m benchmarks.failover [--failovers 10] [--fsync]

Starts an etcd of three members and two coordinators on this machine. 50 workers hold sessions and meet at a barrier again and again; one
of them reports a checkpoint after each. One client writes a value as often as it is answered: what it waits for counts. Needs a
checkout, and etcd.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import grpc

from strata import TrainingOrchestrator
from strata.coordinator.journal.etcd import EtcdJournal, hold, parse_location
from strata.coordinator.journal.space import Space
from strata.core.messages import DatasetId, DatasetRegistered, DatasetSpec, Event
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from tests.rendezvous.etcd_server import EtcdCluster
from tests.service.clients import stub
from tests.support import Coordinator, eventually

WORKERS = 50
APPEND_S = 5.0


def event(number: int) -> Event:
    spec = DatasetSpec(
        dataset_id=DatasetId(f"d{number}"),
        path="/data/a/dataset/of/usual/length",
        format="jsonl",
        total_samples=10,
        shard_size=1,
        shuffle=False,
        seed=0,
    )
    return DatasetRegistered(spec=spec, reason="registered by somebody", at_s=float(number))


def measure_appends(cluster: EtcdCluster, folder: Path) -> None:
    for size in (1, 10, 100, 500, 2_000):
        location = parse_location(f"etcd://{cluster.endpoints}/append-{size}")
        with (
            closing(EtcdJournal(location, Space(folder, reserve_bytes=1))) as journal,
            hold(journal, name="bench"),
        ):
            batch = [event(number) for number in range(size)]
            times_s = []
            began_s = time.perf_counter()
            while time.perf_counter() - began_s < APPEND_S:
                started_s = time.perf_counter()
                journal.append(batch)
                times_s.append(time.perf_counter() - started_s)
            rate = size * len(times_s) / sum(times_s)
            p99_ms = sorted(times_s)[int(len(times_s) * 0.99)] * 1e3
            print(
                f"batches of {size:,}: {rate:,.0f} events/s, {statistics.median(times_s) * 1e3:.1f} ms each "
                f"(p99 {p99_ms:.1f})",
                flush=True,
            )


class Fleet:
    """Workers that meet, whoever leads."""

    def __init__(self, addresses: str) -> None:
        self.rounds = [0] * WORKERS
        self.problems: list[str] = []
        self._stopping = threading.Event()
        self._workers = [TrainingOrchestrator(addresses, job_id="bench") for _ in range(WORKERS)]
        for number, worker in enumerate(self._workers):
            worker.register_worker(f"w{number}")
        for worker in self._workers:
            assert worker.wait_connected()
        self._threads = [
            threading.Thread(target=self._meet, args=(number,), daemon=True) for number in range(WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    def _meet(self, number: int) -> None:
        worker = self._workers[number]
        for step in itertools.count(1):
            if self._stopping.wait(0.2):
                return
            try:
                worker.barrier("bench", step, timeout_s=120)
                if number == 0:
                    worker.notify_checkpoint(f"c{step}", step, path=f"/c/{step}", size_bytes=1)
            except StrataError as error:
                if not self._stopping.is_set():
                    self.problems.append(f"w{number} at {step}: {error}")
                return
            self.rounds[number] = step

    def has_met(self, rounds: int) -> bool:
        return min(self.rounds) >= rounds

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
        for worker in self._workers:
            worker.close()


class Writer:
    """Writes a value again and again, and notes when it was answered."""

    def __init__(self, addresses: list[str]) -> None:
        self.answered_s: list[float] = []
        self._addresses = addresses
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        version = 0
        for address in itertools.cycle(self._addresses):
            with stub(address) as calls, suppress(grpc.RpcError):
                while not self._stopping.is_set():
                    request = pb.SwapValueRequest(key="bench", value=b"x", expected_version=version)
                    version = calls.SwapValue(request, timeout=0.5).version
                    self.answered_s.append(time.monotonic())
                    time.sleep(0.005)
            if self._stopping.wait(0.02):
                return

    def first_after(self, moment_s: float) -> float:
        found: float = eventually(
            lambda: next((at_s for at_s in list(self.answered_s) if at_s > moment_s), None), within_s=60
        )
        return found

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)


def measure_failovers(cluster: EtcdCluster, folder: Path, count: int) -> None:
    journal = f"etcd://{cluster.endpoints}/failover"
    both = [Coordinator(folder / name, "--journal", journal) for name in "ab"]
    with ThreadPoolExecutor() as at_once:
        list(at_once.map(Coordinator.start, both))
    addresses = [each.address for each in both]
    fleet = Fleet(",".join(addresses))
    writer = Writer(addresses)
    try:
        for how in (signal.SIGKILL, signal.SIGSTOP):
            times_s = []
            for _ in range(count):
                writer.first_after(time.monotonic())
                leader = next(each for each in both if each.get("/api/status")["role"] == "leader")
                reached = min(fleet.rounds)
                struck_s = time.monotonic()
                os.kill(leader.pid, how)
                times_s.append(writer.first_after(struck_s + 0.1) - struck_s)
                if how == signal.SIGKILL:
                    leader.kill()
                    leader.start()
                else:
                    os.kill(leader.pid, signal.SIGCONT)
                eventually(
                    partial(fleet.has_met, reached + 3),
                    within_s=60,
                    what=lambda: f"barriers: {fleet.rounds} {fleet.problems}",
                )
            print(
                f"{how.name}, {count} times: median {statistics.median(times_s):.2f} s, "
                f"{min(times_s):.2f} to {max(times_s):.2f}; {min(fleet.rounds)} barriers of {WORKERS} so far, "
                f"problems: {fleet.problems or 'none'}",
                flush=True,
            )
    finally:
        writer.stop()
        fleet.stop()
        for each in both:
            each.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover", description=__doc__)
    parser.add_argument("--failovers", type=int, default=10, help="of each kind (default 10)")
    parser.add_argument(
        "--fsync", action="store_true", help="let etcd wait for its disks, as it does by default"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = EtcdCluster(folder / "etcd", fsync=arguments.fsync)
        with cluster:
            print(f"load average {os.getloadavg()[0]:.1f}, fsync: {arguments.fsync}", flush=True)
            measure_appends(cluster, folder)
            if arguments.failovers:
                measure_failovers(cluster, folder, arguments.failovers)


if __name__ == "__main__":
    main()
