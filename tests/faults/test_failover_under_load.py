"""The leader is killed, and the next one paused, while fifty workers meet, save and ask for tasks, and while a job trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from strata import api
from strata.coordinator.journal.etcd import EtcdJournal, parse_location
from strata.coordinator.journal.space import Space
from strata.core.events import BarrierReleased
from strata.errors import StrataError
from strata.launch.sample_job import SampleJob
from strata.launch.torchrun import TorchrunSpec
from strata.shared_memory import forget_jobs
from tests.rendezvous.etcd_server import EtcdCluster
from tests.service.clients import metric
from tests.service.fleet import Fleet
from tests.service.relay import RelayProcess
from tests.service.test_failover import SLOW_MACHINE_S, Pair, status, whenever
from tests.support import eventually

MACHINES = 2
RANKS = 12
"""Of each machine, whose agent speaks for them."""
ALONE = 26
WORKERS = MACHINES * RANKS + ALONE
TASK = {"name": "waits", "type": "training", "worker_count": 1, "config": {"steps": 1}}


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


class Work:
    """All workers meet at one barrier after the other; after each one of them saves, and somebody submits a task."""

    def __init__(self, groups: dict[Fleet, list[str]], urls: str) -> None:
        self._groups = groups
        self._urls = urls
        self._stopping = threading.Event()
        self.met = 0
        self.orders: list[list[int]] = []
        self.generations: set[int] = set()
        self.checkpoints: list[str] = []
        self.tasks: list[str] = []
        self.problems: list[str] = []
        self._threads = [threading.Thread(target=each) for each in (self._meet, self._submit)]

    def __enter__(self) -> Work:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * SLOW_MACHINE_S)

    def _meet(self) -> None:
        fleet, (saver, *_) = next(iter(self._groups.items()))
        try:
            while not self._stopping.is_set():
                step = self.met + 1
                waiting = [
                    each.begin(name, "barrier", "step", step, participants=WORKERS, timeout_s=120.0)
                    for each, names in self._groups.items()
                    for name in names
                ]
                results = [each.result(2 * SLOW_MACHINE_S).value for each in waiting]
                self.orders.append(sorted(result["arrival_order"] for result in results))
                self.generations |= {result["generation"] for result in results}
                saved = f"saved-{step}"
                fleet.call(saver, "notify_checkpoint", saved, step, path="/c", size_bytes=1)
                self.checkpoints.append(saved)
                self.met = step
        except Exception as error:
            self.problems.append(f"barrier {self.met + 1}: {error!r}")

    def _submit(self) -> None:
        while not self._stopping.wait(0.2):
            try:
                self.tasks.append(api.post(self._urls, "/api/tasks", TASK)["task_id"])
            except StrataError as error:
                if not isinstance(error, api.Unreachable):  # Nobody knows whether that one was taken.
                    self.problems.append(f"task: {error}")

    def until_met(self, more: int) -> None:
        reached = self.met + more
        eventually(
            lambda: self.met >= reached or self.problems,
            within_s=3 * SLOW_MACHINE_S,
            what=lambda: f"{self.met} barriers, not {reached}",
        )
        assert self.problems == []


@pytest.mark.timeout(600)
def test_fifty_workers_lose_nothing_and_meet_once_whoever_leads(etcd: EtcdCluster, tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = Pair(tmp_path, etcd.endpoints, stack)
        addresses = ",".join(each.address for each in pair.both)
        groups: dict[Fleet, list[str]] = {}
        for machine in range(MACHINES):
            relay = RelayProcess(tmp_path / f"sessions-{machine}")
            stack.callback(relay.close)
            fleet = stack.enter_context(Fleet(addresses, env={"STRATA_SESSIONS": str(relay.path)}))
            groups[fleet] = [f"m{machine}-{rank}" for rank in range(RANKS)]
        groups[stack.enter_context(Fleet(addresses))] = [f"alone-{number}" for number in range(ALONE)]
        incarnations = {}
        for fleet, names in groups.items():
            for answer in fleet.register(*names):
                incarnations[answer["worker_id"]] = answer["incarnation"]

        with Work(groups, ",".join(each.url for each in pair.both)) as work:
            work.until_met(2)
            first = pair.leader()
            second = pair.other(first)
            first.kill()
            work.until_met(3)
            eventually(partial(pair.is_led_by, second), within_s=SLOW_MACHINE_S, what="the other leads")
            first.start()
            submitted = len(work.tasks)
            eventually(lambda: len(work.tasks) > submitted, within_s=SLOW_MACHINE_S, what="tasks are taken")

            os.kill(second.pid, signal.SIGSTOP)
            work.until_met(3)
            eventually(partial(pair.is_led_by, first), within_s=SLOW_MACHINE_S, what="the other leads")
            os.kill(second.pid, signal.SIGCONT)
            eventually(
                lambda: status(second).get("led_by") == first.address,
                within_s=SLOW_MACHINE_S,
                what="it follows",
            )
            work.until_met(2)
        assert work.problems == []
        attached = 'strata_grpc_requests_total{method="Session.attach"}'
        assert metric(first.url, attached) >= MACHINES * RANKS, "agents speak for their workers again"

        # Every barrier was released once, to everybody, in one generation.
        assert work.orders == [list(range(WORKERS))] * work.met
        assert len(work.generations) == 1
        released = releases(pair.journal, tmp_path)
        assert released == Counter(dict.fromkeys(range(1, len(released) + 1), 1))
        assert len(released) >= work.met

        # Nothing that was acknowledged is lost, and nobody was taken for another.
        assert {row["id"] for row in first.get("/api/checkpoints")} >= set(work.checkpoints)
        assert {row["id"] for row in first.get("/api/tasks")} >= set(work.tasks)
        rows = {row["id"]: row for row in first.get("/api/workers")}
        assert {name: row["incarnation"] for name, row in rows.items()} == incarnations
        assert {row["status"] for row in rows.values()} <= {"active", "training"}


def releases(journal: str, folder: Path) -> Counter[int]:
    """How often each step's barrier was released, by the journal's own account."""
    reading = EtcdJournal(parse_location(journal), Space(folder, reserve_bytes=1 << 20))
    try:
        return Counter(event.step for event in reading.load() if isinstance(event, BarrierReleased))
    finally:
        reading.close()


@pytest.mark.timeout(600)
def test_training_does_not_stop_while_nobody_leads(etcd: EtcdCluster, tmp_path: Path) -> None:
    """Under an agent that speaks for its workers. Both coordinators are paused, so that nobody can lead."""
    name = f"trains-on-{os.getpid()}"
    job = SampleJob(
        folder=tmp_path,
        name=name,
        workers=2,
        steps=100_000,
        text_bytes=120_000,
        width=32,
        save_every=1_000_000,
    )
    job.prepare()
    with ExitStack() as stack:
        stack.callback(forget_jobs, name)
        pair = Pair(tmp_path, etcd.endpoints, stack)
        both = ",".join(each.address for each in pair.both)
        spec: TorchrunSpec = job.torchrun(rdzv_backend="strata", rdzv_endpoint=both, coordinator=both)
        output = tmp_path / "job.log"
        with output.open("wb") as file:
            _, *words = spec.command(log_dir=tmp_path / "torchrun")
            agent = subprocess.Popen([sys.executable, *words], env=spec.variables(), stdout=file, stderr=file)
        stack.callback(end, agent)

        def step() -> int:
            assert agent.poll() is None, output.read_text()
            return max(map(int, re.findall(r"\bstep[ =](\d+)", output.read_text())), default=0)

        def workers() -> dict[str, tuple[int, str]]:
            rows = whenever(lambda: pair.leader().get("/api/workers"))
            return {row["id"]: (row["incarnation"], row["status"]) for row in rows}

        eventually(lambda: step() > 0, within_s=2 * SLOW_MACHINE_S, what=output.read_text)
        eventually(lambda: len(workers()) == 2, within_s=SLOW_MACHINE_S)
        before = {name: incarnation for name, (incarnation, _) in workers().items()}
        for each in pair.both:
            os.kill(each.pid, signal.SIGSTOP)
        reached = step()
        eventually(lambda: step() >= reached + 50, within_s=2 * SLOW_MACHINE_S, what="it trains on")
        for each in pair.both:
            os.kill(each.pid, signal.SIGCONT)
        eventually(
            lambda: [state for _, state in workers().values()] == ["training"] * 2,
            within_s=2 * SLOW_MACHINE_S,
            what="they report again",
        )
        assert {name: incarnation for name, (incarnation, _) in workers().items()} == before
        assert whenever(lambda: pair.leader().get("/api/recoveries")) == []


def end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(SLOW_MACHINE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait(30)
