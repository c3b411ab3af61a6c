"""What PyTorch's distributed checkpoints call metadata, as plain JSON and back.

PyTorch pickles this; here every type it may hold is written out one by one, and anything else is refused when saving.
Reading believes nothing: each place must lie within its part and have exactly the bytes its tensor needs, so a
manifest from elsewhere can neither run code nor ask for memory that its parts do not account for.

Tensors are described by name, number type, full size and chunks; a chunk by where it belongs in the tensor and where
its bytes are. Objects (numbers, strings, options of optimizers) by name and where their bytes are. `paths` tells how
names were made from nested keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from strata.checkpoint.catalog.manifest import Json, Manifest, Part
from strata.checkpoint.errors import CheckpointError, Damaged, NewerFormat, UnsupportedState
from strata.checkpoint.sharded.parts import Span
from strata.checkpoint.sharded.plan import DTYPES

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One chunk of a tensor, or one object, as it lies in a part. What DCP hands back as `storage_data`."""

    name: str
    span: Span
    dtype: torch.dtype | None = None
    """None for an object."""
    shape: tuple[int, ...] = ()


def encode(metadata: Metadata, spans: Mapping[MetadataIndex, Span]) -> Json:
    """The metadata with every item's place. Raises `UnsupportedState` for what JSON would not bring back, and
    `CheckpointError` for an item that no rank has written."""
    entries: list[Json] = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            entries.append(["object", name, _span_of(spans, MetadataIndex(name))])
        elif isinstance(entry, TensorStorageMetadata):
            entries.append(_encode_tensor(name, entry, spans))
        else:
            raise UnsupportedState(name=name, kind=type(entry).__qualname__)
    return {"schema": SCHEMA, "entries": entries, "paths": _encode_paths(metadata.planner_data)}


def decode(manifest: Manifest, *, path: str) -> Metadata:
    """The metadata of a sharded checkpoint, with a `Stored` for each item. Raises `Damaged` unless all of it fits."""
    try:
        return _decode(manifest.layout, manifest.parts, path)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise Damaged(
            path=path, reason=f"the layout of its parts is not readable ({type(error).__name__})"
        ) from error


def stored_in(metadata: Metadata) -> Iterator[Stored]:
    """Everything the parts hold, in the order of the metadata."""
    yield from metadata.storage_data.values()


def named_spans(manifest: Manifest, *, path: str) -> list[tuple[str, Span]]:
    """The name and place of everything in the parts: for saying what a damaged byte belongs to."""
    return [(stored.name, stored.span) for stored in stored_in(decode(manifest, path=path))]


def _encode_tensor(
    name: str, entry: TensorStorageMetadata, spans: Mapping[MetadataIndex, Span]
) -> Sequence[Json]:
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    if dtype not in DTYPES or entry.properties.layout != torch.strided:
        kind = f"{entry.properties.layout} tensor of {dtype}".replace("torch.", "")
        raise UnsupportedState(name=name, kind=kind, hint="Save it as ordinary dense tensors.")
    chunks: list[Json] = [
        [list(chunk.offsets), list(chunk.sizes), _span_of(spans, MetadataIndex(name, chunk.offsets))]
        for chunk in entry.chunks
    ]
    return ["tensor", name, dtype, list(entry.size), bool(entry.properties.requires_grad), chunks]


def _span_of(spans: Mapping[MetadataIndex, Span], index: MetadataIndex) -> Json:
    span = spans.get(index)
    if span is None:
        where = f" at {tuple(index.offset)}" if index.offset is not None else ""
        raise CheckpointError(
            f"'{index.fqn}'{where} was planned, but no rank has written it.",
            hint="Every rank of the process group must take part in the save.",
        )
    return [span.part, span.offset_bytes, span.size_bytes]


def _encode_paths(planner_data: Any) -> Json:
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise UnsupportedState(name="planner_data", kind=type(planner_data).__qualname__)
    paths: list[Json] = []
    for name, keys in planner_data.items():
        for key in keys:
            if type(key) not in (str, int):
                raise UnsupportedState(
                    name=str(name),
                    kind=f"value under a key of type {type(key).__qualname__}",
                    hint="Use strings or whole numbers as keys of the state.",
                )
        paths.append([str(name), list(keys)])
    return paths


def _decode(layout: Any, parts: Sequence[Part], path: str) -> Metadata:
    if layout["schema"] > SCHEMA:
        raise NewerFormat(path=path, what="layout schema", found=layout["schema"], newest=SCHEMA)
    if layout["schema"] != SCHEMA:
        raise Damaged(path=path, reason=f"layout schema {layout['schema']!r} is not {SCHEMA}")
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    for kind, name, *facts in layout["entries"]:
        if type(name) is not str or name in entries:
            _refuse(path, f"it names {name!r} twice, or not by a string")
        if kind == "object":
            (place,) = facts
            entries[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = Stored(name=name, span=_span(place, parts))
        elif kind == "tensor":
            entries[name] = _decode_tensor(name, facts, parts, stored, path)
        else:
            _refuse(path, f"'{name}' is a {kind!r}")
    paths = layout["paths"]
    if paths is not None:
        paths = {str(name): _path(keys, limit=len(entries)) for name, keys in paths}
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=stored)


def _decode_tensor(
    name: str,
    facts: Sequence[Any],
    parts: Sequence[Part],
    stored: dict[MetadataIndex, Stored],
    path: str,
) -> TensorStorageMetadata:
    dtype_name, size, requires_grad, chunks = facts
    dtype = DTYPES[dtype_name]
    whole = _size(size)
    found = []
    for number, (offsets, sizes, place) in enumerate(chunks):
        chunk = ChunkStorageMetadata(offsets=_size(offsets), sizes=_size(sizes))
        span = _span(place, parts)
        fits = len(chunk.offsets) == len(chunk.sizes) == len(whole) and all(
            offset + length <= total
            for offset, length, total in zip(chunk.offsets, chunk.sizes, whole, strict=True)
        )
        if not fits or span.size_bytes != math.prod(chunk.sizes) * dtype.itemsize:
            _refuse(path, f"chunk {number} of '{name}' does not fit its tensor")
        if span.offset_bytes % dtype.itemsize:
            _refuse(path, f"chunk {number} of '{name}' is not aligned")
        found.append(chunk)
        stored[MetadataIndex(name, chunk.offsets, number)] = Stored(
            name=name, span=span, dtype=dtype, shape=tuple(chunk.sizes)
        )
    properties = TensorProperties(dtype=dtype, requires_grad=bool(requires_grad))
    return TensorStorageMetadata(properties=properties, size=whole, chunks=found)


def _span(place: Any, parts: Sequence[Part]) -> Span:
    part, offset_bytes, size_bytes = (_count(value) for value in place)
    if offset_bytes + size_bytes > parts[part].size_bytes:
        raise ValueError("a chunk lies beyond the end of its part")
    return Span(part=part, offset_bytes=offset_bytes, size_bytes=size_bytes)


def _size(values: Any) -> torch.Size:
    return torch.Size([_count(value) for value in values])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _path(keys: Any, *, limit: int) -> tuple[str | int, ...]:
    """Keys of dictionaries and places in lists, no longer than there can be."""
    if not keys or any(type(key) not in (str, int) for key in keys):
        raise ValueError(f"{keys!r} is not a path")
    if any(isinstance(key, int) and not 0 <= key < limit for key in keys):
        raise ValueError(f"{keys!r} is out of range")
    return tuple(keys)


def _refuse(path: str, reason: str) -> NoReturn:
    raise Damaged(path=path, reason=f"the layout of its parts is not valid: {reason}")
