"""Which kinds of sharded training a job takes, said on entering and never at the first save.

State that PyTorch describes as DTensors (`fully_shard`, tensor parallel plans, HSDP) is taken. What keeps its shards to
itself, so that one rank's `state_dict` waits for all the others', is refused with the name of what to use instead. Looks at
types alone: no collective, and nothing is imported that the script has not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from strata.errors import StrataError


class UnsupportedSharding(StrataError):
    """The model or the optimizer is sharded in a way that cannot be saved."""

    code: ClassVar[str] = "unsupported_sharding"


def refuse_unsupported(
    model: torch.nn.Module, optimizer: object, extra: Mapping[str, object] | None = None
) -> None:
    """Raise `UnsupportedSharding` for FSDP1, ZeRO and DeepSpeed, wherever they are wrapped into, and in what is saved beside the
    model and its optimizer as well."""
    for what, found in {
        "The model": model,
        "The optimizer": optimizer,
        **{f"extra['{name}']": item for name, item in (extra or {}).items()},
    }.items():
        if isinstance(found, torch.nn.Module):
            _refuse_module(what, found)
        else:
            _refuse_optimizer(what, found)


def _refuse_module(what: str, model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if _is_a(module, "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"):
            where = f"its module '{name}'" if name else "it"
            raise UnsupportedSharding(
                f"{what} is sharded with FSDP1: {where} is a FullyShardedDataParallel, whose shards cannot be saved one "
                "by one.",
                hint="Use FSDP2: torch.distributed.fsdp.fully_shard(module, mesh=mesh) for each block, then for the model.",
            )
        if _is_of_package(module, "deepspeed"):
            raise _deepspeed(what, module)


def _refuse_optimizer(what: str, optimizer: object) -> None:
    for each in _unwrapped(optimizer):
        if _is_a(each, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
            raise UnsupportedSharding(
                f"{what} is a ZeroRedundancyOptimizer, which keeps each rank's part of its state local.",
                hint="Use FSDP2, which shards the optimizer's state with the model's: "
                "torch.distributed.fsdp.fully_shard(module, mesh=mesh), and an ordinary optimizer made after it.",
            )
        if _is_of_package(each, "deepspeed"):
            raise _deepspeed(what, each)


def _deepspeed(what: str, found: object) -> UnsupportedSharding:
    return UnsupportedSharding(
        f"{what} is DeepSpeed's ({type(found).__name__}), which saves its state by itself.",
        hint="Use FSDP2 (torch.distributed.fsdp.fully_shard) instead of ZeRO: it shards parameters, gradients and the "
        "optimizer's state alike.",
    )


def _unwrapped(optimizer: object) -> Iterator[object]:
    """The optimizer, and those it is a wrapper of (Accelerate's and Lightning's have an attribute of this name)."""
    seen: set[int] = set()
    each: Any = optimizer
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = getattr(each, "optimizer", None)


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether a value has a type whose module need not be imported: where it is not, there are no values of it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _is_of_package(value: object, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(value).__mro__)
