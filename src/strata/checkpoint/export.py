"""Checkpoints in other formats: plain `.pt`, safetensors, a DCP directory.

The source is any checkpoint of any store, whole or sharded, or a `.pt` file without a manifest. It is verified and
loaded without running any code; the copy appears under its name when it is complete, and never half. A `.pt` written
here has true checksums for other tools; a DCP directory is one that PyTorch's own `FileSystemReader` reads.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import BYTES, SHARDED, plain_json
from strata.checkpoint.catalog.naming import manifest_key
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound, LoadFailed, UnsupportedState
from strata.checkpoint.image.plain import SUFFIX, load_plain
from strata.checkpoint.image.reading import fetched, open_image
from strata.errors import MissingDependency
from strata.stores import open_store
from strata.stores.protocol import BlobWriter, Store

PT, SAFETENSORS, DCP = "pt", "safetensors", "dcp"
FORMATS = (PT, SAFETENSORS, DCP)
_BY_ENDING = {".pt": PT, ".pth": PT, ".safetensors": SAFETENSORS}


class InvalidExport(CheckpointError, ValueError):
    """What was asked for cannot be exported so. Nothing has been written."""

    code = "invalid_export"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: str
    format: str
    tensors: int
    size_bytes: int
    left_out: tuple[str, ...] = ()
    """Values that the format cannot hold."""


def find(
    place: str, *, step: int | None = None, checkpoint_id: str | None = None
) -> tuple[Store, Entry | str]:
    """The checkpoint that is meant: an entry, or the key of a file without a manifest. `place` is a folder or URL with
    checkpoints (the newest, or the one asked for), or one `.pt` file."""
    if place.endswith(SUFFIX):
        folder, _, name = place.rpartition("/")
        store = open_store(folder or ("/" if place.startswith("/") else "."))
        catalog = Catalog(store)
        key = manifest_key(name.removesuffix(SUFFIX))
        if store.stat(key) is not None:
            return store, Entry(key=key, manifest=catalog.read(key))
        if store.stat(name) is None:
            raise CheckpointNotFound(f"There is no file '{place}'.")
        return store, name
    store = open_store(place)
    listing = Catalog(store).list()
    for entry in listing.entries:
        manifest = entry.manifest
        if step in (None, manifest.step) and checkpoint_id in (None, manifest.checkpoint_id):
            return store, entry
    asked = f" of step {step}" if step is not None else f" '{checkpoint_id}'" if checkpoint_id else ""
    raise CheckpointNotFound(f"There is no checkpoint{asked} in {place}.", reasons=listing.problems)


def read_state(store: Store, found: Entry | str, *, trusted_source: bool = False) -> Any:
    """The state of a checkpoint, verified. What had been an array is a tensor, which any tool reads."""
    if isinstance(found, str):
        return load_plain(store, found, trusted_source=trusted_source)
    manifest = found.manifest
    if manifest.format == BYTES:
        raise LoadFailed(
            "The checkpoint holds raw bytes, not a state dictionary.",
            hint=f"They are the file itself: {where(store, manifest.parts[0].key)}",
        )
    if manifest.format == SHARDED:
        from strata.checkpoint.sharded.gathered import read_whole

        return read_whole(store, manifest, path=where(store, found.key))
    with fetched(store, manifest.parts[0], manifest) as held:
        path = where(store, manifest.parts[0].key)
        return open_image(held.path, trusted_source=trusted_source, name=path)


def export(
    place: str,
    to: str,
    *,
    format: str | None = None,
    step: int | None = None,
    checkpoint_id: str | None = None,
    key: str | None = None,
    overwrite: bool = False,
    trusted_source: bool = False,
) -> Exported:
    """Write a copy of a checkpoint to `to`, a path or URL. `format` defaults to what the suffix of `to` says; `key`
    chooses a part of the state, such as `model_state_dict`."""
    chosen = format or _BY_ENDING.get(os.path.splitext(to)[1])
    if chosen not in FORMATS:
        raise InvalidExport(
            f"The format of '{to}' is not known." if chosen is None else f"'{chosen}' is not a format.",
            hint="Choose --format pt, safetensors or dcp, or end the name with .pt or .safetensors.",
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", extra="torch", feature="Exporting a checkpoint")
    _check_free(to, overwrite=overwrite)
    store, found = find(place, step=step, checkpoint_id=checkpoint_id)
    state = _subtree(read_state(store, found, trusted_source=trusted_source), key)
    if chosen == DCP:
        return _export_dcp(state, to)
    target, name = _target(to)
    with target.open_write(name) as writer:
        counting = _Counting(writer)
        left_out = _write_pt(state, counting) if chosen == PT else _write_safetensors(state, counting)
        writer.commit()
    return Exported(
        path=to,
        format=chosen,
        tensors=sum(1 for _ in _named_tensors(state)),
        size_bytes=counting.size_bytes,
        left_out=left_out,
    )


class _Writes(Protocol):
    def write(self, data: Any) -> int: ...


class _Counting:
    """A writer that torch takes for a file."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self.size_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._writer.write(view)
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """What is written is handed on at once."""


