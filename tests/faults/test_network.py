"""A bad network between workers and the coordinator: work continues, every barrier ends once, and nobody is failed by mistake."""

from __future__ import annotations

import itertools
import os
import select
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from strata import TrainingOrchestrator
from tests.faults.healthy import Healthy
from tests.support import Coordinator, eventually
from tests.support_network import network
from tests.support_programs import program
from tests.support_proxy import Proxy

PATIENT = {"STRATA_HEARTBEAT_TIMEOUT": "60", "STRATA_DISCONNECT_GRACE": "30"}
STEPS = 15
LATENT_S = 0.05


def delay(road: Proxy) -> None:
    road.latency_s = LATENT_S


def trickle(road: Proxy) -> None:
    road.trickle_bytes = 7


def resets(road: Proxy) -> None:
    road.reset_after_bytes = 2_000


def silence(road: Proxy) -> None:
    road.stall()


@pytest.mark.parametrize("fault", [delay, trickle, resets, silence])
def test_work_continues_over_a_bad_network(tmp_path: Path, fault: Callable[[Proxy], None]) -> None:
    server = Coordinator(tmp_path / "data", env=PATIENT).start()
    try:
        with Proxy(server.grpc_port) as road, Healthy(server) as healthy:
            # Two addresses, of which the second takes no connections: one that does not answer pings is left in seconds.
            addresses = f"{road.address},127.0.0.1:1" if fault is silence else road.address
            workers = [TrainingOrchestrator(addresses, job_id="bad") for _ in range(3)]
            try:
                incarnations = [
                    worker.register_worker(f"bad-{number}").incarnation
                    for number, worker in enumerate(workers)
                ]
                assert all(worker.wait_connected(60) for worker in workers)
                fault(road)
                orders: dict[int, list[int]] = {step: [] for step in range(STEPS)}

                def work(worker: TrainingOrchestrator) -> None:
                    for step, order in orders.items():
                        order.append(worker.barrier("step", step, timeout_s=120).arrival_order)
                        worker.notify_checkpoint(f"{worker.worker_id}-{step}", step, path="/c", size_bytes=1)

                threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(180)
                assert [sorted(order) for order in orders.values()] == [[0, 1, 2]] * STEPS
                known = {row["id"]: row for row in server.get("/api/workers")}
                assert [known[f"bad-{n}"]["incarnation"] for n in range(3)] == incarnations
                assert fault is not resets or len(road.resets_s) > 3
            finally:
                for worker in workers:
                    worker.close()
            healthy.check()
    finally:
        assert server.stop() == 0
    assert "Traceback" not in "".join(server.output), "".join(server.output)


def test_a_worker_whose_connections_are_reset_is_back_before_it_is_taken_for_lost(tmp_path: Path) -> None:
    """Half a second is what a coordinator waits by default."""
    server = Coordinator(tmp_path / "data", env=PATIENT).start()
    try:
        with Proxy(server.grpc_port) as road:
            worker = TrainingOrchestrator(road.address, job_id="resets")
            try:
                worker.register_worker("resets")
                assert worker.wait_connected(60)
                road.reset_after_bytes = 500
                for step in itertools.count():
                    worker.barrier("step", step, participants=1, timeout_s=60)
                    if len(road.resets_s) > 12:
                        break
            finally:
                worker.close()
            gaps_s = [
                next((at_s for at_s in road.accepted_s if at_s > reset_s), reset_s) - reset_s
                for reset_s in road.resets_s[6:]
            ]
            assert statistics.quantiles(gaps_s, n=4)[0] < 0.4, gaps_s  # Load only adds.
    finally:
        server.stop()


WORKER = """
import sys
from strata import TrainingOrchestrator
worker = TrainingOrchestrator(sys.argv[1], job_id="cut")
first = worker.register_worker("cut").incarnation
assert worker.wait_connected(60)
print("registered", first, flush=True)
for line in sys.stdin:
    try:
        worker.barrier(line.strip(), participants=1, timeout_s=60)
        print("current", worker.is_current, flush=True)
    except Exception as error:
        print(type(error).__name__, getattr(error, "cause", ""), flush=True)
"""


def test_a_machine_that_is_cut_off_is_failed_after_the_timeout_and_not_before(tmp_path: Path) -> None:
    with network(1) as machines:
        server = Coordinator(
            tmp_path / "data",
            "--host",
            "0.0.0.0",
            env={
                "STRATA_TOKEN": "a-secret-of-some-length",
                # What is lost in the cut is sent again after 0.2, 0.6, 1.4, 3 and 6.2 s: it may last a little longer.
                "STRATA_HEARTBEAT_TIMEOUT": "10",
                "STRATA_DISCONNECT_GRACE": "5",
            },
        ).start()
        address = f"{machines.here}:{server.grpc_port}"
        worker = subprocess.Popen(
            [program("ip"), "netns", "exec", machines.namespace(0), sys.executable, "-c", WORKER, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "STRATA_TOKEN": "a-secret-of-some-length"},
        )
        assert worker.stdin is not None
        assert worker.stdout is not None

        def status() -> str:
            _, rows = server.call("GET", "/api/workers", token="a-secret-of-some-length")
            return str(next(row["status"] for row in rows if row["id"] == "cut"))

        try:
            assert worker.stdout.readline() == "registered 1\n"
            machines.cut(0)
            worker.stdin.write("short\n")
            worker.stdin.flush()
            assert not worker_answers_within(worker, 1.5), "nothing gets through"
            machines.heal(0)
            assert worker.stdout.readline() == "current True\n", (
                "a short cut is waited out, and nobody is failed"
            )
            assert status() == "active"
            machines.cut(0)
            eventually(lambda: status() == "failed", within_s=60)
            machines.heal(0)
            worker.stdin.write("long\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "StaleWorker failed\n"
        finally:
            worker.kill()
            worker.wait(30)
            worker.stdin.close()
            worker.stdout.close()
            server.stop()


def worker_answers_within(worker: subprocess.Popen[str], within_s: float) -> bool:
    assert worker.stdout is not None
    return bool(select.select([worker.stdout], [], [], within_s)[0])
