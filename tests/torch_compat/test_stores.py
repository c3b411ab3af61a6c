"""Where ranks meet: they connect when somebody listens, and under the keys of their attempt."""

from __future__ import annotations

import importlib
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest

from strata.torch_compat import stores
from tests.rendezvous.etcd_server import port_of_nobody

rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Which rank went to create its store, and whether somebody listened by then."""
    found: list[tuple[int, bool]] = []

    def create(hostname: str, port: int, rank: int, *_: Any) -> str:
        found.append((rank, is_served(port)))
        return "store"

    monkeypatch.setattr(rendezvous, "_create_c10d_store", create)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    stores.join_promptly()
    return found


def test_a_rank_connects_when_rank_0_listens_and_not_before(calls: list[tuple[int, bool]]) -> None:
    joined = threading.Event()

    def join(port: int) -> None:
        rendezvous._create_c10d_store("127.0.0.1", port, 1, 2, timedelta(seconds=60))
        joined.set()

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # Nobody else gets the port, and nobody listens there yet.
        threading.Thread(target=join, args=(server.getsockname()[1],), daemon=True).start()
        assert not joined.wait(0.2)
        server.listen()
        assert joined.wait(60)
    assert calls == [(1, True)]


def test_rank_0_and_those_who_meet_at_their_agent_do_not_wait(
    calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with port_of_nobody() as port:
        rendezvous._create_c10d_store("127.0.0.1", port, 0, 2, timedelta(seconds=60))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        rendezvous._create_c10d_store("127.0.0.1", port, 1, 2, timedelta(seconds=60))
    assert calls == [(0, False), (1, False)]


def test_where_the_port_is_closed_torch_times_out_itself(calls: list[tuple[int, bool]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous._create_c10d_store("127.0.0.1", port, 1, 2, timedelta(seconds=0.05))
    rendezvous._create_c10d_store("no-such-host.invalid", port, 1, 2, timedelta(seconds=60))
    assert [rank for rank, _ in calls] == [1, 1]


def test_a_store_serves_on_the_socket_that_listens_already() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    served = stores.serve_on(listener, "127.0.0.1", timeout=timedelta(seconds=20))
    served.set("key", "value")
    client = stores.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    assert client.get("key") == b"value"
    assert listener.fileno() == -1  # It is the store's now.
