"""The `strata` rendezvous back end: the coordinator itself, so that no etcd is needed to start.

`torchrun --rdzv-backend=strata --rdzv-endpoint=HOST:50051`, or several of them between commas. The coordinator keeps the
values and knows who is present; everything else is shared with the etcd back end.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress

from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters

from strata.agent.health_gate import check_before_joining
from strata.agent.leaving import LEAVING
from strata.rendezvous.handler import CasRendezvousHandler, create_cas_handler
from strata.torch_compat.elastic import leave
from strata.worker.address import coordinator_address

logger = logging.getLogger(__name__)

DEFAULT_REQUEST_TIMEOUT_S = 2.0


def create_strata_handler(params: RendezvousParameters) -> CasRendezvousHandler:
    """What `torchrun --rdzv-backend=strata` calls."""
    from strata.rpc.cas import CoordinatorCasClient, HostRefused

    try:
        address = coordinator_address(params.endpoint or "localhost")
    except ValueError as error:
        raise RendezvousError(str(error)) from None
    client = CoordinatorCasClient(
        address, timeout_s=float(params.get("read_timeout", DEFAULT_REQUEST_TIMEOUT_S))
    )

    def unreachable(error: Exception) -> str:
        return (
            f"Failed to connect to the coordinator at {address} ({error}). Start one with: strata serve; "
            f"or check it: strata doctor --coordinator {address}"
        )

    host = socket.gethostname()
    try:
        client.admit(host)
    except HostRefused as error:
        raise RendezvousError(str(error)) from None
    except ConnectionError:
        pass  # That is said where it matters, below.
    else:
        if unfit := check_before_joining(client):
            raise RendezvousError(
                f"The machine '{host}' is not fit to train: {unfit}. Check it with: strata doctor; when it is fixed: "
                f"strata quarantine clear {host}"
            )
    handler = create_cas_handler(client, params, unreachable=unreachable)
    handler.coordinator = address

    def admit() -> None:
        """Others continue: the rendezvous is not closed by one that leaves."""
        with suppress(ConnectionError):
            try:
                client.admit(host)
            except HostRefused as error:
                logger.error("%s This machine leaves the run '%s'.", error, params.run_id)
                leave(str(error))

    def leave_now(reason: str, within_s: float | None) -> None:
        if within_s is not None:
            LEAVING.notice(source="the coordinator", reason=reason, within_s=within_s)
            return
        if LEAVING.ask():  # Every notice says so from now on.
            logger.error(
                "the machine '%s' was quarantined (%s): it leaves the run '%s'", host, reason, params.run_id
            )

    handler.admit = admit
    key, node = handler.backend.state_key, str(handler.this_node)
    handler.backend.presence = client.join(
        key, node=node, run_id=params.run_id, host=host, on_leave=leave_now
    )
    return handler
