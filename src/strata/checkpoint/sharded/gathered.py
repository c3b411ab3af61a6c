"""A sharded checkpoint as one state in one process, its tensors still in the parts: for exports."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.errors import Damaged
from strata.checkpoint.formats.lazy import (
    Chunk,
    LazyTensor,
    Memory,
    Parts,
    Region,
    contiguous_stride,
    held,
    nest,
    read_bytes,
)
from strata.checkpoint.sharded.layout import Stored, decode
from strata.checkpoint.sharded.reader import load_object
from strata.stores.protocol import Store


def open_sharded(store: Store, manifest: Manifest, *, path: str, memory: Memory) -> dict[str, Any]:
    """The state with its full tensors, nested as it was saved, but that keys of dictionaries are strings. What is read of it
    is verified, and loaded without running any code."""
    metadata = decode(manifest, path=path)
    parts = Parts(store, manifest, memory)
    chunks: dict[str, list[Chunk]] = {}
    objects: list[Stored] = []
    for index, stored in metadata.storage_data.items():
        if stored.dtype is None:
            objects.append(stored)
        else:
            chunks.setdefault(stored.name, []).append(_chunk(index, stored, parts))
    values: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    for stored in sorted(objects, key=lambda each: (each.span.part, each.span.offset_bytes)):
        span = stored.span
        raw = read_bytes(parts[span.part], span.offset_bytes, span.size_bytes, tensor=stored.name)
        value = load_object(bytes(raw), name=stored.name)
        values[stored.name] = held(value, name=stored.name, memory=memory)
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            values[name] = LazyTensor(
                name=name,
                dtype=entry.properties.dtype,
                shape=tuple(entry.size),
                chunks=tuple(chunks.get(name, ())),
                memory=memory,
                requires_grad=bool(entry.properties.requires_grad),
            )
    try:
        return nest(values, metadata.planner_data or {})
    except ValueError as error:
        raise Damaged(path=path, reason="the names in its layout contradict each other") from error


def _chunk(index: MetadataIndex, stored: Stored, parts: Parts) -> Chunk:
    region = Region(
        file=parts[stored.span.part],
        start_bytes=stored.span.offset_bytes,
        stride=contiguous_stride(stored.shape),
    )
    return Chunk(offsets=tuple(index.offset or ()), sizes=stored.shape, region=region)
