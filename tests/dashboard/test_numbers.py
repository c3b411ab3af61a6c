"""Several runs at once, a stopped run, a worker's GPU, and events, against a real coordinator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from strata import TrainingOrchestrator
from strata.rpc import coordinator_pb2 as pb
from tests.dashboard.browser import Browser
from tests.service.clients import RawSession, channel, stub
from tests.support import Coordinator, eventually

pytestmark = pytest.mark.browser


def points(coordinator: Coordinator, job: str) -> int:
    """Seconds in the coordinator's history with a loss of this job."""
    found = coordinator.get(f"/api/metrics/history?job_id={job}")["series"]["loss"]["values"]
    return sum(value is not None for value in found)


@contextmanager
def beating(session: RawSession, beat: pb.HeartbeatRequest) -> Iterator[None]:
    """However long a page takes: a worker that is silent for half a minute is failed."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(1.0):
            session.send(heartbeat=beat)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_two_live_runs_keep_both_histories_and_one_that_stops_its_last_values(
    watched: Coordinator, page: Browser
) -> None:
    with (
        TrainingOrchestrator(watched.address, job_id="both-1") as one,
        TrainingOrchestrator(watched.address, job_id="both-2") as two,
    ):
        for number, worker in enumerate((one, two), start=1):
            worker.register_worker(f"both-{number}-rank0")
            worker.heartbeat(40 + number, 0, state="training", metrics={"loss": 1.75 * number})
        for number in (1, 2):
            eventually(lambda job=f"both-{number}": points(watched, job) >= 3, within_s=60)  # type: ignore[misc]
        page.open("/")
        # Both histories are there on a page opened later, and stay when only one run has events.
        for number in (1, 2):
            page.see(css=f"svg[aria-label='Loss of both-{number} over time']")
        for step in range(1, 4):
            one.notify_checkpoint(f"both-{step}", step, 0, path=f"/c/{step}", tiers=["nvme"])
        page.see("checkpoint at step 3 completed", css="[aria-label=Events] li")
        for number in (1, 2):
            assert page.count(css=f"svg[aria-label='Loss of both-{number} over time']") == 1
        two.deregister()
        page.open("/runs/both-2")
        page.see("3.5", css="section:has(h2:text-is('Loss')) p")
        page.see("42", css="section:has(h2:text-is('Step')) p")
        page.see("ended", css="header *")
        one.deregister()


def test_saves_are_one_line_of_the_events_and_problems_are_found_by_a_filter(
    watched: Coordinator, page: Browser
) -> None:
    with TrainingOrchestrator(watched.address, job_id="saving") as worker:
        worker.register_worker("saving-rank0")
        for step in range(1, 6):
            worker.notify_checkpoint(f"saving-{step}", step, 0, path=f"/c/{step}", tiers=["nvme"])
        worker.notify_checkpoint("saving-6", 6, 0, path="/c/6", status="failed", reason="no space left")
        page.open("/runs/saving")
        lines = "[aria-label=Events] li"
        page.see("checkpoint at step 5 completed", css=lines)
        page.see("4 earlier checkpoints", css=lines)
        assert page.count(css=f"{lines}:has-text('completed')") == 1
        page.click("button", "Problems")
        page.miss("4 earlier checkpoints", css=lines)
        page.see("no space left", css=lines)
        page.see("error: ", css=lines)
        page.click("button", "Workers", inside={"css": "[aria-label='Filter events']"})
        page.see("saving-rank0", css=lines)
        page.miss("no space left", css=lines)
        worker.deregister()


def test_a_worker_with_a_gpu_shows_what_it_used_over_time(watched: Coordinator, page: Browser) -> None:
    gpu = pb.GpuUsage(
        index=0, utilization_percent=87.0, memory_used_bytes=30 << 30, memory_total_bytes=80 << 30
    )
    beat = pb.HeartbeatRequest(
        status=pb.WorkerStatus(state="training", current_step=5, metrics={"loss": 1.0, "step_time_s": 0.25}),
        resources=pb.ResourceUsage(cpu_percent=50.0, gpu_usage=[gpu]),
    )
    with stub(watched.address) as calls, channel(watched.address) as own:
        request = pb.RegisterWorkerRequest(worker_id="with-gpu-rank0", job_id="with-gpu", gpu_count=1)
        incarnation = calls.RegisterWorker(request).incarnation
        session = RawSession(own).hello("with-gpu-rank0", incarnation)
        session.wait_for("welcome")
        session.send(heartbeat=beat)

        def recorded() -> bool:
            history = watched.get("/api/metrics/history?job_id=with-gpu&worker_id=with-gpu-rank0")
            return 87.0 in history["series"]["gpu_utilization"]["values"]

        with beating(session, beat):
            eventually(recorded, within_s=60)
            page.open("/workers?worker=with-gpu-rank0")
            for chart in ("GPU utilization", "GPU memory", "Step time"):
                page.see(css=f"[role=dialog] figure[aria-label='{chart} over the last hour']")
            page.see("87 %", css="[role=dialog] *")
            page.see("30 GiB of 80 GiB", css="[role=dialog] span")
            page.leave()
        calls.DeregisterWorker(
            pb.DeregisterWorkerRequest(worker_id="with-gpu-rank0", incarnation=incarnation)
        )
        session.close()
