"""Rendezvous back ends for torchrun: `etcd` through the v3 API, and `strata`, the coordinator itself.

Both are compare-and-swap clients under PyTorch's own dynamic rendezvous; `handler` has what they share. `strata` without
an endpoint is one machine by itself (`local`). This module is what torchrun's plug-in discovery loads, so it imports
nothing heavy: importing it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    HandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]

RENDEZVOUS_BACKENDS = ("etcd", "etcd-v2", "c10d", "static", "strata")
"""The names `--rdzv-backend` takes: torch's own, with `etcd` replaced and `strata` added."""

FAST_RECOVERY: Mapping[str, int] = MappingProxyType(
    {
        # A node counts as lost after interval x attempts; torch waits 15 s by default.
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 3,
        # How long a round that has its minimum waits for more; torch waits 30 s, at every start and restart.
        "last_call_timeout": 1,
        "close_timeout": 10,
    }
)
"""`--rdzv-conf` for recovery in seconds. With torch's defaults a lost node costs more than half a minute."""

SECONDS_NOT_MINUTES = FAST_RECOVERY  # Its name in earlier versions.

TORCHRUN_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    # Torch reuses the agent's key-value store across restarts, and restarted workers may then read the addresses
    # of dead ones. A fresh store for every round makes each restart clean.
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
)
"""What an agent's environment needs for clean restarts, whatever its rendezvous back end."""

LOOPBACK = "127.0.0.1"

LOOPBACK_ONLY: Mapping[str, str] = MappingProxyType(
    {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "TP_SOCKET_IFNAME": "lo"}
)
"""What keeps the connections of a run of one machine off its network: gloo, NCCL and torch's RPC know no passwords."""


def rdzv_conf(overrides: Mapping[str, object] | None = None) -> str:
    """`FAST_RECOVERY`, changed by `overrides`, as torchrun's `--rdzv-conf` takes it."""
    return ",".join(f"{key}={value}" for key, value in {**FAST_RECOVERY, **(overrides or {})}.items())


def etcd_plugin() -> HandlerCreator:
    """Entry point of the group `torchrun.handlers`, for the name `etcd`.

    Torch registers its own `etcd` first (the v2 API, which current etcd servers no longer have) and refuses a
    second creator under one name, so the first one is replaced here before torch registers what is returned.
    """
    from strata.torch_compat.rendezvous import replace_backend

    replace_backend("etcd", _create_etcd_handler)
    return _create_etcd_handler


def strata_plugin() -> HandlerCreator:
    """Entry point of the group `torchrun.handlers`, for the name `strata`."""
    return _create_strata_handler


# Torch asks for the creators in the middle of importing its own agent, which handlers need: they are imported when
# one is created.


def _create_etcd_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from strata.rendezvous.etcd import create_etcd_v3_handler

    return create_etcd_v3_handler(parameters)


def _create_strata_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The coordinator at the endpoint; without one, this machine alone."""
    if not parameters.endpoint.strip():
        from strata.rendezvous.local import create_local_handler

        return create_local_handler(parameters)
    from strata.rendezvous.strata import create_strata_handler

    return create_strata_handler(parameters)


__all__ = [
    "FAST_RECOVERY",
    "LOOPBACK",
    "LOOPBACK_ONLY",
    "RENDEZVOUS_BACKENDS",
    "SECONDS_NOT_MINUTES",
    "TORCHRUN_ENVIRONMENT",
    "etcd_plugin",
    "rdzv_conf",
    "strata_plugin",
]
