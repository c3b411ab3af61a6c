"""etcd in trouble beside coordinators and workers: out of space, a member cut off, the leader cut off from it in one direction."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata import TrainingOrchestrator
from strata.coordinator.journal.etcd import EtcdJournal, hold, parse_location
from strata.coordinator.journal.protocol import JournalFull
from strata.coordinator.journal.space import Space
from strata.core.messages import ValueSwapped
from strata.etcd import encode
from strata.rpc import coordinator_pb2 as pb
from tests.rendezvous.etcd_server import EtcdCluster, EtcdServer
from tests.service.clients import stub
from tests.service.test_failover import SLOW_MACHINE_S, Load, Pair, role, status
from tests.support import eventually
from tests.support_network import network
from tests.support_proxy import Proxy

MB = 1 << 20
QUOTA_BYTES = 32 * MB
TIMEOUT_S = 6.0
RESERVE = {"STRATA_DISK_RESERVE_MB": "16"}
STEADY = {"STRATA_LEADER_LEASE": "10"}
"""Where the leader is to stay: etcd may be busy for a while, and so may this machine."""


class SmallEtcd(EtcdServer):
    """A member with little space, which somebody else fills."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder, options=[f"--quota-backend-bytes={QUOTA_BYTES}"])
        self._pieces = 0

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"http://{self.endpoint}/v3/{path}", data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def fill_nearly(self) -> None:
        """Less than a quarter is left, and more than etcd can have written since it last said how much there is."""
        while int(self.ask("maintenance/status", {})["dbSize"]) < QUOTA_BYTES * 3 // 4 + MB:
            self._put()

    def fill(self) -> None:
        """Until etcd refuses."""
        while True:
            try:
                self._put()
            except urllib.error.HTTPError as refusal:
                with refusal:
                    if b"database space exceeded" not in refusal.read():
                        raise
                return

    def _put(self) -> None:
        self._pieces += 1
        value = encode(b"x" * (256 << 10))
        self.ask("kv/put", {"key": encode(f"/others/{self._pieces}"), "value": value})

    def clear(self) -> None:
        """As docs/operating/several-coordinators.md says."""
        answer = self.ask("kv/deleterange", {"key": encode("/others/"), "range_end": encode("/others0")})
        self.ask("kv/compaction", {"revision": answer["header"]["revision"], "physical": True})
        self.ask("maintenance/defragment", {})
        for alarm in self.ask("maintenance/alarm", {"action": "GET"}).get("alarms", ()):
            self.ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallEtcd]:
    made = SmallEtcd(tmp_path / "etcd")
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("with_alarm", [False, True], ids=["nearly", "with etcd's alarm"])
def test_etcd_without_space_refuses_changes_keeps_everybody_and_resumes(
    small: SmallEtcd, tmp_path: Path, with_alarm: bool
) -> None:
    with ExitStack() as stack:
        patience = {"STRATA_HEARTBEAT_TIMEOUT": f"{TIMEOUT_S:g}"}
        pair = Pair(tmp_path, small.endpoint, stack, **patience, **RESERVE, **STEADY)
        leader = pair.leader()
        workers = [TrainingOrchestrator(leader.address, job_id="full") for _ in range(2)]
        for number, worker in enumerate(workers):
            stack.callback(worker.close)
            worker.register_worker(f"full-{number}")
            assert worker.wait_connected(60)
        before = {row["id"]: row["incarnation"] for row in leader.get("/api/workers")}
        small.fill() if with_alarm else small.fill_nearly()
        eventually(lambda: leader.get("/api/status")["storage"]["is_full"], within_s=SLOW_MACHINE_S)
        full_s = time.monotonic()

        def refusal() -> str:
            with stub(leader.address) as calls, pytest.raises(grpc.RpcError) as caught:
                calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="refused"), timeout=30)
            return str(caught.value.details())

        # It may have found the space short before there was an alarm.
        eventually(lambda: ("etcdctl alarm disarm" in refusal()) == with_alarm, within_s=SLOW_MACHINE_S)
        assert f"etcd at {small.endpoint} has no space left" in refusal()
        assert "etcdctl defrag" in refusal()
        code, answer = leader.post("/api/quarantine", {"host": "h", "reason": "r"})
        assert (code, answer["code"]) == (507, "storage_full"), answer

        # Arrivals wait, heartbeats count: nobody is failed however long it lasts.
        released: list[int] = []
        meeting = [
            threading.Thread(
                target=lambda each=each: released.append(each.barrier("b", 1, timeout_s=120).arrival_order)
            )
            for each in workers
        ]
        for thread in meeting:
            thread.start()
        time.sleep(max(0.0, full_s + TIMEOUT_S + 1.0 - time.monotonic()))  # The fault itself.
        rows = leader.get("/api/workers")
        assert {row["id"]: row["incarnation"] for row in rows} == before
        assert "failed" not in {row["status"] for row in rows}
        assert released == []

        small.clear()
        for thread in meeting:
            thread.join(SLOW_MACHINE_S)
        assert sorted(released) == [0, 1]
        with stub(leader.address) as calls:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="accepted"), timeout=30)
        eventually(lambda: pair.is_led_by(leader), within_s=SLOW_MACHINE_S, what="it leads as before")
        output = "".join(leader.output)
        assert output.count("has no space left") == 1, output
        assert "no longer leads" not in output, output


