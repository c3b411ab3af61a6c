"""A sharded checkpoint as one state in one process: for exports, and for looking inside."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from strata.checkpoint.catalog.manifest import Manifest
from strata.checkpoint.copying.digest import WindowBuffer
from strata.checkpoint.errors import Damaged
from strata.checkpoint.sharded.layout import Stored, decode
from strata.checkpoint.sharded.parts import PartReader
from strata.checkpoint.sharded.reader import load_object
from strata.stores.protocol import Store


def read_whole(store: Store, manifest: Manifest, *, path: str) -> dict[str, Any]:
    """The state with its full tensors, nested as it was saved, but that keys of dictionaries are strings. Verified, and
    loaded without running any code."""
    metadata = decode(manifest, path=path)
    values: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_covered(name, entry, path)
            values[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    by_part: dict[int, list[tuple[MetadataIndex, Stored]]] = {}
    for index, stored in metadata.storage_data.items():
        by_part.setdefault(stored.span.part, []).append((index, stored))
    buffer = WindowBuffer()
    for number, held in sorted(by_part.items()):
        part = PartReader(store, manifest.parts[number], buffer)
        for index, stored in sorted(held, key=lambda pair: pair[1].span.offset_bytes):
            raw = part.read(stored.span, name=stored.name)
            if stored.dtype is None:
                values[stored.name] = load_object(bytes(raw), name=stored.name)
            elif raw:
                block = torch.frombuffer(raw, dtype=torch.uint8).view(stored.dtype).reshape(stored.shape)
                _place(values[stored.name], index.offset or (), block)
    try:
        return nested(values, metadata.planner_data or {})
    except (TypeError, AttributeError, LookupError, AssertionError) as error:
        raise Damaged(path=path, reason="the names in its layout contradict each other") from error


def _check_covered(name: str, entry: TensorStorageMetadata, path: str) -> None:
    """A tensor that its chunks do not fill must not come out with holes of any content."""
    if sum(chunk.sizes.numel() for chunk in entry.chunks) < entry.size.numel():
        raise Damaged(path=path, reason=f"the chunks of '{name}' do not fill it", tensors=(name,))


def _place(target: torch.Tensor, offsets: Sequence[int], block: torch.Tensor) -> None:
    for dimension, (start, length) in enumerate(zip(offsets, block.shape, strict=True)):
        target = target.narrow(dimension, start, length)
    target.copy_(block)


def nested(values: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """Undo the flattening: text keys are entries of dictionaries, numbers places in lists."""
    root: dict[str, Any] = {}
    for name, value in values.items():
        keys = paths.get(name, (name,))
        node: Any = root
        for key, following in itertools.pairwise(keys):
            node = _entered(node, key, [] if isinstance(following, int) else {})
        _put(node, keys[-1], value)
    return root


def _entered(node: Any, key: str | int, fresh: list[Any] | dict[str, Any]) -> Any:
    if isinstance(node, list):
        assert isinstance(key, int)
        if key >= len(node) or node[key] is None:
            _put(node, key, fresh)
        return node[key]
    return node.setdefault(key, fresh)


def _put(node: Any, key: str | int, value: Any) -> None:
    if isinstance(node, list) and isinstance(key, int):
        node.extend([None] * (key + 1 - len(node)))
    node[key] = value
