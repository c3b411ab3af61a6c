"""A client that means no good, in a process of its own: it floods a coordinator in one way until it is killed.

Prints one line once it is under way.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc

OUTSTANDING = 200


@contextmanager
def flooding(address: str, kind: str) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.flood", address, kind], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        yield
        assert process.poll() is None, "the flood ended by itself"
    finally:
        process.kill()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def heartbeats(calls: Any) -> None:
    def messages() -> Iterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=pb.Hello(worker_id="flood"))
        while True:
            yield pb.WorkerMessage(heartbeat=pb.HeartbeatRequest())

    for _ in calls.Session(messages()):
        pass


def logs(calls: Any) -> None:
    batch = pb.LogBatch(entries=[pb.LogEntry(timestamp=1.0, level="info", message="x" * 100)] * 2_000)

    def messages() -> Iterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=pb.Hello(worker_id="flood"))
        while True:
            yield pb.WorkerMessage(logs=batch)

    for _ in calls.Session(messages()):
        pass


def unary(calls: Any) -> None:
    pending = [_heartbeat(calls) for _ in range(OUTSTANDING)]
    for turn in itertools.cycle(range(OUTSTANDING)):
        pending[turn].result()
        pending[turn] = _heartbeat(calls)


def deaf(calls: Any) -> None:
    """Asks for thousands of answers and reads none of them."""

    def messages() -> Iterator[pb.WorkerMessage]:
        yield pb.WorkerMessage(hello=pb.Hello(worker_id="flood"))
        for number in itertools.count():
            request = pb.WaitBarrierRequest(
                barrier_id=f"deaf-{number}", expected_participants=1, call_id=number.to_bytes(8, "big")
            )
            yield pb.WorkerMessage(barrier=request)

    held = calls.Session(messages())
    time.sleep(3600)
    held.cancel()


def _heartbeat(calls: Any) -> Any:
    return calls.Heartbeat.future(pb.HeartbeatRequest(worker_id="flood"))


def main() -> None:
    address, kind = sys.argv[1:]
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    with grpc.insecure_channel(address, options=small_window) as channel:
        calls: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="flood", job_id="flood"))
        print("under way", flush=True)
        {"heartbeats": heartbeats, "logs": logs, "unary": unary, "deaf": deaf}[kind](calls)


if __name__ == "__main__":
    main()
