"""Distributed tensors as they are on this rank, and the key-value store of the process group."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, cast

import torch

from strata.torch_compat import require

require("dtensors")


def is_distributed_tensor(tensor: object) -> bool:
    """Whether a tensor is one rank's view of a larger one. Only then the module that defines them is loaded."""
    return type(tensor).__name__ in ("DTensor", "ShardedTensor") and isinstance(tensor, torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: the tensor itself unless it is a DTensor. Shares its memory; no gradient flows."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    _require_local_tensors()
    return cast(torch.Tensor, cast(Any, tensor)._local_tensor)


@cache
def _require_local_tensors() -> None:
    """With the first of them: at import, most jobs would load their module for nothing."""
    require("distributed_tensors")


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


def forget_meshes() -> None:
    """Before this process enters a world as another rank: torch remembers what operations on distributed tensors give, by device
    meshes that count as equal whichever rank this process is in them, and would hand out the part of the rank that it was."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    api, redistribute = (
        sys.modules.get(f"torch.distributed.tensor.{name}") for name in ("_api", "_redistribute")
    )
    dispatcher = getattr(getattr(api, "DTensor", None), "_op_dispatcher", None)
    remembered = getattr(getattr(dispatcher, "sharding_propagator", None), "propagate_op_sharding", None)
    found = [
        getattr(remembered, "cache_clear", None)
        or getattr(getattr(remembered, "cache", None), "cache_clear", None),
        getattr(getattr(redistribute, "_gen_transform_infos", None), "cache_clear", None),
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),  # Not in all versions.
    ]
    for clear in found:
        if clear is not None:
            clear()
