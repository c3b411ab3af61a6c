"""The `strata` rendezvous on one machine: an agent that needs no other to start, and nothing that runs beside it.

`--rdzv-backend=strata` without an endpoint. Every round gets a store of its own, which the agent holds (`worker_store`). It
listens on the loopback address alone, unless the user names another with `--master-addr`.

Only for runs of one machine: several have to meet somewhere, which is what the back ends with an endpoint are for.
"""

from __future__ import annotations

import os
import time
import uuid

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from strata.agent.trace import forget_rendezvous, note_rendezvous
from strata.agent.warm import warm_up
from strata.processes import LAUNCH_VARIABLE
from strata.rendezvous import LOOPBACK, TORCHRUN_ENVIRONMENT
from strata.rendezvous.worker_store import announce_round_stores, serve
from strata.torch_compat.stores import HashStore, Store


class LocalRendezvous(RendezvousHandler):
    """One agent, that meets itself."""

    def __init__(self, run_id: str, *, address: str = LOOPBACK, port: int = 0) -> None:
        self._run_id = run_id
        self._address = address
        self._port = port
        self._workers_store: Store | None = None
        self._closed = False

    def get_backend(self) -> str:
        return "strata"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet at the agent's store: it is there before the first of them and new in each round."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError(f"The run '{self._run_id}' has ended.")
        began_s = time.monotonic()
        self._workers_store = None  # Its port is free for the next one.
        self._workers_store, port = serve(self._address, self._port)
        note_rendezvous(self._run_id, began_s, time.monotonic())
        place = RendezvousStoreInfo(master_addr=self._address, master_port=port)
        return RendezvousInfo(HashStore(), 0, 1, place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        self._workers_store = None
        forget_rendezvous(self._run_id)
        return True


def create_local_handler(params: RendezvousParameters) -> LocalRendezvous:
    """What `--rdzv-backend=strata` calls where no endpoint is given. `master_addr` and `master_port` among the
    rendezvous' options are where workers meet. Raises `RendezvousConnectionError` for a run of several machines."""
    if params.max_nodes > 1:
        raise RendezvousConnectionError(
            "Several machines need a rendezvous endpoint, and no --rdzv-endpoint was given. Start a coordinator on one of them "
            "with `strata serve` and give every machine --rdzv-endpoint=HOST:50051, or --rdzv-backend=etcd with the "
            "endpoint of an etcd server."
        )
    for name, value in TORCHRUN_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    announce_round_stores(params.run_id)
    # Agents that meet somewhere are one launch if they have one id. This one meets no other, even one with the same id.
    os.environ[LAUNCH_VARIABLE] = f"{params.run_id}:{uuid.uuid4().hex}"
    warm_up(params.run_id)
    return LocalRendezvous(
        params.run_id,
        address=str(params.get("master_addr") or LOOPBACK),
        port=int(params.get("master_port") or 0),
    )
