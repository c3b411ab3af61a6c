"""The parts of `torch.save` and `torch.load` that a checkpoint image stands on: how a `.pt` file is laid out, and what may be in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from strata.torch_compat import require

require("images")

from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals  # noqa: E402

REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v3")
REBUILD_PARAMETER = ("torch._utils", "_rebuild_parameter")
REBUILD_WITH_ATTRIBUTES = ("torch._tensor", "_rebuild_from_type_v2")
"""The functions that a pickle calls to make tensors, by module and name."""


def file_writer(path: str, *, alignment_bytes: int) -> Any:
    """Writes the records of a `.pt` file; also records without bytes, which torch's stubs do not know."""
    return torch._C.PyTorchFileWriter(path, False, alignment_bytes)


def file_reader(path: str) -> Any:
    """Knows where in a `.pt` file each record is."""
    return torch._C.PyTorchFileReader(path)


def allowed_globals() -> dict[str, object]:
    """What `weights_only=True` lets a pickle name."""
    allowed: dict[str, object] = _get_allowed_globals()
    return allowed


def globals_allowed_by_user() -> dict[str, object]:
    """What the user has added to that, with `torch.serialization.add_safe_globals`."""
    allowed: dict[str, object] = _get_user_allowed_globals()  # type: ignore[no-untyped-call]
    return allowed


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """One call that compares type, number type, device, shape, strides, gradient and lazy bits of every tensor. Where torch has
    no such thing it says no, and the caller has to compare by itself."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        with torch.enable_grad():
            made: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):
        return lambda *_: False
    check: Callable[..., bool] = made.check
    return check


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Many copies in one call, without waiting for them where a device does them."""
    torch._foreach_copy_(targets, sources, True)


def compile_kernel(source: str, name: str) -> Any:
    """A CUDA kernel for the current device. Raises where this torch cannot make it."""
    cuda: Any = torch.cuda
    return cuda._compile_kernel(source, name)
