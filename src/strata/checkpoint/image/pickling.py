"""The small pickle inside an image: a fixed program that makes the tensors, and a body that is written anew each save.

A `.pt` file holds its tensors' bytes in records of their own; its pickle says how to put them together. Here that
pickle has two halves. The *prefix* makes tensor number i and puts it in memo slot i; it depends on the tensors'
geometry alone, so it is made once per structure. The *body* is the state itself, with every tensor a reference to
its memo slot; the C pickler writes it in well under a microsecond per entry, because the memo is filled beforehand
and no Python code runs per object. So numbers and strings in the state may change at every save for free.

`torch.load(weights_only=True)` reads the result. What it would refuse is refused here, when saving, by name.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from strata.checkpoint.errors import UnsupportedState
from strata.checkpoint.image.state import name_of
from strata.torch_compat.images import (
    REBUILD_PARAMETER,
    REBUILD_TENSOR,
    REBUILD_WITH_ATTRIBUTES,
    allowed_globals,
    globals_allowed_by_user,
)

PROTOCOL = 2  # The one torch.save writes and the safe unpickler knows.
_HEAD = b"\x80\x02"
_NO_HOOKS = b"N"
_TRUE, _FALSE = b"\x88", b"\x89"


class TensorRecipe(NamedTuple):
    """How a loaded tensor is put together from a record of the file. A tuple, because there may be tens of thousands."""

    record: int
    record_bytes: int
    dtype: torch.dtype
    offset: int
    """In elements, from the start of the record."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool


class _Globals:
    """Writes a global once and refers to it afterwards; owns the memo slots after the tensors'."""

    def __init__(self, first_slot: int) -> None:
        self.first_slot = first_slot
        self.slots: dict[tuple[str, str], int] = {}

    @property
    def end_slot(self) -> int:
        return self.first_slot + len(self.slots)

    def get(self, module: str, name: str) -> bytes:
        known = self.slots.get((module, name))
        if known is not None:
            return b"j" + struct.pack("<I", known)
        slot = self.slots[module, name] = self.end_slot
        return f"c{module}\n{name}\n".encode() + b"r" + struct.pack("<I", slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    program: bytes
    tensors: int
    slots: int
    """Memo slots in use: tensors, the empty bytes, then globals."""


def prefix_for(recipes: Sequence[TensorRecipe]) -> Prefix:
    names = _Globals(len(recipes) + 1)
    program = [_HEAD]
    for slot, recipe in enumerate(recipes):
        program.append(_tensor(recipe, names))
        program.append(b"r" + struct.pack("<I", slot))
    # The pickler writes empty bytes as `bytes()`, which a safe load refuses; so they are made here, in a safe way.
    program.append(names.get("_codecs", "encode") + _tuple(_string(""), _string("latin1")) + b"R")
    program.append(b"r" + struct.pack("<I", len(recipes)))
    # What is left on the stack below the state is dropped when the pickle stops.
    return Prefix(program=b"".join(program), tensors=len(recipes), slots=names.end_slot)


def body_for(
    state: object, leaves: Sequence[object], prefix: Prefix, *, trusted_source: bool = False
) -> bytes:
    """The state as a pickle that continues after `prefix`. What comes from a trusted source may hold what a safe load would
    refuse."""
    if len(leaves) != prefix.tensors:
        raise AssertionError("the body belongs to another prefix")
    buffer = io.BytesIO()
    pickler = (pickle.Pickler if trusted_source else _BodyPickler)(buffer, PROTOCOL)
    # Slots of the prefix that the body has no use for are taken by fillers, so that it numbers its own after them.
    fillers = [object() for _ in range(prefix.slots - prefix.tensors - 1)]
    known = [*leaves, b"", *fillers]
    pickler.memo = dict(zip(map(id, known), enumerate(known), strict=True))
    try:
        pickler.dump(state)
    except _Refused as refused:
        culprit = refused.culprit
        kind = culprit.__qualname__ if isinstance(culprit, type) else type(culprit).__qualname__
        raise UnsupportedState(name=name_of(state, culprit), kind=kind) from None
    return buffer.getvalue()[len(_HEAD) :]


class _Refused(Exception):
    def __init__(self, culprit: object) -> None:
        self.culprit = culprit


class _BodyPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Called for everything but plain values and containers: let through what a safe load lets through."""
        if _is_safe(obj) or _is_safe(type(obj)) or isinstance(obj, torch.dtype | torch.device):
            return NotImplemented
        raise _Refused(obj)


def _is_safe(obj: object) -> bool:
    return id(obj) in _safe_ids() or any(obj is known for known in globals_allowed_by_user().values())


@functools.cache
def _safe_ids() -> frozenset[int]:
    found_by_scan = (torch.Tensor, torch.nn.Parameter)
    return frozenset(id(known) for known in allowed_globals().values() if known not in found_by_scan)


def _tensor(recipe: TensorRecipe, names: _Globals) -> bytes:
    """The opcodes that leave one tensor on the stack."""
    rebuild = names.get(*REBUILD_TENSOR)
    storage = _tuple(
        _string("storage"),
        names.get("torch.storage", "UntypedStorage"),
        _string(str(recipe.record)),
        _string("cpu"),
        _integer(recipe.record_bytes),
    )
    facts = _tuple(
        storage + b"Q",
        _integer(recipe.offset),
        _tuple(*map(_integer, recipe.shape)),
        _tuple(*map(_integer, recipe.stride)),
        _FALSE,
        _NO_HOOKS,
        names.get("torch", str(recipe.dtype).removeprefix("torch.")),
    )
    if recipe.is_parameter:
        wrap = names.get(*REBUILD_PARAMETER)
        wants_grad = _TRUE if recipe.requires_grad else _FALSE
        return wrap + _tuple(rebuild + facts + b"R", wants_grad, _NO_HOOKS) + b"R"
    if recipe.requires_grad:
        # The rebuild function itself fails for these, so the mark is set afterwards.
        wrap = names.get(*REBUILD_WITH_ATTRIBUTES)
        mark = b"}" + _string("requires_grad") + _TRUE + b"s"
        return wrap + _tuple(rebuild, names.get("torch", "Tensor"), facts, mark) + b"R"
    return rebuild + facts + b"R"


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _string(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(raw),)) + raw
