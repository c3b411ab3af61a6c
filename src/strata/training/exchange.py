"""What ranks tell each other: small values gathered, a whole state sent from one to all, a question agreed on.

Works with gloo and with nccl, and alone as well, where there is no process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

CHUNK_BYTES = 64 << 20


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def rank_and_world() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if is_distributed() else (0, 1)


def gather(value: T) -> list[T]:
    """Every rank's value, on every rank, in rank order."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def smallest(values: list[float]) -> list[float]:
    """Position by position the smallest value any rank has: one small collective."""
    if not is_distributed():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=_device())
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN)
    return [float(value) for value in tensor.tolist()]


def broadcast_state(state: Any, *, source: int) -> Any:
    """The state of rank `source`, on every rank. Tensors arrive on the CPU."""
    if not is_distributed() or distributed.get_world_size() == 1:
        return state
    rank = distributed.get_rank()
    tensors: list[torch.Tensor] = []
    skeleton = [_strip(state, tensors)] if rank == source else [None]
    distributed.broadcast_object_list(skeleton, src=source)
    if rank != source:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in _slots(skeleton[0])]
    device = _device()
    for group in _chunks(tensors):
        flat = torch.cat([t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in group]).to(device)
        distributed.broadcast(flat, src=source)
        if rank != source:
            _spread(flat.cpu(), group)
    return _fill(skeleton[0], iter(tensors))


def _device() -> torch.device:
    """Where tensors must be to be exchanged."""
    return torch.device("cuda" if "nccl" in str(distributed.get_backend()) else "cpu")


class _Slot:
    """Where a tensor stands in the skeleton of a state."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return _Slot, (self.shape, self.dtype)


def _strip(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return _Slot(tuple(node.shape), node.dtype)
    if isinstance(node, dict):
        return {key: _strip(value, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_strip(value, tensors) for value in node)
    return node


def _slots(node: Any) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(node, _Slot):
        yield node.shape, node.dtype
    elif isinstance(node, dict):
        for value in node.values():
            yield from _slots(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _slots(value)


def _fill(node: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(node, _Slot):
        return next(tensors)
    if isinstance(node, dict):
        return {key: _fill(value, tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_fill(value, tensors) for value in node)
    return node


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if group and held + tensor.nbytes > CHUNK_BYTES:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.nbytes
    if group:
        yield group


def _spread(flat: torch.Tensor, group: list[torch.Tensor]) -> None:
    offset = 0
    for tensor in group:
        part = flat[offset : offset + tensor.nbytes]
        tensor.view(-1).view(torch.uint8).copy_(part)
        offset += tensor.nbytes
