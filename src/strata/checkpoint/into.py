"""Loading in place: the bytes of an image go straight into tensors that are there already.

The image is in memory and verified. Tensors on the CPU are filled by plain copies, tensors on CUDA from page-locked memory
at the speed of the bus. What the target has no tensor for (numbers, the state of an optimizer that has not stepped yet)
is returned as loaded. Where the two do not fit, nothing has been copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from strata.checkpoint.copying import any_on_cuda, copy_on_cpu
from strata.checkpoint.errors import StateMismatch
from strata.checkpoint.manifest import TensorEntry
from strata.checkpoint.state import rebuild, restore_kind, scan


def is_on_cuda(into: Any) -> bool:
    """Whether any tensor of the target is: then the image should be page-locked before it is copied."""
    return any_on_cuda(scan(into).tensors)


def load_into(
    loaded: Any, into: Any, image: torch.Tensor, entries: Sequence[TensorEntry], *, is_lent: bool
) -> Any:
    """Fill the tensors of `into`, and return the loaded state with those tensors in their places.

    `image` are the bytes, `entries` where each leaf of `loaded` lies in them. `is_lent` says that the image will be
    overwritten, so what is not copied into a target must be copied away from it.
    """
    pairs = list(_pairs(loaded, into, ""))
    leaves = scan(loaded).tensors
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    copies = [(target, _view(image, entries[numbers[id(leaf)]], leaf)) for target, leaf in pairs]
    copy_on_cpu([copy for copy in copies if not copy[0].is_cuda])
    to_device = [copy for copy in copies if copy[0].is_cuda]
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
        return restore_kind(leaf.clone() if is_lent else leaf, entries[number].kind)

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
