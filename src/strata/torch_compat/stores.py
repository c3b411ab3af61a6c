"""Torch's key-value stores, and the one that restarted workers meet at."""

from __future__ import annotations

import importlib
from typing import Any

from strata.torch_compat import require

require("stores")

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # noqa: E402

__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore", "prefix_worker_stores"]


def prefix_worker_stores(prefix: str) -> None:
    """From now on, process groups of this process meet under keys with this prefix."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # A function has the same name.
    create = rendezvous._create_c10d_store

    def create_with_prefix(*arguments: Any, **options: Any) -> Any:
        return PrefixStore(prefix, create(*arguments, **options))

    rendezvous._create_c10d_store = create_with_prefix
