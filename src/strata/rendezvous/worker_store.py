"""The key-value store at which the workers of one round meet: held by an agent, and bound to the address that is in use.

Torch's store knows no passwords, and torch binds it to every interface of the machine. Here it listens only where workers
look for it: on loopback when all of them are on this machine. What stands in it is never unpickled by us. Every
round gets a store of its own, so what an earlier round left is never read, and it outlives the worker of rank 0.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from strata.agent.torchrun_trap import ROUND_STORES_VARIABLE
from strata.torch_compat.stores import TCPStore, serve_on

logger = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(seconds=300)
"""Of the agent's own calls; workers bring theirs."""
BACKLOG = 1024
EVERYWHERE = ""
"""As `bind` takes it."""


def announce_round_stores(run_id: str) -> None:
    """In the agent, before it starts workers: they need not keep their attempts apart."""
    os.environ[ROUND_STORES_VARIABLE] = run_id


def serve(address: str, port: int = 0, *, bind: str | None = None) -> tuple[TCPStore, int]:
    """A store that workers reach at `address`, on a port that is its own from the start, and that listens at `bind`, by
    default the same. Raises `RendezvousConnectionError`."""
    host = address if bind is None else bind
    try:
        listener = _listen(host, port)
    except OSError as error:
        raise RendezvousConnectionError(
            f"Workers cannot rendezvous at {address}:{port}: {error}. Remove --master-port and --master-addr to "
            "use a free port, or pass others."
        ) from error
    port = listener.getsockname()[1]
    return serve_on(listener, address, timeout=STORE_TIMEOUT), port


def interface_of(address: str, *, alone: bool) -> str:
    """Where a store listens that others look for at `address`, a name or number of this machine.

    A name may stand for loopback here and for a network elsewhere (`127.0.1.1` in /etc/hosts): with others on the network,
    only then, and where the address is not one of this machine's interfaces, it listens on all of them, with a warning."""
    try:
        (_, _, _, _, place), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        found = str(place[0])
        if alone or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            _listen(found, 0).close()
            return found
        reason = f"{address} resolves to {found} on this machine, which others cannot reach"
    except OSError as error:
        reason = f"{address} is not an address of this machine ({error})"
    logger.warning(
        "the workers' key-value store listens on every interface: %s. Pass --local-addr=IP, this machine's "
        "address in the network of the job",
        reason,
    )
    return EVERYWHERE


def network_address(address: str) -> str:
    """Where to listen, behind a secret, for those who look for this machine at `address`: there, or everywhere if that is a name which
    stands for loopback here, and perhaps for a network elsewhere."""
    try:
        (_, _, _, _, place), *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
        found = str(place[0])
        if found == address or not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            _listen(found, 0).close()
            return found
    except OSError:
        pass
    return EVERYWHERE


def _listen(host: str, port: int) -> socket.socket:
    if host == EVERYWHERE:
        return socket.create_server(("", port), backlog=BACKLOG, reuse_port=False)
    (family, kind, protocol, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
