"""Reading one sharded checkpoint from wherever its pieces are: images of this machine, of others, parts in destinations.

A `ShardedSource` collects what there is, nearest first: of several copies of a chunk the first that was added is read. PyTorch's
planner decides which slices of which chunks a rank needs; every byte is verified before it is used. What is in another
machine's memory cannot be read from here: it is left to the caller (`elsewhere`), who has it sent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from strata.checkpoint.catalog.listing import where
from strata.checkpoint.catalog.manifest import Manifest, Part
from strata.checkpoint.copying.digest import WindowBuffer
from strata.checkpoint.errors import Damaged, StateMismatch
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.sharded.images import ImageFound, Unusable
from strata.checkpoint.sharded.layout import Stored, decode
from strata.checkpoint.sharded.parts import PartReader
from strata.checkpoint.sharded.plan import DTYPES, Chunk, Marked, Path, outer_paths
from strata.checkpoint.sharded.reader import load_object, read_slice, read_tensors
from strata.stores.local import LocalStore
from strata.stores.protocol import Store, StoreError
from strata.torch_compat.dtensors import local_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """A file that chunks are read from."""

    name: str
    """What to strike out when it is damaged."""
    store: Store | None
    """None for one that is in the memory of another machine."""
    part: Part


class ShardedSource:
    """Everything that can be read of one checkpoint."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.paths: dict[str, Path] = {}
        """In the order of the state that was saved."""
        self._files: list[PartFile] = []
        self._stored: dict[MetadataIndex, Stored | None] = {}
        self._objects: dict[Path, Any] = {}
        self._stored_objects: dict[str, Stored | None] = {}

    def add_image(self, found: ImageFound, *, is_here: bool) -> None:
        part = replace(found.manifest.parts[0], key=FILE_NAME)
        store = LocalStore(FilePath(found.path).parent) if is_here else None
        number = len(self._files)
        self._files.append(PartFile(name=found.name, store=store, part=part))
        marked = Marked.of(found.manifest.layout)
        assert marked is not None
        for each in marked.chunks:
            self.paths.setdefault(each.name, each.path)
        for chunk, span in marked.spans(found.manifest.tensors, part=number):
            stored = Stored(name=chunk.name, span=span, dtype=DTYPES[chunk.dtype], shape=chunk.sizes)
            self._add(chunk, stored)
        for path, value in found.objects.items():
            self._objects.setdefault(path, value)

    def add_destination(self, store: Store, manifest: Manifest, *, struck: Collection[str]) -> None:
        """`struck` are the names of parts that are not to be read: what is in them is known to be missing. Raises `Damaged`."""
        metadata = decode(manifest, path=store.url)
        first = len(self._files)
        self._files += [
            PartFile(name=where(store, part.key), store=store, part=part) for part in manifest.parts
        ]
        paths = {name: tuple(path) for name, path in (metadata.planner_data or {}).items()}
        self.paths |= {name: path for name, path in paths.items() if name not in self.paths}
        for index, stored in metadata.storage_data.items():
            is_struck = self._files[first + stored.span.part].name in struck
            there = replace(stored, span=replace(stored.span, part=first + stored.span.part))
            path = paths.get(stored.name, (stored.name,))
            if stored.dtype is None:
                self.paths.setdefault(stored.name, path)
                if self._stored_objects.get(stored.name) is None:
                    self._stored_objects[stored.name] = None if is_struck else there
                continue
            entry = metadata.state_dict_metadata[stored.name]
            assert isinstance(entry, TensorStorageMetadata)
            size = tuple(entry.size)
            dtype = str(stored.dtype).removeprefix("torch.")
            chunk = Chunk(path, dtype, size, tuple(index.offset or ()), stored.shape)
            self._add(chunk, None if is_struck else there)

    def _add(self, chunk: Chunk, stored: Stored | None) -> None:
        """A chunk, and where it is; None for one that is known only by name."""
        index = MetadataIndex(chunk.name, torch.Size(chunk.offsets))
        is_known = index in self._stored
        if self._stored.get(index) is None:
            self._stored[index] = stored
        if is_known:
            return
        self.paths.setdefault(chunk.name, chunk.path)
        entry = self.tensors.get(chunk.name)
        if entry is None:
            entry = self.tensors[chunk.name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[chunk.dtype]), size=torch.Size(chunk.size), chunks=[]
            )
        entry.chunks.append(
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
        )

    def objects(self, *, leave_out: Callable[[Path], bool]) -> dict[Path, Any]:
        """What is no tensor, by path. Raises `Unusable`."""
        found = {path: value for path, value in self._objects.items() if not leave_out(path)}
        buffer = WindowBuffer()
        for name, stored in self._stored_objects.items():
            if self.paths[name] in found or leave_out(self.paths[name]):
                continue
            if stored is None:
                raise _nowhere(name)
            file = self._files[stored.span.part]
            assert file.store is not None
            with naming(file):
                reader = PartReader(file.store, file.part, buffer)
                raw = bytes(reader.read(stored.span, name=stored.name))
            found[self.paths[name]] = load_object(raw, name=name)
        return found

    def in_order(self, values: Mapping[Path, Any]) -> dict[Path, Any]:
        """Leaves in the order of the state that was saved: what loads a state may go by it."""
        # What is entered here may have been empty elsewhere.
        entered = {outer for path in values for outer in outer_paths(path)}
        return {path: values[path] for path in self.paths.values() if path in values and path not in entered}

    def plan(self, targets: Mapping[str, torch.Tensor]) -> Reading:
        """What is to be read for these targets, distributed tensors or not. Raises `StateMismatch`, and `Unusable` where a slice is
        nowhere."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        metadata = Metadata(
            state_dict_metadata={
                **self.tensors,
                **{name: BytesStorageMetadata() for name in self._stored_objects},
            },
            planner_data={},
            storage_data=self._stored,
        )
        for name, target in targets.items():
            if name not in self.tensors:
                raise StateMismatch(f"'{name}' is not in the checkpoint.")
            if self.tensors[name].size != target.size():
                raise StateMismatch(
                    f"'{name}' is {tuple(self.tensors[name].size)} in the checkpoint, but {tuple(target.size())} here."
                )
        planner.set_up_planner(dict(targets), metadata, is_coordinator=False)
        items = planner.create_local_plan().items
        self._check_covered(targets, items)
        return Reading(self, planner, items)

    def _check_covered(self, targets: Mapping[str, torch.Tensor], items: Iterable[ReadItem]) -> None:
        found = dict.fromkeys(targets, 0)
        for item in items:
            if self._stored[item.storage_index] is not None:
                found[item.dest_index.fqn] += math.prod(item.lengths)
        for name, target in targets.items():
            if found[name] < local_of(target).numel():
                raise _nowhere(name)

    def stored(self, item: ReadItem) -> tuple[PartFile, Stored]:
        found = self._stored[item.storage_index]
        assert found is not None
        return self._files[found.span.part], found


def _nowhere(name: str) -> Unusable:
    return Unusable(f"parts of '{name}' are in no copy of the checkpoint that can be read", names=[])


class Reading:
    """The slices that one rank reads."""

    def __init__(self, source: ShardedSource, planner: DefaultLoadPlanner, items: list[ReadItem]) -> None:
        self._source = source
        self._planner = planner
        self._items = items

    def read(self) -> None:
        """Read what can be read from here, one file after the other. Raises `Unusable`."""
        wanted: dict[str, list[tuple[ReadItem, Stored]]] = {}
        files: dict[str, PartFile] = {}
        for item in self._items:
            file, stored = self._source.stored(item)
            files[file.name] = file
            wanted.setdefault(file.name, []).append(
                (item, replace(stored, span=replace(stored.span, part=0)))
            )
        for name, slices in wanted.items():
            file = files[name]
            if file.store is not None:
                with naming(file):
                    read_tensors(file.store, [file.part], slices, self._planner)

    def elsewhere(self) -> list[tuple[PartFile, ReadItem, Stored]]:
        """What is in the memory of other machines."""
        found = [(*self._source.stored(item), item) for item in self._items]
        return [(file, item, stored) for file, stored, item in found if file.store is None]

    def target(self, item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self._planner.resolve_tensor(item)
        return target.detach()


def slice_of(found: ImageFound, item: ReadItem, stored: Stored) -> torch.Tensor:
    """A slice of an image of this machine. Raises `Damaged` and the store's errors."""
    part = replace(found.manifest.parts[0], key=FILE_NAME)
    stored = replace(stored, span=replace(stored.span, part=0))
    return read_slice(LocalStore(FilePath(found.path).parent), part, item, stored)


@contextlib.contextmanager
def naming(file: PartFile) -> Iterator[None]:
    """What cannot be read there becomes `Unusable`."""
    try:
        yield
    except (Damaged, StoreError) as error:
        raise Unusable(error, names=[file.name]) from error
