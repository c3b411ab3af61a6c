"""Opening an image quickly, where its pickle says nothing but what Strata's own pickles say.

`torch.load(weights_only=True)` interprets a pickle in Python and takes a tenth of a millisecond for each tensor. The pickle of
an image (see `pickling`) needs very few words: those that make tensors, and ordered dictionaries. Python's own unpickler reads
it twenty times as fast, and here it knows these words and no others. Each stands for an object that cannot be changed and
does nothing but describe a tensor, so whatever a pickle does with them, nothing happens; a pickle with any other word, or one
that does not fit its manifest, is left to `torch.load`, which decides what to do with it.

`read_outline` needs the first bytes of a file only: a state with descriptions where its tensors belong, which is what a load
in place starts from. `open_own` gives the state that `torch.load(mmap=True)` gives: tensors over a private mapping of the
file, one storage for each record, shared by the tensors that shared it.
"""

from __future__ import annotations

import collections
import functools
import io
import math
import mmap
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strata.checkpoint.catalog.manifest import TensorEntry, no_collection
from strata.checkpoint.image.pickling import TensorRecipe
from strata.checkpoint.image.state import rebuild
from strata.torch_compat.images import REBUILD_PARAMETER, REBUILD_TENSOR, REBUILD_WITH_ATTRIBUTES

_HEADER = struct.Struct("<4s22xHH")
"""What a zip file begins with: a signature, and how long the first record's name and the field after it are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A state with `TensorRecipe`s where its tensors belong."""

    state: Any
    uses: Counter[int]
    """By how many tensors each record is used."""


def head_bytes(entries: Sequence[TensorEntry], size_bytes: int) -> int:
    """How much of an image of so many bytes `read_outline` needs: all before the first tensor."""
    return min((entry.offset_bytes for entry in entries), default=size_bytes)


@no_collection()
def read_outline(head: memoryview | bytes) -> Outline:
    """The outline of an image, from its first bytes. Raises any exception for what is not known here."""
    if len(head) < _HEADER.size:
        raise ValueError("the file is too short to begin with a pickle")
    signature, name_bytes, extra_bytes = _HEADER.unpack_from(head)
    name = bytes(head[_HEADER.size : _HEADER.size + name_bytes])
    if signature != b"PK\3\4" or not name.endswith(b"/data.pkl"):
        raise ValueError("the pickle is not where Strata puts it")
    unpickler = _Unpickler(io.BytesIO(head[_HEADER.size + name_bytes + extra_bytes :]))
    return Outline(state=unpickler.load(), uses=unpickler.uses)


@no_collection()
def open_own(path: str | Path, entries: Sequence[TensorEntry]) -> Any:
    """The state in an image; `entries` are the tensors of its manifest. Raises any exception for what is not known here."""
    with open(path, "rb") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    outline = read_outline(private[: head_bytes(entries, len(private))])
    tensors = _Tensors(private, entries, outline.uses)
    return put_in_place(outline, tensors.make)


def put_in_place(outline: Outline, make: Callable[[int, TensorRecipe], object]) -> Any:
    """The state of an outline, with `make(n, recipe)` for tensor number n, in the order of the manifest's table."""

    def checked(number: int, recipe: Any) -> object:
        if type(recipe) is not TensorRecipe:
            raise ValueError("the state holds tensor metadata without data")
        return make(number, recipe)

    return rebuild(outline.state, checked, leaf=(TensorRecipe, _Storage, _Word))


def check_recipe(entry: TensorEntry, recipe: TensorRecipe) -> None:
    """Raise `ValueError` where a pickle says something else about a tensor than its manifest."""
    if entry.shape != recipe.shape or recipe.dtype is not getattr(torch, entry.dtype):
        raise ValueError(f"'{entry.name}' is not what its manifest says")


def is_dense(recipe: TensorRecipe, entry: TensorEntry) -> bool:
    """Whether the bytes of the table's entry are the tensor in rows, and nothing else."""
    if entry.size_bytes != math.prod(recipe.shape) * recipe.dtype.itemsize:
        return False
    return recipe.stride == _in_rows(recipe.shape) or not entry.size_bytes


