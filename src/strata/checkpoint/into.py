"""Loading in place: the bytes of an image go straight into tensors that are there already.

The image is in memory and verified. Tensors on the CPU are filled by plain copies, tensors on CUDA from page-locked memory
at the speed of the bus. That bus is idle while an image is verified, so its first bytes are sent ahead to spare memory of the
device; no target is touched before all bytes are known to be right. What the target has no tensor for (numbers, the state of
an optimizer that has not stepped yet) is returned as loaded. Where the two do not fit, nothing has been copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from strata.checkpoint.collecting import no_collection
from strata.checkpoint.device import SpareMemory, any_on_cuda
from strata.checkpoint.errors import StateMismatch
from strata.checkpoint.manifest import TensorEntry
from strata.checkpoint.state import rebuild, restore_kind, scan
from strata.checkpoint.sweeping import copy_bytes

AHEAD_BYTES = 4 << 30
_cuda: Any = torch.cuda  # Its module is not typed.


def is_on_cuda(into: Any) -> bool:
    """Whether any tensor of the target is: then the image should be page-locked before it is copied."""
    return any_on_cuda(scan(into).tensors)


@contextlib.contextmanager
def sent_ahead(image: torch.Tensor, into: Any, *, is_page_locked: bool) -> Iterator[torch.Tensor | None]:
    """The first bytes of an image, on the device that the targets are on; they arrive in the order of its current stream.
    Takes a small part of the memory that is free there. None where nothing would be gained."""
    devices = {tensor.device for tensor in scan(into).tensors if tensor.is_cuda}
    if not is_page_locked or len(devices) != 1:
        yield None
        return
    device = devices.pop()
    with _cuda.device(device):
        size_bytes = min(image.numel(), AHEAD_BYTES, _cuda.mem_get_info()[0] // 4)
        ahead = SpareMemory().take(size_bytes, _cuda.current_stream())
    if ahead is None:
        yield None
        return
    ahead.copy_(image[:size_bytes], non_blocking=True)
    try:
        yield ahead
    finally:
        _cuda.current_stream(device).synchronize()  # Nobody reads the image any more.


@no_collection()
def load_into(
    loaded: Any,
    into: Any,
    image: torch.Tensor,
    entries: Sequence[TensorEntry],
    *,
    is_lent: bool,
    ahead: torch.Tensor | None = None,
) -> Any:
    """Fill the tensors of `into`, and return the loaded state with those tensors in their places.

    `image` are the bytes, `entries` where each leaf of `loaded` lies in them. `is_lent` says that the image will be
    overwritten, so what is not copied into a target must be copied away from it. `ahead` are the bytes of the image that are
    on the device already.
    """
    pairs = list(_pairs(loaded, into, ""))
    leaves = scan(loaded).tensors
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    plain: list[tuple[int, int, int]] = []
    others, to_device = [], []
    base, size_bytes = image.data_ptr(), image.numel()
    for target, leaf in pairs:
        entry = entries[numbers[id(leaf)]]
        end_bytes = entry.offset_bytes + entry.size_bytes
        if target.is_cuda:
            source = image if ahead is None or end_bytes > len(ahead) else ahead
            to_device.append((target, _view(source, entry, leaf)))
        elif _is_plain(target, leaf) and entry.size_bytes == leaf.nbytes and end_bytes <= size_bytes:
            plain.append((target.data_ptr(), base + entry.offset_bytes, entry.size_bytes))
        else:
            others.append((target, _view(image, entry, leaf)))
    if plain:
        copy_bytes(*zip(*plain, strict=True))
    with torch.no_grad():
        for target, source in others:
            target.copy_(source)
    if to_device:
        with torch.no_grad():
            torch._foreach_copy_(
                [target for target, _ in to_device], [source for _, source in to_device], True
            )
        for device in {target.device for target, _ in to_device}:
            torch.cuda.synchronize(device)
    filled = {id(leaf): target for target, leaf in pairs}

    def replace(number: int, leaf: torch.Tensor) -> object:
        if id(leaf) in filled:
            return filled[id(leaf)]
        return restore_kind(_own(leaf) if is_lent else leaf, entries[number].kind)

    return rebuild(loaded, replace)


def _pairs(loaded: Any, into: Any, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(into, torch.Tensor):
        if not isinstance(loaded, torch.Tensor) or loaded.shape != into.shape:
            found = tuple(loaded.shape) if isinstance(loaded, torch.Tensor) else type(loaded).__name__
            raise StateMismatch(
                f"'{name}' is {found} in the checkpoint, but {tuple(into.shape)} in the target."
            )
        yield into, loaded
    elif isinstance(into, Mapping) and isinstance(loaded, Mapping):
        for key, target in into.items():
            inner = f"{name}.{key}" if name else str(key)
            if key in loaded:
                yield from _pairs(loaded[key], target, inner)
            elif isinstance(target, torch.Tensor):
                raise StateMismatch(f"'{inner}' is not in the checkpoint.")
    elif isinstance(into, list | tuple) and isinstance(loaded, list | tuple):
        for number, (source, target) in enumerate(zip(loaded, into, strict=False)):
            yield from _pairs(source, target, f"{name}.{number}" if name else str(number))


def _view(image: torch.Tensor, entry: TensorEntry, leaf: torch.Tensor) -> torch.Tensor:
    """The leaf as a view of the image, instead of the mapping it was opened with, which nobody has touched yet."""
    span = image[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
    return span.view(leaf.dtype).as_strided(leaf.shape, leaf.stride())


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """The same with memory of its own, and no history: a parameter stays one."""
    copied = leaf.detach().clone()
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=leaf.requires_grad)
    return copied.requires_grad_(leaf.requires_grad)


def _is_plain(target: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether copying the bytes to a target on the CPU is copying the tensor."""
    return (
        type(target) in (torch.Tensor, torch.nn.Parameter)
        and target.dtype == leaf.dtype
        and target.is_contiguous()
        and leaf.is_contiguous()
        and target.device == leaf.device
        and not target.is_neg()
        and not target.is_conj()
    )
