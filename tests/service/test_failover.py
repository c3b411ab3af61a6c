"""Several coordinators over a real etcd: whoever leads may be killed or paused at any time, and nothing acknowledged is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from strata.rpc import coordinator_pb2 as pb
from tests.rendezvous.etcd_server import EtcdCluster
from tests.service.clients import stub, trailers_of
from tests.support import Coordinator, eventually

SLOW_MACHINE_S = 60.0
"""What must happen does so, however busy the machine is. How long it takes elsewhere: `python -m benchmarks.failover`."""

_prefixes = (f"/t{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


class Pair:
    """Two coordinators over one journal."""

    def __init__(self, folder: Path, etcd: str | tuple[str, str], stack: ExitStack, **env: str) -> None:
        """`etcd`: its endpoints, for both or for each."""
        ways = (etcd, etcd) if isinstance(etcd, str) else etcd
        prefix = next(_prefixes)
        self.journal = f"etcd://{ways[1]}{prefix}"
        self.both = [
            Coordinator(
                folder / name,
                "--journal",
                f"etcd://{way}{prefix}",
                env={"STRATA_HEARTBEAT_TIMEOUT": "600", **env},
            )
            for name, way in zip("ab", ways, strict=True)
        ]
        for each in self.both:
            stack.callback(self._stop, each)
        with ThreadPoolExecutor() as at_once:
            list(at_once.map(Coordinator.start, self.both))
        self.leader()

    @staticmethod
    def _stop(each: Coordinator) -> None:
        if each.process is not None and each.process.poll() is None:
            os.kill(each.pid, signal.SIGCONT)
        each.stop()
        assert "Traceback" not in "".join(each.output), "".join(each.output)

    def leader(self, *, within_s: float = SLOW_MACHINE_S) -> Coordinator:
        found: Coordinator = eventually(
            lambda: next((each for each in self.both if role(each) == "leader"), None),
            within_s=within_s,
            what="one of them leads",
        )
        return found

    def is_led_by(self, one: Coordinator) -> bool:
        return role(one) == "leader"

    def other(self, one: Coordinator) -> Coordinator:
        return self.both[1 - self.both.index(one)]


def status(coordinator: Coordinator) -> dict[str, Any]:
    """Empty for one that is not there, or paused."""
    if coordinator.process is None or coordinator.process.poll() is not None:
        return {}
    try:
        with urllib.request.urlopen(coordinator.url + "/api/status", timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


def knows_of_nobody(coordinator: Coordinator) -> bool:
    found = status(coordinator)
    return bool(found) and (found["role"], found["led_by"]) == ("standby", "")


def role(coordinator: Coordinator) -> str:
    return str(status(coordinator).get("role", ""))


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:
        # With the shortest lease, a leader that a busy machine keeps waiting for two seconds leads no longer.
        yield lambda endpoints, **env: Pair(tmp_path, endpoints, stack, **{"STRATA_LEADER_LEASE": "6", **env})


class Load:
    """Clients that write a value each, as fast as they are answered, and remember what was acknowledged."""

    def __init__(self, coordinators: list[Coordinator], *, clients: int = 6) -> None:
        self._addresses = [each.address for each in coordinators]
        self._stopping = threading.Event()
        self.acknowledged: dict[str, int] = {}
        """By key: the newest value, which counts up."""
        self.answered_s: list[float] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._write, args=(f"key{number}",), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def until_answered(self, *, after_s: float, within_s: float) -> float:
        """When the first answer came after a moment."""
        found: float = eventually(
            lambda: next((at_s for at_s in reversed(self.answered_s) if at_s > after_s), None),
            within_s=within_s,
            what="an answer",
        )
        return min(at_s for at_s in self.answered_s if at_s > after_s) if found else found

    def _write(self, key: str) -> None:
        addresses = itertools.cycle(self._addresses)
        version = count = 0
        while not self._stopping.is_set():
            with stub(next(addresses)) as calls:
                try:
                    while not self._stopping.is_set():
                        request = pb.SwapValueRequest(
                            key=key, value=str(count + 1).encode(), expected_version=version
                        )
                        answer = calls.SwapValue(request, timeout=1.0)
                        if answer.swapped:
                            count += 1
                            version = answer.version
                            self.acknowledged[key] = count
                            self.answered_s.append(time.monotonic())
                        else:  # An attempt whose answer was lost has counted, or this one has lost an answer.
                            found = int(answer.value or b"0")
                            if found < count or found > count + 1:
                                self.errors.append(f"{key}: {count} was acknowledged, and {found} is there")
                            count, version = max(count, found), answer.version
                except grpc.RpcError as error:
                    if error.code() not in (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        grpc.StatusCode.CANCELLED,
                    ):
                        self.errors.append(f"{key}: {error.code()} {error.details()}")
                    time.sleep(0.05)  # Nobody leads for a moment: this is what a client does.

    def check(self, coordinator: Coordinator) -> None:
        assert not self.errors
        with stub(coordinator.address) as calls:
            for key, count in self.acknowledged.items():
                found = int(calls.ReadValue(pb.ReadValueRequest(key=key), timeout=30).value)
                assert count <= found <= count + 1, key


def test_standby_serves_reading_and_says_who_leads(etcd: EtcdCluster, pairs: Callable[..., Pair]) -> None:
    pair = pairs(etcd.endpoints, STRATA_LEADER_LEASE="30")  # Nobody is to take over.
    leader = pair.leader()
    standby = pair.other(leader)
    with stub(leader.address) as calls:
        calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="w"), timeout=30)
        calls.RegisterDataset(
            pb.RegisterDatasetRequest(
                dataset_id="d", path="/d", format="jsonl", total_samples=10, shard_size=2
            ),
            timeout=30,
        )
    with stub(standby.address) as calls:
        # Whatever was acknowledged before is in the first answer.
        assert whenever(lambda: listed(calls)) == ["d"]
        for refused in (
            lambda: calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="x"), timeout=30),
            lambda: next(iter(calls.Session(iter([pb.WorkerMessage()]), timeout=30))),
            lambda: next(iter(calls.Presence(iter(()), timeout=30))),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                refused()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert f"is a standby; {leader.address} leads" in str(caught.value.details())
            assert trailers_of(caught.value)["strata-leader"] == leader.address
    assert [worker["id"] for worker in standby.get("/api/workers")] == ["w"]
    found = standby.get("/api/status")
    assert (found["role"], found["leader"], found["led_by"], found["behind"]) == (
        "standby",
        False,
        leader.address,
        0,
    )
    assert found["position"] == leader.get("/api/status")["position"] > 0
    answer = unredirected("POST", standby.url + "/api/tasks?x=1")
    assert answer.code == 307
    assert answer.headers["Location"] == f"{leader.url}/api/tasks?x=1"
    assert answer.headers["Strata-Leader"] == leader.url
    assert answer.headers["Strata-Role"] == "standby"
    assert json.load(answer)["code"] == "standby"
    answer.close()
    # Tokens of tasks that one has started count with the other.
    assert len({(each.data_dir / "task-tokens.key").read_bytes() for each in pair.both}) == 1
    with urllib.request.urlopen(leader.url + "/api/health", timeout=30) as healthy:
        assert healthy.headers["Strata-Role"] == "leader"


def listed(calls: Any) -> list[str]:
    """A standby that takes seconds to catch up says that it is away, and nothing that is old."""
    try:
        answer = calls.ListDatasets(pb.ListDatasetsRequest(), timeout=30)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        raise ConnectionError(error.details()) from None
    return [each.dataset_id for each in answer.datasets]


def unredirected(method: str, url: str) -> urllib.error.HTTPError:
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    request = urllib.request.Request(
        url, data=b"{}", method=method, headers={"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.build_opener(Stay).open(request, timeout=30)
    return caught.value


def whenever(ask: Callable[[], Any]) -> Any:
    """The answer of a coordinator that may be away for a moment, because it was deposed and starts again as a standby."""

    def answered() -> list[Any]:
        try:
            return [ask()]
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, ConnectionError):
            return []

    (answer,) = eventually(answered, within_s=SLOW_MACHINE_S, what="an answer")
    return answer


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], ids=lambda how: how.name)
def test_standby_takes_over_and_nothing_acknowledged_is_lost(
    etcd: EtcdCluster, pairs: Callable[..., Pair], how: signal.Signals
) -> None:
    pair = pairs(etcd.endpoints)
    old = pair.leader()
    new = pair.other(old)
    with Load(pair.both) as load:
        load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
        struck_s = time.monotonic()
        os.kill(old.pid, how)
        if how != signal.SIGTERM:  # What was under way has been answered by then, or never will be.
            load.until_answered(after_s=struck_s + 0.2, within_s=SLOW_MACHINE_S)
        eventually(lambda: role(new) == "leader", within_s=SLOW_MACHINE_S, what="the other leads")
        if how == signal.SIGSTOP:
            os.kill(old.pid, signal.SIGCONT)
        else:
            assert old.process is not None
            old.process.wait(SLOW_MACHINE_S)
            old.start()
        eventually(
            lambda: status(old).get("led_by") == new.address, within_s=SLOW_MACHINE_S, what="it follows"
        )
        load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
    load.check(new)
    position = new.get("/api/status")["position"]
    eventually(lambda: status(old).get("position") == position, within_s=SLOW_MACHINE_S, what="caught up")
    assert new.get("/api/status")["role"] == "leader"


def test_barrier_is_released_once_whoever_leads(etcd: EtcdCluster, pairs: Callable[..., Pair]) -> None:
    """Two workers meet at a hundred barriers, each by the same call until it is answered; the leader is paused in between."""
    pair = pairs(etcd.endpoints)
    incarnations = {}
    with stub(pair.leader().address) as calls:
        for name in ("w0", "w1"):
            incarnations[name] = calls.RegisterWorker(
                pb.RegisterWorkerRequest(worker_id=name), timeout=30
            ).incarnation
    outcomes: dict[str, list[tuple[int, bool]]] = {"w0": [], "w1": []}

    def meet(name: str) -> None:
        addresses = itertools.cycle([each.address for each in pair.both])
        step = 0
        while step < 100:
            with stub(next(addresses)) as calls, suppress(grpc.RpcError):
                while step < 100:
                    answer = calls.WaitBarrier(
                        pb.WaitBarrierRequest(
                            barrier_id="b",
                            worker_id=name,
                            incarnation=incarnations[name],
                            step=step,
                            call_id=f"{name}-{step}".encode(),
                            expected_participants=2,
                        ),
                        timeout=1.0,
                    )
                    outcomes[name].append((step, answer.released))
                    step += 1
            time.sleep(0.05)

    def has_met(count: int) -> bool:
        return len(outcomes["w0"]) >= count

    threads = [threading.Thread(target=meet, args=(name,), daemon=True) for name in outcomes]
    for thread in threads:
        thread.start()
    for reached in (10, 50):
        eventually(partial(has_met, reached), within_s=SLOW_MACHINE_S, what="barriers")
        old = pair.leader()
        os.kill(old.pid, signal.SIGSTOP)
        eventually(partial(pair.is_led_by, pair.other(old)), within_s=SLOW_MACHINE_S, what="the other leads")
        os.kill(old.pid, signal.SIGCONT)
        eventually(partial(pair.is_led_by, pair.other(old)), within_s=SLOW_MACHINE_S, what="it stays so")
    for thread in threads:
        thread.join(120)
    assert outcomes["w0"] == outcomes["w1"] == [(step, True) for step in range(100)]


def test_one_member_of_etcd_is_killed_and_nobody_notices(tmp_path: Path, pairs: Callable[..., Pair]) -> None:
    with EtcdCluster(tmp_path / "etcd") as own:
        pair = pairs(own.endpoints, STRATA_LEADER_LEASE="30")
        leader = pair.leader()
        with Load(pair.both) as load:
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            own.leader().kill()  # The one that leads etcd: the worst of them.
            load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
            # It has had an election of its own by the time that writes are answered again.
            for _ in range(20):
                load.until_answered(after_s=time.monotonic(), within_s=SLOW_MACHINE_S)
        load.check(leader)
        output = "".join(leader.output)
        assert "no longer leads" not in output, output


@pytest.mark.timeout(300)
def test_majority_of_etcd_is_lost_and_all_is_readable_until_it_is_back(
    tmp_path: Path, pairs: Callable[..., Pair]
) -> None:
    with EtcdCluster(tmp_path / "etcd") as own:
        pair = pairs(own.endpoints)
        leader = pair.leader()
        with stub(leader.address) as calls:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="before"), timeout=30)
        eventually(
            lambda: status(pair.other(leader)).get("position") == leader.get("/api/status")["position"],
            within_s=SLOW_MACHINE_S,
            what="the standby has it",
        )
        lost = own.members[:2]
        for member in lost:
            member.kill()
        for each in pair.both:
            # Three lengths of the lease, and a start from what one member has.
            eventually(partial(knows_of_nobody, each), within_s=2 * SLOW_MACHINE_S, what="nobody leads")
            found = whenever(partial(each.get, "/api/workers"))
            assert [worker["id"] for worker in found] == ["before"]
            answer = whenever(partial(unredirected, "POST", each.url + "/api/tasks"))
            assert (answer.code, answer.headers["Retry-After"]) == (503, "1")
            assert "no coordinator leads" in json.load(answer)["message"]
            answer.close()
            with stub(each.address) as calls, pytest.raises(grpc.RpcError) as caught:
                calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="refused"), timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "strata-leader" not in trailers_of(caught.value)
        for member in lost:
            member.begin()
        with stub(pair.leader().address) as calls:
            calls.RegisterWorker(pb.RegisterWorkerRequest(worker_id="after"), timeout=30)
        found = [worker["id"] for worker in pair.leader().get("/api/workers")]
        assert found == ["before", "after"]
