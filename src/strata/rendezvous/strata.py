"""The `strata` rendezvous back end: the coordinator itself, so that no etcd is needed to start.

`torchrun --rdzv-backend=strata --rdzv-endpoint=HOST:50051`. The coordinator keeps the values and knows who is
present; everything else is shared with the etcd back end.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from strata.rendezvous.handler import CasRendezvousHandler, create_cas_handler

DEFAULT_PORT = 50051
DEFAULT_REQUEST_TIMEOUT_S = 2.0


def create_strata_handler(params: RendezvousParameters) -> CasRendezvousHandler:
    """What `torchrun --rdzv-backend=strata` calls."""
    from strata.rpc.cas import CoordinatorCasClient

    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    address = f"{host}:{port}"
    client = CoordinatorCasClient(
        address, timeout_s=float(params.get("read_timeout", DEFAULT_REQUEST_TIMEOUT_S))
    )

    def unreachable(error: Exception) -> str:
        return (
            f"Failed to connect to the coordinator at {address} ({error}). Start one with: strata serve; "
            f"or check it: strata doctor --coordinator {address}"
        )

    handler = create_cas_handler(client, params, unreachable=unreachable)
    handler.coordinator = address
    key, node = handler.backend.state_key, str(handler.this_node)
    handler.backend.presence = client.join(key, node=node, run_id=params.run_id)
    return handler
