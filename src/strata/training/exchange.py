"""What ranks exchange: small values gathered, a full state broadcast from one to all, a decision agreed on.

Works with gloo and with nccl, and alone as well, where there is no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from strata.checkpoint.image.in_place import Binding, paired
from strata.checkpoint.image.nested import Path, leaves, mapped
from strata.checkpoint.image.pickling import TensorRecipe

T = TypeVar("T")

CHUNK_BYTES = 64 << 20


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_and_world() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if is_distributed() else (0, 1)


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order."""
    if rank_and_world()[1] == 1:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=_control_group())
    return values


def smallest(values: list[float]) -> list[float]:
    """Position by position the smallest value any rank has: one small collective."""
    if rank_and_world()[1] == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=_control_group())
    return [float(value) for value in tensor.tolist()]


_control: tuple[Any, Any] | None = None
"""The default group, and the one for small values beside it."""


def _control_group() -> Any:
    """Where small values are exchanged: on the CPU, so that no rank waits for what its device has still to do. The first to be asked
    makes it, on all ranks together."""
    global _control
    default = distributed.group.WORLD
    if "nccl" not in str(distributed.get_backend()):
        return default
    if _control is None or _control[0] is not default:
        _control = default, distributed.new_group(backend="gloo")
    return _control[1]


def broadcast_state(state: Any, *, source: int, into: Binding | None = None, group: Any = None) -> Any:
    """The state of rank `source`, on every rank, or on those of a group. On the others, tensors arrive in the targets of `into`, and
    those it has none for on the CPU. Raises `StateMismatch` where the targets do not fit."""
    if not is_distributed() or distributed.get_world_size() == 1:
        return state
    rank = distributed.get_rank()
    tensors: list[torch.Tensor] = []
    skeleton = [_strip(state, tensors)] if rank == source else [None]
    distributed.broadcast_object_list(skeleton, src=source, group=group)
    slots = _slots(skeleton[0])
    if rank != source:
        targets = _targets(skeleton[0], into)
        tensors = [
            targets[id(slot)] if id(slot) in targets else torch.empty(slot.shape, dtype=slot.dtype)
            for slot in slots
        ]
    device = exchange_device()
    for numbers in _chunks(slots):
        size_bytes = sum(slots[n].nbytes for n in numbers)
        if rank == source:
            flat = torch.cat([_bytes_of(tensors[n], device) for n in numbers])
        else:
            flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        distributed.broadcast(flat, src=source, group=group)
        if rank != source:
            _spread(flat, [(slots[n], tensors[n]) for n in numbers])
    return _fill(skeleton[0], iter(tensors))


def exchange_device() -> torch.device:
    """Where tensors must be to be exchanged."""
    return torch.device("cuda" if "nccl" in str(distributed.get_backend()) else "cpu")


class _Slot:
    """Where a tensor stands in the skeleton of a state."""

    __slots__ = ("dtype", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        return _Slot, (self.shape, self.dtype)


def _strip(state: Any, tensors: list[torch.Tensor]) -> Any:
    """The skeleton of a state; its tensors, in the order of their slots, are added to `tensors`."""

    def slot(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Slot(tuple(leaf.shape), leaf.dtype)

    return mapped(state, slot, leaf=torch.Tensor)


def _slots(skeleton: Any) -> list[_Slot]:
    return [leaf for _, leaf in leaves(skeleton, once=True) if isinstance(leaf, _Slot)]


def _targets(skeleton: Any, into: Binding | None) -> dict[int, torch.Tensor]:
    """The targets of a state, by the ids of their slots."""
    if into is None:
        return {}
    of_recipe: dict[int, _Slot] = {}
    outline = _outline(skeleton, of_recipe)
    pairs = paired(outline, into.bind(outline))
    return {id(of_recipe[id(recipe)]): target for target, recipe in pairs}


def _outline(skeleton: Any, of_recipe: dict[int, _Slot]) -> Any:
    def described(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        recipe = TensorRecipe(
            record=-1,
            record_bytes=leaf.nbytes,
            dtype=leaf.dtype,
            offset=0,
            shape=leaf.shape,
            stride=torch.empty(leaf.shape, device="meta").stride(),
            requires_grad=False,
            is_parameter=False,
        )
        of_recipe[id(recipe)] = leaf
        return recipe

    return mapped(skeleton, described)


def _fill(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Any:
    return mapped(skeleton, lambda _, leaf: next(tensors) if isinstance(leaf, _Slot) else leaf)


def _chunks(slots: Sequence[_Slot]) -> Iterator[list[int]]:
    """The numbers of slots that travel together."""
    group: list[int] = []
    held = 0
    for number, slot in enumerate(slots):
        if not slot.nbytes:
            continue
        if group and held + slot.nbytes > CHUNK_BYTES:
            yield group
            group, held = [], 0
        group.append(number)
        held += slot.nbytes
    if group:
        yield group


def _bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _spread(flat: torch.Tensor, group: Sequence[tuple[_Slot, torch.Tensor]]) -> None:
    offset = 0
    for slot, tensor in group:
        part = flat[offset : offset + slot.nbytes]
        if tensor.dtype is slot.dtype and tensor.is_contiguous():
            tensor.detach().view(-1).view(torch.uint8).copy_(part)
        else:  # A copy of the bytes begins where the number type wants it to.
            with torch.no_grad():
                tensor.copy_(part.clone().view(slot.dtype).view(slot.shape))
        offset += slot.nbytes
