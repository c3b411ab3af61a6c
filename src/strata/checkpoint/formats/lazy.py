"""States whose tensors stay where they are stored: what exports and imports pass on, piece by piece.

A state is nested as always, with a `LazyTensor` in the place of each tensor: it knows its type and shape, and gives its bytes
front to back in pieces of bounded size. However large a tensor is, and however it is cut or laid out in its files, no more of
it is in memory than `Memory` allows. What a checkpoint's manifest describes is verified before it is given out.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch

from strata.checkpoint.catalog.listing import where
from strata.checkpoint.catalog.manifest import Manifest, Part
from strata.checkpoint.copying.digest import WindowBuffer
from strata.checkpoint.errors import CheckpointError, Damaged, UnsupportedState
from strata.checkpoint.image.nested import PLAIN, dotted, leaves, leaves_by, replaced
from strata.checkpoint.sharded.parts import PartReader, Span
from strata.stores.protocol import Store

MEMORY_BYTES = 512 << 20
_WINDOW_BYTES = 16 << 20
_READ_AHEAD_BYTES = 16 << 10

Piece: TypeAlias = "bytes | bytearray | memoryview"


class NameClash(CheckpointError, ValueError):
    """Two values of a state would have the same name in a flat format."""

    code = "name_clash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """How much memory buffers may take, all together."""

    limit_bytes: int = MEMORY_BYTES

    @property
    def block_bytes(self) -> int:
        """For one block that is put together, and for one piece that is put into it."""
        return max(1 << 20, self.limit_bytes // 4)

    def readers(self, window_bytes: int) -> int:
        """How many parts may have a window of their own at a time."""
        return max(1, self.limit_bytes // 2 // max(1, window_bytes))


class Bytes(Protocol):
    """A file, or a stretch of one, that is read in ranges."""

    @property
    def name(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def read_ahead_bytes(self) -> int:
        """How much is worth reading where little is wanted."""
        ...

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        """A range, front to back. A piece is valid until the next is asked for."""
        ...


def read_bytes(source: Bytes, start_bytes: int, size_bytes: int, *, tensor: str = "") -> bytearray:
    """A range, all at once."""
    _check_range(source, start_bytes, size_bytes, tensor)  # Before memory is taken for it.
    found = bytearray(size_bytes)
    at = 0
    for piece in source.pieces(start_bytes, size_bytes, tensor=tensor):
        found[at : at + len(piece)] = piece
        at += len(piece)
    return found


class LocalFile:
    """A file that is open only while it is read: a folder may have thousands."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.read_ahead_bytes = _READ_AHEAD_BYTES
        self.size_bytes = os.stat(path).st_size

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        _check_range(self, start_bytes, size_bytes, tensor)
        window = memoryview(bytearray(min(size_bytes, _WINDOW_BYTES)))
        end_bytes = start_bytes + size_bytes
        with open(self.name, "rb", buffering=0) as file:
            file.seek(start_bytes)
            while start_bytes < end_bytes:
                count = file.readinto(window[: end_bytes - start_bytes])
                if not count:
                    raise Damaged(path=self.name, reason="the file became shorter while it was read")
                yield window[:count]
                start_bytes += count