def _write_pt(state: Any, file: _Counting) -> tuple[str, ...]:
    import torch

    torch.save(state, file)  # type: ignore[arg-type]
    return ()


_SAFE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def _write_safetensors(state: Any, file: _Writes) -> tuple[str, ...]:
    """Length of the header, the header, then the tensors' bytes: the whole format. Largest number types first, so that
    each tensor is aligned."""
    import torch

    header: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    offset_bytes = 0
    for name, tensor in sorted(_named_tensors(state), key=lambda pair: (-pair[1].dtype.itemsize, pair[0])):
        dtype = _SAFE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise UnsupportedState(
                name=name,
                kind=f"tensor of {tensor.dtype}",
                hint="safetensors has no such numbers; export to .pt.",
            )
        if name in header:
            raise InvalidExport(f"Two tensors would be called '{name}'.", hint="Choose one part with --key.")
        size_bytes = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, offset_bytes + size_bytes],
        }
        offset_bytes += size_bytes
        tensors.append(tensor)
    values, left_out = _other_values(state)
    header["__metadata__"] = {"format": "pt", **({"strata.values": json.dumps(values)} if values else {})}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.numel():
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)
    return tuple(left_out)


def _export_dcp(state: Any, to: str) -> Exported:
    from torch.distributed import checkpoint as dcp

    if not isinstance(state, Mapping):
        raise InvalidExport("Only a dictionary can become a DCP checkpoint.", hint="Leave --key out.")
    if "://" in to:
        raise InvalidExport(
            f"A DCP checkpoint is a local folder, not '{to}'.", hint="Export it to a folder, and copy."
        )
    target = Path(to)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        fresh.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(fresh), no_dist=True)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
    except OSError as error:
        raise InvalidExport(f"'{to}' could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    size_bytes = sum(path.stat().st_size for path in target.iterdir())
    return Exported(path=to, format=DCP, tensors=sum(1 for _ in _named_tensors(state)), size_bytes=size_bytes)


def _subtree(state: Any, key: str | None) -> Any:
    """The part of the state that a dotted name means; keys may have dots of their own. `model` means `model_state_dict`,
    which an elastic job calls it, where there is nothing of that very name."""
    if key is None:
        return state
    if isinstance(state, Mapping):
        if key not in state and f"{key}_state_dict" in state:
            return state[f"{key}_state_dict"]
        for name, value in state.items():
            if key == str(name):
                return value
            if key.startswith(f"{name}."):
                return _subtree(value, key[len(str(name)) + 1 :])
    known = ", ".join(str(name) for name in state) if isinstance(state, Mapping) else "nothing inside"
    raise InvalidExport(f"The state has no '{key}'.", hint=f"There is: {known}.")


def _named_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    import numpy as np
    import torch

    from strata.checkpoint.image.nested import dotted, leaves

    for path, leaf in leaves(state):
        if isinstance(leaf, torch.Tensor):
            yield dotted(path), leaf
        elif isinstance(leaf, np.ndarray):
            yield dotted(path), torch.from_numpy(np.ascontiguousarray(leaf))


def _other_values(state: Any) -> tuple[dict[str, Any], list[str]]:
    """What is no tensor: as JSON where that can hold it, by name where not."""
    import numpy as np

    from strata.checkpoint.image.nested import dotted, leaves

    tensors = {name for name, _ in _named_tensors(state)}
    values: dict[str, Any] = {}
    left_out = []
    for path, leaf in leaves(state):
        name = dotted(path)
        if name in tensors:
            continue
        try:
            values[name] = plain_json(leaf.item() if isinstance(leaf, np.generic) else leaf, name=name)
        except ValueError:
            left_out.append(name)
    return values, left_out


def _target(to: str) -> tuple[Store, str]:
    folder, _, name = to.rpartition("/")
    return open_store(folder or ("/" if to.startswith("/") else ".")), name


def _check_free(to: str, *, overwrite: bool) -> None:
    store, name = _target(to)
    if not name:
        raise InvalidExport(f"'{to}' names no file.", hint="Say what the copy is to be called.")
    taken = store.stat(name) is not None or ("://" not in to and os.path.lexists(to))
    if taken and not overwrite:
        raise InvalidExport(
            f"'{to}' already exists.", hint="Choose another name, or overwrite it with --force."
        )
