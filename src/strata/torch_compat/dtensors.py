"""Distributed tensors as they are on this rank, and the key-value store of the process group."""

from __future__ import annotations

from typing import Any, cast

import torch

from strata.torch_compat import require

require("dtensors")


def is_distributed_tensor(tensor: object) -> bool:
    """Whether a tensor is one rank's view of a larger one. Only then the module that defines them is loaded."""
    return type(tensor).__name__ in ("DTensor", "ShardedTensor") and isinstance(tensor, torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is a DTensor. Shares its memory; no gradient flows."""
    return (
        cast(torch.Tensor, cast(Any, tensor)._local_tensor) if type(tensor).__name__ == "DTensor" else tensor
    )


def group_store(prefix: str) -> Any:
    """A connection of its own to the key-value store that the default process group was made with: a thread that waits for a key
    must not keep others from theirs."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        store = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return PrefixStore(prefix, store)