class StoredFile:
    """One key of a store, without a manifest."""

    def __init__(self, store: Store, key: str, *, size_bytes: int) -> None:
        self.name = where(store, key)
        self.size_bytes = size_bytes
        self.read_ahead_bytes = 1 << 20  # Every read may be a request.
        self._store = store
        self._key = key

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        _check_range(self, start_bytes, size_bytes, tensor)
        window = memoryview(bytearray(min(size_bytes, _WINDOW_BYTES)))
        for at in range(start_bytes, start_bytes + size_bytes, _WINDOW_BYTES):
            view = window[: start_bytes + size_bytes - at]
            self._store.read_into(self._key, view, offset=at)
            yield view


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of a file that is a file of its own."""

    file: Bytes
    start_bytes: int
    size_bytes: int

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def read_ahead_bytes(self) -> int:
        return self.file.read_ahead_bytes

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        _check_range(self, start_bytes, size_bytes, tensor)
        return self.file.pieces(self.start_bytes + start_bytes, size_bytes, tensor=tensor)


class Parts:
    """The verified parts of a checkpoint. Several are read side by side, each through a window of its own."""

    def __init__(self, store: Store, manifest: Manifest, memory: Memory) -> None:
        self._store = store
        self._manifest = manifest
        self._most = memory.readers(max(map(_window_bytes, manifest.parts)))
        self._readers: OrderedDict[int, PartReader] = OrderedDict()
        self._parts = [
            VerifiedPart(parts=self, number=number, name=where(store, part.key), size_bytes=part.size_bytes)
            for number, part in enumerate(manifest.parts)
        ]

    def __getitem__(self, number: int) -> VerifiedPart:
        return self._parts[number]

    def reader(self, number: int) -> PartReader:
        found = self._readers.get(number)
        if found is None:
            while len(self._readers) >= self._most:
                self._readers.popitem(last=False)
            part = self._manifest.parts[number]
            window = WindowBuffer(_window_bytes(part))
            found = self._readers[number] = PartReader(self._store, part, window)
        self._readers.move_to_end(number)
        return found


def _window_bytes(part: Part) -> int:
    """What is read of a part at once: as many of its chunks as make a good read."""
    return max(1, min(part.size_bytes, max(part.digest.chunk_bytes, _WINDOW_BYTES)))


@dataclass(eq=False, frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    parts: Parts
    number: int
    name: str
    size_bytes: int
    read_ahead_bytes: int = _READ_AHEAD_BYTES

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        _check_range(self, start_bytes, size_bytes, tensor)
        span = Span(part=self.number, offset_bytes=start_bytes, size_bytes=size_bytes)
        for _, piece in self.parts.reader(self.number).pieces(span, name=tensor):
            yield piece


def _check_range(source: Bytes, start_bytes: int, size_bytes: int, tensor: str) -> None:
    if start_bytes < 0 or size_bytes < 0 or start_bytes + size_bytes > source.size_bytes:
        raise Damaged(
            path=source.name,
            reason=f"it has {source.size_bytes} bytes, fewer than its index needs",
            tensors=(tensor,) if tensor else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A block of a tensor, strided, in a file."""

    file: Bytes
    start_bytes: int
    """Of the element with the lowest address."""
    stride: tuple[int, ...]
    """In elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A block of a tensor, and where in the tensor it belongs."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    region: Region

    def at_origin(self) -> Chunk:
        """The same block as a tensor of its own."""
        return replace(self, offsets=(0,) * len(self.sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stretch of a file that tensors which shared memory are views of."""

    file: Bytes
    start_bytes: int
    size_bytes: int

    @property
    def key(self) -> Hashable:
        return (id(self.file), self.start_bytes, self.size_bytes)


