"""Checkpoints in other formats: plain `.pt`, safetensors, a Hugging Face or a DCP folder.

The source is any checkpoint of any store, an image or sharded, or a `.pt` file without a manifest. It is verified and
read without running any code, tensor by tensor: whatever the size of the model, buffers take a fixed amount of memory, and
neither a GPU nor a process group is needed. The copy appears under its name when it is complete, and never half.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import BYTES, SHARDED
from strata.checkpoint.catalog.naming import MODEL, manifest_key
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound, LoadFailed
from strata.checkpoint.image.plain import SUFFIX, check_unsigned
from strata.errors import MissingDependency
from strata.files import fresh_folder, sync
from strata.stores import open_store
from strata.stores.protocol import Store

if TYPE_CHECKING:
    from strata.checkpoint.formats.lazy import Memory

PT, SAFETENSORS, HF, DCP = "pt", "safetensors", "hf", "dcp"
FORMATS = (PT, SAFETENSORS, HF, DCP)
FOLDERS = (HF, DCP)
MAX_SHARD_BYTES = 5_000_000_000  # As Hugging Face's libraries have it.
MODEL_KEYS = (MODEL, "model", "state_dict")
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
    if place.endswith(SUFFIX) and not os.path.isdir(place):
        folder, _, name = place.rpartition("/")
        store = open_store(folder or ("/" if place.startswith("/") else "."))
        catalog = Catalog(store)
        key = manifest_key(name.removesuffix(SUFFIX))
        if store.stat(key) is not None:
            return store, Entry(key=key, manifest=catalog.read(key))
        if store.stat(name) is None:
            raise CheckpointNotFound(f"The file '{place}' does not exist.")
        return store, name
    store = open_store(place)
    listing = Catalog(store).list()
    for entry in listing.entries:
        manifest = entry.manifest
        if step in (None, manifest.step) and checkpoint_id in (None, manifest.checkpoint_id):
            return store, entry
    asked = f" of step {step}" if step is not None else f" '{checkpoint_id}'" if checkpoint_id else ""
    raise CheckpointNotFound(f"There is no checkpoint{asked} in {place}.", reasons=listing.problems)


def open_state(store: Store, found: Entry | str, *, memory: Memory, trusted_source: bool = False) -> Any:
    """The state of a checkpoint, its tensors still in place; what is read of them is verified. What had been an array is a
    tensor, which any tool reads."""
    from strata.checkpoint.formats import lazy, reading

    if isinstance(found, str):
        return _open_plain(store, found, memory, trusted_source)
    manifest = found.manifest
    if manifest.format == BYTES:
        raise LoadFailed(
            "The checkpoint holds raw bytes, not a state dictionary.",
            hint=f"Copy the file itself: {where(store, manifest.parts[0].key)}",
        )
    if manifest.format == SHARDED:
        from strata.checkpoint.sharded.gathered import open_sharded

        return open_sharded(store, manifest, path=where(store, found.key), memory=memory)
    part = lazy.Parts(store, manifest, memory)[0]
    return reading.open_image(part, manifest, memory=memory, trusted_source=trusted_source)


def _open_plain(store: Store, key: str, memory: Memory, trusted_source: bool) -> Any:
    from strata.checkpoint.formats import lazy, reading

    check_unsigned(where(store, key), trusted_source=trusted_source)
    blob = store.stat(key)
    if blob is None:
        raise CheckpointNotFound(f"The file '{where(store, key)}' does not exist.")
    file = lazy.StoredFile(store, key, size_bytes=blob.size_bytes)
    return reading.open_pt(file, memory=memory, trusted_source=trusted_source)


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
    max_shard_bytes: int = MAX_SHARD_BYTES,
    memory_bytes: int | None = None,
) -> Exported:
    """Write a copy of a checkpoint to `to`, a path or URL. `format` defaults to what the suffix of `to` says; `key`
    chooses a part of the state, such as `model_state_dict`. No more than `memory_bytes` (512 MiB) of tensors are in memory at
    a time, however large they are. `hf` writes the model's weights alone, in files of at most `max_shard_bytes`."""
    chosen = format or _BY_ENDING.get(os.path.splitext(to)[1])
    if chosen not in FORMATS:
        raise InvalidExport(
            f"The name '{to}' does not imply a format." if chosen is None else f"'{chosen}' is not a format.",
            hint="Choose --format pt, safetensors, hf or dcp, or end the name with .pt or .safetensors.",
        )
    if chosen in FOLDERS and "://" in to:
        raise InvalidExport(
            f"'{to}' is not a local folder, which the format {chosen} needs.",
            hint="Export to a local folder, then copy it.",
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("torch", extra="torch", feature="Exporting a checkpoint")
    from strata.checkpoint.formats import writing
    from strata.checkpoint.formats.lazy import MEMORY_BYTES, Memory

    _check_free(to, overwrite=overwrite)
    store, found = find(place, step=step, checkpoint_id=checkpoint_id)
    memory = Memory(limit_bytes=memory_bytes or MEMORY_BYTES)
    state = _subtree(open_state(store, found, memory=memory, trusted_source=trusted_source), key)
    if chosen == HF:
        state = state if key is not None else _model_of(state)
    if chosen in FOLDERS:
        if not isinstance(state, Mapping):
            raise InvalidExport(
                f"Only a dictionary can become a folder of {chosen}.", hint="Leave --key out."
            )
        left_out: tuple[str, ...] = ()
        try:
            with fresh_folder(Path(to), mode=0o777, overwrite=overwrite) as folder:
                create = functools.partial(_create, folder)
                if chosen == HF:
                    left_out = writing.write_hf(state, create, max_shard_bytes=max_shard_bytes)
                else:
                    writing.write_dcp(state, create)
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
        except OSError as error:
            raise InvalidExport(f"'{to}' could not be written: {error.strerror or error}.") from error
    else:
        target, name = _target(to)
        with target.open_write(name) as writer:
            file = writing.Counting(writer)
            left_out = ()
            if chosen == PT:
                writing.write_pt(state, file, trusted_source=trusted_source)
            else:
                left_out = writing.write_safetensors(state, file)
            writer.commit()
        size_bytes = file.size_bytes
    tensors = writing.count_tensors(state)
    return Exported(path=to, format=chosen, tensors=tensors, size_bytes=size_bytes, left_out=left_out)


@contextlib.contextmanager
def _create(folder: Path, name: str) -> Iterator[BinaryIO]:
    with open(folder / name, "xb") as file:
        yield file
        sync(file)


def _model_of(state: Any) -> Any:
    """The model's weights in a state: under the name that a job gives them, or as they are where there is nothing else."""
    if isinstance(state, Mapping):
        for name in MODEL_KEYS:
            if isinstance(state.get(name), Mapping):
                return state[name]
        if any(isinstance(value, Mapping) for value in state.values()):
            known = ", ".join(map(str, state))
            raise InvalidExport("Which part of the state is the model?", hint=f"Pass it with --key: {known}.")
    return state


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
    raise InvalidExport(f"The state has no '{key}'.", hint=f"It has: {known}.")


def _target(to: str) -> tuple[Store, str]:
    folder, _, name = to.rpartition("/")
    return open_store(folder or ("/" if to.startswith("/") else ".")), name


def _check_free(to: str, *, overwrite: bool) -> None:
    store, name = _target(to)
    if not name:
        raise InvalidExport(f"'{to}' is not a file name.", hint="Add the name of the file to write.")
    taken = store.stat(name) is not None or ("://" not in to and os.path.lexists(to))
    if taken and not overwrite:
        raise InvalidExport(
            f"'{to}' already exists.", hint="Choose another name, or overwrite it with --force."
        )
