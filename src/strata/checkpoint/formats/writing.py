"""Lazy states as files of other tools, written front to back: `.pt`, safetensors, Hugging Face and DCP folders.

Whatever is written goes through once and is never held: one piece of one tensor at a time. A `.pt` has true checksums, for
other zip tools, and opens with `torch.load(weights_only=True)`; tensors that shared memory share it again. A DCP folder is one
that PyTorch's own `FileSystemReader` reads, with the chunks of a sharded checkpoint as they were.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from strata.checkpoint.catalog.manifest import plain_json
from strata.checkpoint.errors import UnsupportedState
from strata.checkpoint.formats.lazy import LazyTensor, Piece, contiguous_stride, flatten
from strata.checkpoint.formats.reading import DCP_METADATA, HF_INDEX, PATHS, SAFETENSORS_DTYPES, VALUES
from strata.checkpoint.image.nested import leaves
from strata.checkpoint.image.pickling import TensorRecipe, body_for, prefix_for
from strata.torch_compat.checkpoints import StorageInfo

_ALIGNMENT_BYTES = 64  # As torch aligns records.
_PADDING = 0x4246  # The extra field that torch pads with.
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_LARGEST_DATA_FILE_BYTES = 4 << 30

OpenFile: TypeAlias = "Callable[[str], AbstractContextManager[Writes]]"
"""A new file of the folder that is written."""


class Writes(Protocol):
    def write(self, data: Piece, /) -> object: ...


class Counting:
    """A file that is written front to back, and how much of it there is."""

    def __init__(self, file: Writes) -> None:
        self._file = file
        self.size_bytes = 0

    def write(self, data: Piece) -> int:
        self._file.write(data)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """What is written is handed on at once."""


def tensors_of(state: Any) -> list[LazyTensor]:
    """Each once, in the order of the containers."""
    found = [leaf for _, leaf in leaves(state, leaf=LazyTensor) if isinstance(leaf, LazyTensor)]
    return list({id(each): each for each in found}.values())


def count_tensors(state: Any) -> int:
    """By names: a tensor that has two counts twice."""
    return sum(isinstance(leaf, LazyTensor) for _, leaf in leaves(state, leaf=LazyTensor))


# --- .pt ------------------------------------------------------------------------------------------------------


def write_pt(state: Any, file: Counting, *, trusted_source: bool = False) -> None:
    """The state as `torch.save` would have written it. A trusted source's objects are written as they are."""
    tensors = tensors_of(state)
    numbers: dict[Hashable, int] = {}
    records: list[LazyTensor] = []
    recipes = []
    for tensor in tensors:
        key = tensor.record.key if tensor.record is not None else tensor.identity
        if key not in numbers:
            numbers[key] = len(records)
            records.append(tensor)
        recipes.append(_recipe(tensor, numbers[key]))
    prefix = prefix_for(recipes)
    program = prefix.program + body_for(state, tensors, prefix, trusted_source=trusted_source)
    with _Archive(file) as archive:
        archive.add("data.pkl", len(program), (program,))
        archive.add("byteorder", 6, (b"little",))
        for number, tensor in enumerate(records):
            archive.add(f"data/{number}", _record_bytes(tensor), _record_pieces(tensor))
        archive.add("version", 2, (b"3\n",))


def _recipe(tensor: LazyTensor, number: int) -> TensorRecipe:
    return TensorRecipe(
        record=number,
        record_bytes=_record_bytes(tensor),
        dtype=tensor.dtype,
        offset=tensor.offset if tensor.record is not None else 0,
        shape=tensor.shape,
        stride=tensor.stride if tensor.record is not None else contiguous_stride(tensor.shape),
        requires_grad=tensor.requires_grad,
        is_parameter=tensor.is_parameter,
    )


def _record_bytes(tensor: LazyTensor) -> int:
    return tensor.size_bytes if tensor.record is None else tensor.record.size_bytes


def _record_pieces(tensor: LazyTensor) -> Iterator[memoryview]:
    record = tensor.record
    if record is None:
        return tensor.pieces()
    return record.file.pieces(record.start_bytes, record.size_bytes, tensor=tensor.name)


class _Archive:
    """A zip that `torch.load` reads, written front to back: checksums follow the records."""

    def __init__(self, file: Counting) -> None:
        self._file = file
        self._start_bytes = file.size_bytes
        self._zip = zipfile.ZipFile(_Unseekable(file), "w", zipfile.ZIP_STORED)  # type: ignore[call-overload]

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._zip.close()
        else:
            self._zip.fp = None  # Nothing more is written, also when the object goes.

    def add(self, name: str, size_bytes: int, pieces: Iterable[Piece]) -> None:
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = size_bytes
        is_large = size_bytes >= 1 << 31
        header_bytes = _LOCAL_HEADER_BYTES + len(info.filename) + 4 + (_ZIP64_EXTRA_BYTES if is_large else 0)
        begin_bytes = self._file.size_bytes - self._start_bytes + header_bytes
        padding_bytes = -begin_bytes % _ALIGNMENT_BYTES
        info.extra = struct.pack("<HH", _PADDING, padding_bytes) + bytes(padding_bytes)
        with self._zip.open(info, "w", force_zip64=is_large) as record:
            for piece in pieces:
                record.write(piece)


class _Unseekable:
    """What the zip module takes for a pipe."""

    def __init__(self, file: Counting) -> None:
        self.write = file.write
        self.flush = file.flush