def test_an_append_waits_for_space_and_is_there_once(small: SmallEtcd, tmp_path: Path) -> None:
    def event(number: int) -> ValueSwapped:
        return ValueSwapped(key="k", body=b"x", version=number, reason="swapped", at_s=0.0)

    location = parse_location(f"etcd://{small.endpoint}/waits")
    journal = EtcdJournal(location, Space(tmp_path, reserve_bytes=MB))
    journal.is_led = lambda: True
    with hold(journal, name="test"):
        journal.append([event(1)])
        small.fill()
        appending = threading.Thread(target=lambda: journal.append([event(2)]))
        appending.start()
        eventually(lambda: journal.space.is_blocked, within_s=SLOW_MACHINE_S)
        assert (journal.space.is_full, journal.space.is_closed) == (True, True)
        small.clear()
        appending.join(SLOW_MACHINE_S)
        assert not journal.space.is_blocked
        journal.space.look()
        assert (journal.space.is_full, journal.space.is_closed) == (False, False)
        journal.append([event(3)])
        # A snapshot does not wait: the events that it would have summed up are there.
        small.fill()
        with pytest.raises(JournalFull, match="has no space left"):
            journal.snapshot([event(3)])
        small.clear()
        found = EtcdJournal(location, Space(tmp_path, reserve_bytes=MB))
        assert [each.version for each in found.load() if isinstance(each, ValueSwapped)] == [1, 2, 3]
        found.close()
    journal.close()


@pytest.mark.parametrize("way", ["asked", "answered"])
def test_a_leader_that_is_cut_off_from_etcd_in_one_direction_steps_down_and_changes_nothing_more(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "etcd").mkdir()
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    with ExitStack() as stack:
        stack.callback(etcd.stop)
        road = stack.enter_context(Proxy(etcd.port))
        pair = Pair(tmp_path, (road.address, etcd.endpoint), stack)
        old, new = pair.both
        if pair.leader() is not old:
            new.stop()
            new._hold_ports()
            eventually(lambda: pair.is_led_by(old), within_s=SLOW_MACHINE_S, what="the first leads")
            new.start()
        with Load(pair.both) as load:
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            road.swallows = frozenset({way})
            eventually(lambda: pair.is_led_by(new), within_s=SLOW_MACHINE_S, what="the other leads")
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            assert role(old) != "leader"
            road.swallows = frozenset()
            road.cut()
            eventually(
                lambda: status(old).get("led_by") == new.address, within_s=SLOW_MACHINE_S, what="it follows"
            )
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
        load.check(new)
        eventually(
            lambda: status(old).get("position") == new.get("/api/status")["position"],
            within_s=SLOW_MACHINE_S,
            what="caught up",
        )


def test_a_member_of_etcd_is_cut_off_and_nobody_notices(tmp_path: Path) -> None:
    """The one that leads etcd, with whom the coordinator may be speaking: nothing refuses, it is only silent."""
    with (
        network(3) as machines,
        EtcdCluster(tmp_path / "etcd", network=machines) as etcd,
        ExitStack() as stack,
    ):
        pair = Pair(tmp_path, etcd.endpoints, stack, **STEADY)
        leader = pair.leader()
        with Load(pair.both) as load:
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            lost = etcd.members.index(etcd.leader())
            machines.cut(lost)
            for _ in range(20):
                load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            machines.heal(lost)
            eventually(etcd.members[lost].healthy, within_s=SLOW_MACHINE_S, what="it is back")
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
        load.check(leader)
        output = "".join(leader.output)
        assert "no longer leads" not in output, output