@functools.lru_cache(maxsize=4096)
def _in_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor in rows, as torch makes them."""
    return tuple(torch.empty(shape, device="meta").stride())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.uses: Counter[int] = Counter()
        """By how many tensors each record is used."""

    def find_class(self, module: str, name: str) -> object:
        return _WORDS[module, name]

    def persistent_load(self, description: Any) -> _Storage:
        _, _, record, _, size_bytes = description
        storage = _Storage(int(record), size_bytes)
        self.uses[storage.record] += 1
        return storage


class _Tensors:
    """Makes tensors over the memory of a file."""

    def __init__(self, file: mmap.mmap, entries: Sequence[TensorEntry], uses: Counter[int]) -> None:
        self._file = file
        self._entries = entries
        self._uses = uses
        self._shared: dict[int, torch.Tensor] = {}

    def make(self, number: int, recipe: TensorRecipe) -> torch.Tensor:
        entry = self._entries[number]
        check_recipe(entry, recipe)
        return made_of(self._memory(entry, recipe), recipe)

    def _memory(self, entry: TensorEntry, recipe: TensorRecipe) -> torch.Tensor:
        """The record a tensor is in, as one row of the tensor's type."""
        item_bytes = recipe.dtype.itemsize
        length, start_bytes = (
            recipe.record_bytes // item_bytes,
            entry.offset_bytes - recipe.offset * item_bytes,
        )
        if not length:
            return torch.empty(0, dtype=recipe.dtype)
        if self._uses[recipe.record] == 1:
            return torch.frombuffer(self._file, dtype=recipe.dtype, count=length, offset=start_bytes)
        shared = self._shared.get(recipe.record)
        if shared is None:
            shared = torch.frombuffer(
                self._file, dtype=torch.uint8, count=recipe.record_bytes, offset=start_bytes
            )
            self._shared[recipe.record] = shared
        return shared[: length * item_bytes].view(recipe.dtype)


def made_of(record: torch.Tensor, recipe: TensorRecipe) -> torch.Tensor:
    """A tensor, of the record it is in as one row of the tensor's type."""
    tensor = record.as_strided(recipe.shape, recipe.stride, recipe.offset)
    if recipe.is_parameter:
        return torch.nn.Parameter(tensor, recipe.requires_grad)
    return tensor.requires_grad_() if recipe.requires_grad else tensor


class _Storage(NamedTuple):
    """What a pickle says about one record."""

    record: int
    size_bytes: int


class _Word:
    """One of the things a pickle can name. Without any slots, in every subclass, there is nothing that could be set."""

    __slots__ = ()


class _StorageType(_Word):
    __slots__ = ()


class _TensorType(_Word):
    __slots__ = ()


class _RebuildTensor(_Word):
    __slots__ = ()

    def __call__(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        hooks: None,
        dtype: torch.dtype,
    ) -> TensorRecipe:
        return TensorRecipe(storage[0], storage[1], dtype, offset, shape, stride, requires_grad, False)


class _RebuildParameter(_Word):
    __slots__ = ()

    def __call__(self, recipe: TensorRecipe, requires_grad: bool, hooks: None) -> TensorRecipe:
        return recipe._replace(requires_grad=requires_grad, is_parameter=True)


class _RebuildWithMark(_Word):
    __slots__ = ()

    def __call__(
        self, rebuild_tensor: _RebuildTensor, kind: _TensorType, facts: tuple[Any, ...], mark: object
    ) -> TensorRecipe:
        if type(rebuild_tensor) is not _RebuildTensor or mark != {"requires_grad": True}:
            raise ValueError("a tensor is built in a way that Strata does not use")
        return rebuild_tensor(*facts)._replace(requires_grad=True)


class _Encode(_Word):
    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if type(text) is not str or encoding != "latin1":
            raise ValueError("bytes are built in a way that Strata does not use")
        return text.encode("latin1")


_WORDS: dict[tuple[str, str], object] = {
    REBUILD_TENSOR: _RebuildTensor(),
    REBUILD_PARAMETER: _RebuildParameter(),
    REBUILD_WITH_ATTRIBUTES: _RebuildWithMark(),
    ("torch.storage", "UntypedStorage"): _StorageType(),
    ("torch", "Tensor"): _TensorType(),
    ("_codecs", "encode"): _Encode(),
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{("torch", name): each for name, each in vars(torch).items() if isinstance(each, torch.dtype)},
}
