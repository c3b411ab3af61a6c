"""Agents find each other, lose each other and find each other again: through a real etcd, or the coordinator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from strata.rendezvous.cas import CasStore
from strata.rendezvous.etcd import EtcdCasClient, create_etcd_v3_handler
from strata.rendezvous.handler import CasRendezvousHandler
from tests.rendezvous.etcd_server import EtcdServer, free_port, port_of_nobody
from tests.support import eventually

pytestmark = pytest.mark.etcd
PATIENCE_S = 60.0
"""For answers of servers that are there: however slow the machine is, this is not about speed."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdCasClient]:
    client = EtcdCasClient([("127.0.0.1", etcd.port)], timeout_s=PATIENCE_S)
    yield client
    client.close()


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.monotonic_ns()}"


def parameters(endpoint: str, run_id: str, *, nodes: str = "1:1", backend: str = "etcd", **conf: Any) -> Any:
    least, most = (int(part) for part in nodes.split(":"))
    conf = {"read_timeout": PATIENCE_S, "join_timeout": 2 * PATIENCE_S, **conf}
    return RendezvousParameters(backend, endpoint, run_id, least, most, local_addr="127.0.0.1", **conf)


def join_all(handlers: list[CasRendezvousHandler]) -> list[tuple[int, int]]:
    with ThreadPoolExecutor(len(handlers)) as pool:
        infos = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    return sorted((info.rank, info.world_size) for info in infos)


def meet_two_others(handler: CasRendezvousHandler) -> int:
    """The node's rank once all three are there. A round begins a second after there are enough, so one of them may come
    too late for it: then, as agents do, all meet again."""
    while (met := handler.next_rendezvous()).world_size < 3:
        eventually(handler.num_nodes_waiting, within_s=PATIENCE_S, what="the third one waits")
    return met.rank


# --- the etcd client


def test_swap_succeeds_only_against_the_token_it_has_seen(client: EtcdCasClient, run_id: str) -> None:
    assert client.get(run_id) is None
    written, value, token = client.cas(run_id, b"one", None)
    assert (written, value) == (True, b"one")
    assert client.get(run_id) == (b"one", token)
    assert client.cas(run_id, b"two", None) == (False, b"one", token)
    written, _, newer = client.cas(run_id, b"", token)
    assert written
    assert client.cas(run_id, b"three", token) == (False, b"", newer)


def test_of_many_racing_writers_one_wins_each_round(etcd: EtcdServer, run_id: str) -> None:
    def add(_: int) -> None:
        own = EtcdCasClient([("127.0.0.1", etcd.port)], timeout_s=PATIENCE_S)
        store = CasStore(own, lambda: run_id)
        for _ in range(10):
            store.add("counter", 1)
        own.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    reader = EtcdCasClient([("127.0.0.1", etcd.port)], timeout_s=PATIENCE_S)
    assert CasStore(reader, lambda: run_id).get("counter") == b"40"
    reader.close()


def test_keys_hang_on_a_lease_and_a_lost_lease_is_replaced(
    etcd: EtcdServer, client: EtcdCasClient, run_id: str, program: Callable[[str], str]
) -> None:
    def ctl(*words: str) -> Any:
        patience = (f"--command-timeout={PATIENCE_S:g}s", f"--dial-timeout={PATIENCE_S:g}s")
        command = [program("etcdctl"), f"--endpoints={etcd.endpoint}", *patience, "-w", "json", *words]
        return json.loads(subprocess.check_output(command, env={**os.environ, "ETCDCTL_API": "3"}))

    _, _, token = client.cas(run_id, b"one", None)
    lease = ctl("get", run_id)["kvs"][0]["lease"]
    assert ctl("lease", "timetolive", f"{lease:x}")["granted-ttl"] == 7200
    ctl("lease", "revoke", f"{lease:x}")
    assert client.get(run_id) is None
    assert client.cas(run_id, b"two", token)[0] is False
    assert client.cas(run_id, b"two", None)[0] is True


