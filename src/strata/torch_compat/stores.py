"""Torch's key-value stores, and the one that restarted workers meet at."""

from __future__ import annotations

import importlib
import os
import socket
import time
from datetime import timedelta
from typing import Any

from strata.torch_compat import require, torch_version

require("stores")

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # noqa: E402

__all__ = [
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "join_promptly",
    "prefix_worker_stores",
    "serve_on",
]

LONGEST_WAIT_S = 60.0
"""For a server that does not listen; torch then says what is wrong."""
PROBE_S = 0.01
PROBES_PER_S = 2_000
"""Of all ranks together."""
_LIBUV_TAKES_LISTENERS = torch_version() >= (2, 8)
"""Until then only torch's older server does."""


def serve_on(listener: socket.socket, address: str, *, timeout: timedelta) -> TCPStore:
    """A store behind a socket that listens already; the socket becomes the store's own."""
    return TCPStore(
        address,
        listener.getsockname()[1],
        None,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=_LIBUV_TAKES_LISTENERS,
    )


def join_promptly() -> None:
    """From now on, ranks of this process connect when rank 0 listens. Torch makes one attempt, usually slightly too early, and another
    after half a second: half of the time that ranks need to find each other after a crash."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # A function has the same name.
    create = rendezvous._create_c10d_store

    def create_when_served(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any, **options: Any
    ) -> Any:
        if rank > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            pause_s = max(PROBE_S, world_size / PROBES_PER_S)
            _wait_until_served(hostname, port, pause_s, min(timeout.total_seconds(), LONGEST_WAIT_S))
        return create(hostname, port, rank, world_size, timeout, *more, **options)

    rendezvous._create_c10d_store = create_when_served


def _wait_until_served(hostname: str, port: int, pause_s: float, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((hostname, port), timeout=1.0).close()
            return
        except socket.gaierror:
            return
        except OSError:
            time.sleep(pause_s)


def prefix_worker_stores(prefix: str) -> None:
    """From now on, process groups of this process meet under keys with this prefix."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # A function has the same name.
    create = rendezvous._create_c10d_store

    def create_with_prefix(*arguments: Any, **options: Any) -> Any:
        return PrefixStore(prefix, create(*arguments, **options))

    rendezvous._create_c10d_store = create_with_prefix