# --- safetensors and Hugging Face -----------------------------------------------------------------------------


def write_safetensors(state: Any, file: Counting) -> tuple[str, ...]:
    """All tensors of a state by their dotted names, and in the metadata what JSON can hold of the rest. Returns the names of
    what is left out."""
    values, paths = flatten(state if isinstance(state, Mapping) else {"state": state})
    tensors = {name: value for name, value in values.items() if isinstance(value, LazyTensor)}
    others: dict[str, Any] = {}
    left_out = []
    for name, value in values.items():
        if name not in tensors:
            try:
                others[name] = plain_json(value.item() if isinstance(value, np.generic) else value, name=name)
            except ValueError:
                left_out.append(name)
    metadata = {"format": "pt"}
    if others:
        metadata[VALUES] = json.dumps(others)
    if any(len(path) > 1 for path in paths.values()):
        metadata[PATHS] = json.dumps({name: path for name, path in paths.items() if name not in left_out})
    _write_tensors(tensors, metadata, file)
    return tuple(left_out)


def _write_tensors(tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str], file: Counting) -> None:
    """Length of the header, the header, then the tensors' bytes: the whole format. Largest number types first, so that
    each tensor is aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    offset_bytes = 0
    for name, tensor in ordered:
        dtype = _SAFETENSORS_NAMES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedState(
                name=name,
                kind=f"tensor of {tensor.dtype}",
                hint="safetensors has no such numbers; export to .pt.",
            )
        end_bytes = offset_bytes + tensor.size_bytes
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for _, tensor in ordered:
        for piece in tensor.pieces():
            file.write(piece)


def write_hf(model: Mapping[str, Any], open_file: OpenFile, *, max_shard_bytes: int) -> tuple[str, ...]:
    """The weights as Hugging Face's libraries load them: safetensors of at most so many bytes, but at least one tensor, and
    an index. Returns the names of what is left out."""
    values, _ = flatten(model)
    shards: list[dict[str, LazyTensor]] = [{}]
    left_out = []
    filled_bytes = 0
    for name, value in values.items():
        if not isinstance(value, LazyTensor):
            left_out.append(name)
            continue
        if shards[-1] and filled_bytes + value.size_bytes > max_shard_bytes:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = value
        filled_bytes += value.size_bytes
    weights: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with open_file(file_name) as file:
            _write_tensors(shard, {"format": "pt"}, Counting(file))
        weights |= dict.fromkeys(shard, file_name)
    total_bytes = sum(tensor.size_bytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weights}
    with open_file(HF_INDEX) as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    return tuple(left_out)


# --- DCP ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Item:
    """What is stored as one: a chunk of a tensor, or an object."""

    index: MetadataIndex
    content: Any


def write_dcp(state: Mapping[Any, Any], open_file: OpenFile) -> None:
    values, paths = flatten(state)
    entries: dict[str, Any] = {}
    items: list[_Item] = []
    for name, value in values.items():
        if not isinstance(value, LazyTensor):
            entries[name] = BytesStorageMetadata()
            items.append(_Item(MetadataIndex(name), value))
            continue
        chunks = _chunks(value)
        entries[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=value.dtype, requires_grad=value.requires_grad),
            size=torch.Size(value.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(chunk.shape))
                for offsets, chunk in chunks
            ],
        )
        for number, (offsets, chunk) in enumerate(chunks):
            items.append(_Item(MetadataIndex(name, torch.Size(offsets), number), chunk))
    storage: dict[MetadataIndex, StorageInfo] = {}
    for number, group in enumerate(_grouped(items)):
        file_name = f"__0_{number}.distcp"
        with open_file(file_name) as opened:
            file = Counting(opened)
            for item in group:
                start_bytes = file.size_bytes
                _write_item(item, file)
                length_bytes = file.size_bytes - start_bytes
                storage[item.index] = StorageInfo(file_name, start_bytes, length_bytes)
    metadata = Metadata(
        state_dict_metadata=entries, planner_data=paths, storage_data=storage, storage_meta=StorageMeta()
    )
    with open_file(DCP_METADATA) as opened:
        opened.write(pickle.dumps(metadata))


def _write_item(item: _Item, file: Counting) -> None:
    if isinstance(item.content, LazyTensor):
        write_pt(item.content, file)
    else:
        raw = io.BytesIO()
        torch.save(item.content, raw)
        file.write(raw.getbuffer())


def _chunks(tensor: LazyTensor) -> list[tuple[tuple[int, ...], LazyTensor]]:
    """The chunks a tensor was saved in, as tensors; all of it where it was saved as one."""
    if len(tensor.chunks) < 2:
        return [((0,) * len(tensor.shape), tensor.by_value(tensor.shape, tensor.chunks))]
    return [
        (chunk.offsets, tensor.by_value(chunk.sizes, (chunk.at_origin(),)))
        for chunk in tensor.chunks
        if math.prod(chunk.sizes)
    ]


def _grouped(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """By the files they go to."""
    group: list[_Item] = []
    filled_bytes = 0
    for item in items:
        size_bytes = item.content.size_bytes if isinstance(item.content, LazyTensor) else 0
        if group and filled_bytes + size_bytes > _LARGEST_DATA_FILE_BYTES:
            yield group
            group, filled_bytes = [], 0
        group.append(item)
        filled_bytes += size_bytes
    if group:
        yield group