@dataclass(eq=False, slots=True, kw_only=True)
class LazyTensor:
    """A tensor that is still in its files. Compared by identity, as tensors in a state are."""

    name: str
    """For messages: where it was found."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    memory: Memory
    record: Record | None = None
    """Where the bytes are as they were in memory, where that is known and they are values: for keeping views and ties."""
    requires_grad: bool = False
    is_parameter: bool = False
    is_conj: bool = False
    is_neg: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stride(self) -> tuple[int, ...]:
        """In the record."""
        return self.chunks[0].region.stride

    @property
    def offset(self) -> int:
        """In the record, in elements."""
        assert self.record is not None
        return (self.chunks[0].region.start_bytes - self.record.start_bytes) // self.dtype.itemsize

    @property
    def identity(self) -> Hashable:
        """Equal for tensors that are the same bytes of the same files."""
        places = tuple(
            (id(c.region.file), c.region.start_bytes, c.region.stride, c.offsets, c.sizes)
            for c in self.chunks
        )
        return (self.dtype, self.shape, self.is_conj, self.is_neg, places)

    def by_value(self, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> LazyTensor:
        """A block of it as a plain tensor in rows."""
        return replace(
            self,
            shape=shape,
            chunks=chunks,
            record=None,
            requires_grad=False,
            is_parameter=False,
        )

    def pieces(self) -> Iterator[memoryview]:
        """The values in rows, front to back."""
        self._check_covered()
        if not self.size_bytes:
            return
        in_rows = sorted(self.chunks, key=lambda chunk: chunk.offsets)
        if not self._is_lazy and all(map(self._is_rows, in_rows)) and self._follow(in_rows):
            for chunk in in_rows:
                yield from self._run(chunk.region, chunk.sizes)
            return
        for offsets, sizes in row_blocks(self.shape, self.memory.block_bytes // self.dtype.itemsize):
            yield memoryview(_raw(self.block(offsets, sizes)).numpy().data)

    def block(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A block of the tensor, in memory."""
        out = torch.zeros(tuple(sizes), dtype=self.dtype)
        filled = 0
        for chunk in self.chunks:
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            lengths = [b - a for a, b in zip(low, high, strict=True)]
            if any(length <= 0 for length in lengths):
                continue
            target = out
            start = chunk.region.start_bytes
            for dimension, (at, length) in enumerate(zip(low, lengths, strict=True)):
                target = target.narrow(dimension, at - offsets[dimension], length)
                start += (
                    (at - chunk.offsets[dimension]) * chunk.region.stride[dimension] * self.dtype.itemsize
                )
            self._fill(target, chunk.region.file, start, chunk.region.stride)
            filled += math.prod(lengths)
        if filled < math.prod(sizes):
            raise self._has_holes()
        if self.is_conj:
            out = out.conj().resolve_conj()
        return torch.neg(out) if self.is_neg else out

    def _fill(self, out: torch.Tensor, file: Bytes, start_bytes: int, stride: tuple[int, ...]) -> None:
        """Copy a strided region of a file, in parts that fit the memory."""
        item_bytes = self.dtype.itemsize
        extent_bytes = (sum((n - 1) * s for n, s in zip(out.shape, stride, strict=True)) + 1) * item_bytes
        if out.is_contiguous() and _is_contiguous(tuple(out.shape), stride):
            flat, at = _raw(out), 0
            for piece in file.pieces(start_bytes, extent_bytes, tensor=self.name):
                flat[at : at + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
                at += len(piece)
        elif extent_bytes <= self.memory.block_bytes or out.numel() == 1:
            raw = torch.frombuffer(
                read_bytes(file, start_bytes, extent_bytes, tensor=self.name), dtype=torch.uint8
            )
            out.copy_(raw.view(self.dtype).as_strided(tuple(out.shape), stride))
        else:
            spread = [(n - 1) * s for n, s in zip(out.shape, stride, strict=True)]
            widest = spread.index(max(spread))
            half = out.shape[widest] // 2
            rest_bytes = start_bytes + half * stride[widest] * item_bytes
            self._fill(out.narrow(widest, 0, half), file, start_bytes, stride)
            self._fill(out.narrow(widest, half, out.shape[widest] - half), file, rest_bytes, stride)

    @property
    def _is_lazy(self) -> bool:
        """Its values are others than its bytes."""
        return self.is_conj or self.is_neg

    def _is_rows(self, chunk: Chunk) -> bool:
        return chunk.sizes[1:] == self.shape[1:] and _is_contiguous(chunk.sizes, chunk.region.stride)

    def _follow(self, chunks: Sequence[Chunk]) -> bool:
        """Whether chunks of rows come one after the other, without overlap."""
        if not self.shape:
            return len(chunks) == 1
        at = 0
        for chunk in chunks:
            if chunk.offsets[0] != at and chunk.sizes[0]:
                return False
            at += chunk.sizes[0]
        return at == self.shape[0]

    def _run(self, region: Region, sizes: Sequence[int]) -> Iterator[memoryview]:
        return region.file.pieces(
            region.start_bytes, math.prod(sizes) * self.dtype.itemsize, tensor=self.name
        )

    def _check_covered(self) -> None:
        """A tensor that its chunks do not fill must not come out with holes of any content."""
        if sum(math.prod(chunk.sizes) for chunk in self.chunks) < math.prod(self.shape):
            raise self._has_holes()

    def _has_holes(self) -> Damaged:
        path = self.chunks[0].region.file.name if self.chunks else self.name
        return Damaged(path=path, reason=f"the chunks of '{self.name}' do not fill it", tensors=(self.name,))


def row_blocks(shape: Sequence[int], most_elements: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Blocks of at most so many elements that are a tensor's rows one after the other: offsets and sizes."""
    inner = len(shape)
    while inner and math.prod(shape[inner - 1 :]) <= most_elements:
        inner -= 1
    if not inner:
        yield (0,) * len(shape), tuple(shape)
        return
    split = inner - 1  # Dimensions after it are complete in each block, those before it have one index.
    rest = tuple(shape[inner:])
    rows = max(1, most_elements // math.prod(rest))
    for prefix in itertools.product(*(range(n) for n in shape[:split])):
        for at in range(0, shape[split], rows):
            sizes = (*(1 for _ in prefix), min(rows, shape[split] - at), *rest)
            yield (*prefix, at, *(0 for _ in rest)), sizes


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor in rows, as torch has them."""
    return tuple(math.prod(max(size, 1) for size in shape[at + 1 :]) for at in range(len(shape)))


def in_file(
    name: str, file: Bytes, start_bytes: int, dtype: torch.dtype, shape: Sequence[int], memory: Memory
) -> LazyTensor:
    """A tensor that lies in one piece of a file, in rows."""
    size_bytes = math.prod(shape) * dtype.itemsize
    region = Region(file=file, start_bytes=start_bytes, stride=contiguous_stride(shape))
    chunk = Chunk(offsets=(0,) * len(shape), sizes=tuple(shape), region=region)
    return LazyTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        chunks=(chunk,),
        memory=memory,
        record=Record(file=file, start_bytes=start_bytes, size_bytes=size_bytes),
    )


class InMemory:
    """A tensor that is in memory already, as bytes: from files that cannot be read in parts."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._raw = _raw(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        self.size_bytes = self._raw.numel()
        self.read_ahead_bytes = _READ_AHEAD_BYTES

    def pieces(self, start_bytes: int, size_bytes: int, *, tensor: str) -> Iterator[memoryview]:
        _check_range(self, start_bytes, size_bytes, tensor)
        yield memoryview(self._raw.numpy().data)[start_bytes : start_bytes + size_bytes]


def held(value: Any, *, name: str, memory: Memory) -> Any:
    """A value that is in memory, with its tensors as lazy ones. Raises `UnsupportedState` for those that are not plain."""
    if type(value) in PLAIN:
        return value
    names = {
        id(leaf): dotted((name, *path) if name else path) for path, leaf in leaves(value, leaf=torch.Tensor)
    }

    def made(_: int, tensor: torch.Tensor) -> LazyTensor:
        check_plain(names[id(tensor)], tensor)
        found = in_file(names[id(tensor)], InMemory(name, tensor), 0, tensor.dtype, tensor.shape, memory)
        found.requires_grad = tensor.requires_grad
        found.is_parameter = isinstance(tensor, torch.nn.Parameter)
        return found

    return replaced(value, made, leaf=torch.Tensor)


def loaded(value: Any) -> Any:
    """A value with its lazy tensors in memory."""

    def made(_: int, lazy: LazyTensor) -> torch.Tensor:
        tensor = lazy.block((0,) * len(lazy.shape), lazy.shape)
        if lazy.is_parameter:
            return torch.nn.Parameter(tensor, lazy.requires_grad)
        return tensor.requires_grad_() if lazy.requires_grad else tensor

    return value if type(value) in PLAIN else replaced(value, made, leaf=LazyTensor)


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises `UnsupportedState` for a tensor that is more than numbers in memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedState(name=name, kind=type(tensor).__name__)
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = f"{tensor.layout} {tensor.device.type} tensor of {tensor.dtype}".replace("torch.", "")
        raise UnsupportedState(name=name, kind=kind, hint="Save it as ordinary dense tensors.")


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True


Path: TypeAlias = tuple["str | int", ...]


def flatten(state: Mapping[Any, Any], *, keep_keys: bool = False) -> tuple[dict[str, Any], dict[str, Path]]:
    """Names and paths of what is in a state, by the rules of DCP: dictionaries are entered, sequences only where tensors or
    dictionaries are in them. Numbers in a path are places in sequences. A dictionary with other keys than text is one value
    where there are no tensors in it; where there are, its keys become text, unless they are to be kept."""
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}

    def inner(path: Path, node: Any) -> Iterable[tuple[str | int, Any]] | None:
        if isinstance(node, Mapping):
            is_entered = all(isinstance(key, str) for key in node) or (not keep_keys and _has_tensors(node))
            return ((str(key), value) for key, value in node.items()) if is_entered else None
        return enumerate(node) if isinstance(node, list | tuple) and any(map(_is_entered, node)) else None

    for path, node in leaves_by(state, inner):
        name = ".".join(map(str, path))
        if name in values:
            raise NameClash(f"Two values would be called '{name}'.", hint="Choose one part with --key.")
        values[name], paths[name] = node, path
    return values, paths


def _is_entered(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return any(map(_is_entered, node))
    return isinstance(node, LazyTensor | Mapping)


def _has_tensors(node: Any) -> bool:
    return any(isinstance(leaf, LazyTensor) for _, leaf in leaves(node, leaf=LazyTensor))


def nest(values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Undo the flattening: text keys are entries of dictionaries, numbers places in lists. Raises `ValueError` where names
    contradict each other."""
    root: dict[str, Any] = {}
    try:
        for name, value in values.items():
            keys = paths.get(name, (name,))
            node: Any = root
            for key, following in itertools.pairwise(keys):
                node = _entered(node, key, [] if isinstance(following, int) else {})
            _put(node, keys[-1], value)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError("the names contradict each other") from error
    return root


def _entered(node: Any, key: str | int, fresh: list[Any] | dict[str, Any]) -> Any:
    if isinstance(node, list):
        if not isinstance(key, int):
            raise TypeError("text as a place in a list")
        if key >= len(node) or node[key] is None:
            _put(node, key, fresh)
        return node[key]
    return node.setdefault(key, fresh)


def _put(node: Any, key: str | int, value: Any) -> None:
    if isinstance(node, list) and isinstance(key, int):
        node.extend([None] * (key + 1 - len(node)))
    node[key] = value
