"""Looking through a nested state for what has bytes: PyTorch tensors, NumPy and JAX arrays.

`scan` runs on every save, on the training thread, so it only walks containers and collects leaves; names are made
when a new structure is met. Leaves come in a fixed order (that of the containers), each object once, and the same
order comes out of a loaded state, which is how `rebuild` knows which tensor had been a NumPy array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strata.checkpoint.errors import UnsupportedState
from strata.checkpoint.image.nested import PLAIN, Leaf, dotted, leaves, nodes, replaced

TENSOR, NUMPY, NUMPY_SCALAR, JAX = "tensor", "numpy", "numpy_scalar", "jax"

_ALL, _NONE = "all", "none"  # In a trace: which nodes of a container are leaves.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# What NumPy itself has no number type for; the bytes are the same under another name.
_SAME_BYTES = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}


@dataclass(slots=True)
class Scan:
    """The leaves of one state, as they are now."""

    leaves: list[object]
    """Each leaf object once: tensors, arrays."""
    tensors: list[torch.Tensor]
    """The same leaves as tensors over the same memory."""
    trace: list[object]
    """The containers' kinds and keys, and where in them leaves and containers are: equal traces mean equal names."""


def scan(state: object) -> Scan:
    found: list[Any] = []
    arrays: list[object] = []
    trace: list[object] = []
    inside: set[int] = set()

    def visit(nodes: Collection[Any]) -> None:
        kinds = set(map(type, nodes))
        if kinds <= _TENSORS:  # Most containers hold nothing but tensors, or none: no need to look at each.
            found.extend(nodes)
            trace.append(_ALL)
            return
        if kinds <= PLAIN:
            trace.append(_NONE)
            return
        for position, node in enumerate(nodes):
            kind = type(node)
            if kind in PLAIN:
                continue
            trace.append(position)
            if kind in _TENSORS:
                found.append(node)
            elif isinstance(node, Mapping):
                if enter(node):
                    trace.extend(node)
                    visit(node.values())
            elif isinstance(node, list | tuple):
                if enter(node):
                    visit(node)
            elif leaf_kind(node) is not None:
                found.append(node)
                arrays.append(node)

    def enter(node: Any) -> bool:
        if id(node) in inside:
            return False
        inside.add(id(node))
        trace.append(type(node))
        trace.append(len(node))
        return True

    visit((state,))
    leaves = found
    if len(set(map(id, found))) < len(found):
        leaves = list(dict(zip(map(id, found), found, strict=True)).values())
    tensors = leaves
    if arrays:
        tensors = [leaf if type(leaf) in _TENSORS else _as_tensor(leaf, state) for leaf in leaves]
    return Scan(leaves=leaves, tensors=tensors, trace=trace)


def leaf_kind(node: object) -> str | None:
    """How a leaf is called in the manifest; None for what is no leaf."""
    if isinstance(node, torch.Tensor):
        return TENSOR
    if isinstance(node, np.ndarray):
        return NUMPY
    if isinstance(node, np.generic):
        return NUMPY_SCALAR
    if type(node).__module__.startswith("jax") and hasattr(node, "__array__"):
        return JAX
    return None


def named_leaves(state: object) -> Iterator[tuple[str, object]]:
    """The leaves in `scan`'s order, each with a dotted name a person can find in the state."""
    seen: set[int] = set()
    for path, node in leaves(state, leaf=(torch.Tensor, np.ndarray), once=True):
        if type(node) not in PLAIN and leaf_kind(node) is not None and id(node) not in seen:
            seen.add(id(node))
            yield dotted(path), node


def name_of(state: object, wanted: object) -> str:
    """Where in the state an object is, for an error message; one in a set is where the set is."""
    for path, node in nodes(state, once=True):
        if node is wanted or (isinstance(node, set | frozenset) and any(each is wanted for each in node)):
            return dotted(path)
    return "…"


def rebuild(state: Any, replace: Callable[[int, Any], object], *, leaf: Leaf = torch.Tensor) -> Any:
    """The loaded state with leaf number n (a tensor, or what stands for one) replaced by `replace(n, leaf)`; containers are
    changed in place where they can be."""
    return replaced(state, replace, leaf=leaf)


def restore_kind(tensor: torch.Tensor, kind: str) -> object:
    """Turn a loaded tensor back into what had been saved; no bytes are copied for NumPy."""
    if kind == TENSOR:
        return tensor
    array = _as_numpy(tensor)
    if kind == NUMPY_SCALAR:
        return array[()]
    if kind == JAX and "jax" in sys.modules:
        return sys.modules["jax"].numpy.asarray(array)
    return array


def _as_tensor(node: object, state: object) -> torch.Tensor:
    if isinstance(node, torch.Tensor):
        hint = ""
        if type(node).__name__ == "DTensor":
            hint = "Sharded state is saved through strata.checkpoint.dcp."
        raise UnsupportedState(name=name_of(state, node), kind=type(node).__name__, hint=hint)
    array = np.asarray(node)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    as_numbers, dtype = _SAME_BYTES.get(array.dtype.name, (None, None))
    if as_numbers is not None:
        array = array.view(as_numbers)
    if any(stride % array.itemsize or stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array).reshape(array.shape)  # Torch has no such strides.
    if not array.flags.writeable:
        array = _writable_alias(array)
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UnsupportedState(name=name_of(state, node), kind=f"array of {array.dtype}") from error
    return tensor.view(dtype) if dtype is not None else tensor


class _Alias:
    """The same memory without the read-only mark, which torch warns about. Nothing here writes to it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _writable_alias(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(_Alias(array))


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    for name, (as_numbers, dtype) in _SAME_BYTES.items():
        if tensor.dtype == dtype:
            plain = tensor.view(torch.int16 if as_numbers is np.int16 else torch.uint8).numpy()
            types = sys.modules.get("ml_dtypes")
            return plain.view(getattr(types, name)) if types else plain
    return np.asarray(tensor.numpy())