def test_client_passes_over_a_dead_endpoint_and_survives_a_server_restart(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    server.start()
    try:
        with port_of_nobody() as dead:
            client = EtcdCasClient([("127.0.0.1", dead), ("127.0.0.1", server.port)], timeout_s=PATIENCE_S)
            _, _, token = client.cas("key", b"kept", None)
            server.stop()
            with pytest.raises(ConnectionError, match="refused"):
                client.get("key")
            server.start()
            assert client.get("key") == (b"kept", token)
            client.close()
    finally:
        server.stop()


def test_unreachable_endpoint_is_reported_in_the_documented_words(run_id: str) -> None:
    with (
        port_of_nobody() as port,
        pytest.raises(RendezvousConnectionError, match=f"Failed to connect to etcd at localhost:{port}"),
    ):
        create_etcd_v3_handler(parameters(f"localhost:{port}", run_id))


# --- the handler


def test_two_nodes_get_two_ranks_and_the_closed_id_works_again_at_once(etcd: EtcdServer, run_id: str) -> None:
    for _ in range(2):
        params = parameters(etcd.endpoint, run_id, nodes="2:2")
        handlers = [create_etcd_v3_handler(params) for _ in range(2)]
        assert join_all(handlers) == [(0, 2), (1, 2)]
        assert all(handler.shutdown() for handler in handlers)


def test_a_running_node_sees_the_run_closed_and_so_does_a_newcomer(etcd: EtcdServer, run_id: str) -> None:
    params = parameters(etcd.endpoint, run_id, nodes="2:2")
    one, two = (create_etcd_v3_handler(params) for _ in range(2))
    join_all([one, two])
    one.set_closed()
    with pytest.raises(RendezvousClosedError, match="some of its members are still alive"):
        create_etcd_v3_handler(params).next_rendezvous()
    for handler in (one, two):
        handler.shutdown()
    assert two.is_closed()


def test_waiting_in_vain_says_who_was_there(etcd: EtcdServer, run_id: str) -> None:
    """Two nodes with different ids, each of which needs two."""
    handlers = [
        create_etcd_v3_handler(parameters(etcd.endpoint, name, nodes="2:2", join_timeout=1))
        for name in (run_id, f"{run_id}-mistyped")
    ]
    with ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(handler.next_rendezvous).exception() for handler in handlers]
    for error in errors:
        assert isinstance(error, RendezvousTimeoutError)
        assert str(error).startswith("Timed out waiting for rendezvous")
        assert "2 nodes are needed, no other node joined" in str(error)
        assert "same --rdzv-id" in str(error)


def test_foreign_data_under_the_id_is_stale_state(
    etcd: EtcdServer, client: EtcdCasClient, run_id: str
) -> None:
    handler = create_etcd_v3_handler(parameters(etcd.endpoint, run_id))
    assert client.cas(handler.backend.state_key, b"written by an earlier version", None)[0]
    with pytest.raises(RendezvousStateError, match=r"^Stale state detected") as caught:
        handler.next_rendezvous()
    assert "etcdctl del --prefix" in str(caught.value)


# --- the coordinator as the server


def test_coordinator_serves_a_rendezvous_of_its_own_that_survives_its_crash(
    tmp_path: Path, run_id: str
) -> None:
    grpc_port = free_port()

    def serve() -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "strata.cli.main",
            "serve",
            f"--data-dir={tmp_path}",
            "--http-port=0",
        ]
        return subprocess.Popen(
            [*command, f"--grpc-port={grpc_port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def patiently(make: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return make()
            except RendezvousConnectionError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    params = parameters(f"127.0.0.1:{grpc_port}", run_id, nodes="2:3", backend="strata")
    with pytest.raises(
        RendezvousConnectionError, match=f"connect to the coordinator at 127.0.0.1:{grpc_port}"
    ):
        get_rendezvous_handler(params)
    server = serve()
    try:
        one, two = (patiently(lambda: get_rendezvous_handler(params)) for _ in range(2))
        assert join_all([one, two]) == [(0, 2), (1, 2)]
        server.kill()
        server.wait()
        assert one.num_nodes_waiting() == 0
        server = serve()
        three = patiently(lambda: get_rendezvous_handler(params))
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(meet_two_others, three)
            eventually(
                one.num_nodes_waiting,
                within_s=PATIENCE_S,
                what="the newcomer must wait its turn, not start a run of its own",
            )
            with ThreadPoolExecutor(2) as members:
                ranks = [*members.map(meet_two_others, (one, two)), late.result(PATIENCE_S)]
        assert sorted(ranks) == [0, 1, 2]
        assert all(handler.shutdown() for handler in (one, two, three))
    finally:
        server.terminate()
        server.wait(timeout=PATIENCE_S)
