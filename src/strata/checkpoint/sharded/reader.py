"""`StrataStorageReader`: any rank reads what it needs of any part, and nothing that has not been verified."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from strata.checkpoint.catalog.listing import Catalog, where
from strata.checkpoint.catalog.manifest import Part
from strata.checkpoint.copying.digest import WindowBuffer
from strata.checkpoint.destinations import Destination
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.image.reading import SECURITY_WARNING
from strata.checkpoint.sharded.blocks import Block, copy_blocks
from strata.checkpoint.sharded.layout import Stored, decode
from strata.checkpoint.sharded.listing import info_of, opened, sharded
from strata.checkpoint.sharded.parts import PartReader, check_parts
from strata.stores.protocol import Store, StoreError

log = logging.getLogger("strata.checkpoint")

_BATCH_BYTES = 256 << 20
_SMALLEST_RUN_BYTES = 64


class StrataStorageReader(StorageReader):
    """Reads one sharded checkpoint, chosen when the reader is made: the newest, or the one asked for."""

    def __init__(
        self,
        place: Destination,
        *,
        step: int | None = None,
        checkpoint_id: str | None = None,
        trusted_source: bool = False,
    ) -> None:
        """`trusted_source` lets objects in the checkpoint run code when they are loaded."""
        self._store = opened(place)
        self._trusted_source = trusted_source
        self._choose(step, checkpoint_id)

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint this reader reads."""
        return info_of(self._store, self._manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id` is a step or an id; without one the reader stays with its checkpoint."""
        if checkpoint_id is None:
            return
        wanted = os.fspath(checkpoint_id)
        if wanted.isdecimal():
            self._choose(int(wanted), None)
        else:
            self._choose(None, wanted)

    def read_metadata(self, *args: object, **options: object) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **options: object
    ) -> None:
        """Nothing to do: the metadata is this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._manifest.checkpoint_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise LoadFailed(
                f"The ranks would load different checkpoints: {', '.join(chosen)}.",
                hint="Another checkpoint was saved meanwhile. Choose a step on one rank, broadcast it, and load that one.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        objects: dict[int, list[tuple[ReadItem, Stored]]] = {}
        tensors: list[tuple[ReadItem, Stored]] = []
        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                objects.setdefault(stored.span.part, []).append((item, stored))
            else:
                tensors.append((item, stored))
        try:
            read_tensors(self._store, self._manifest.parts, tensors, planner)
            self._read_objects(objects, planner)
        except StoreError as error:
            raise LoadFailed(error.message, hint=error.hint) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_objects(self, objects: dict[int, list[tuple[ReadItem, Stored]]], planner: LoadPlanner) -> None:
        buffer = WindowBuffer()
        for number, held in sorted(objects.items()):
            part = PartReader(self._store, self._manifest.parts[number], buffer)
            for item, stored in sorted(held, key=lambda pair: pair[1].span.offset_bytes):
                planner.load_bytes(item, self._made_safe(part, stored))

    def _made_safe(self, part: PartReader, stored: Stored) -> io.BytesIO:
        """The pickle for the planner, which will unpickle without any care: so it gets one made here, of what a safe
        load found in the stored one."""
        raw = bytes(part.read(stored.span, name=stored.name))
        if self._trusted_source:
            log.warning(SECURITY_WARNING, f"{self._store.url}, '{stored.name}'")
            return io.BytesIO(raw)
        made = io.BytesIO()
        torch.save(load_object(raw, name=stored.name), made)
        made.seek(0)
        return made

    def _choose(self, step: int | None, checkpoint_id: str | None) -> None:
        catalog = Catalog(self._store)
        wanted = [
            entry
            for entry in sharded(catalog)
            if (step is None or entry.manifest.step == step)
            and (checkpoint_id is None or entry.manifest.checkpoint_id == checkpoint_id)
        ]
        if not wanted:
            asked = f" of step {step}" if step is not None else f" '{checkpoint_id}'" if checkpoint_id else ""
            raise CheckpointNotFound(
                f"There is no sharded checkpoint{asked} in {self._store.url}.",
                reasons=catalog.list().problems,
            )
        self._manifest = wanted[0].manifest
        self._metadata = decode(self._manifest, path=where(self._store, wanted[0].key))


def load_object(raw: bytes, *, name: str) -> Any:
    """An object that is no tensor, loaded without running any code."""
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # What is no such object fails in any way it likes.
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise LoadFailed(
            f"'{name}' could not be opened safely: {reason.rstrip('.')}.",
            hint="If the checkpoint is your own and holds more than tensors, load it with trusted_source=True.",
        ) from None


def read_tensors(
    store: Store,
    parts: Sequence[Part],
    tensors: Sequence[tuple[ReadItem, Stored]],
    planner: LoadPlanner,
) -> None:
    """Read slices of chunks into the planner's tensors. Raises `Damaged` and the store's errors."""
    needed = {stored.span.part for _, stored in tensors if stored.span.size_bytes}
    check_parts(store, [parts[number] for number in sorted(needed)])
    for batch in _batches(tensors):
        _read_batch(store, parts, batch, planner)


def read_slice(store: Store, part: Part, item: ReadItem, stored: Stored) -> torch.Tensor:
    """One slice of a chunk, in memory of its own. Raises `Damaged` and the store's errors."""
    found = torch.empty(tuple(item.lengths), dtype=stored.dtype)
    if found.numel():
        check_parts(store, [part])
        copy_blocks(store, [(part, [_block(stored, item.storage_offsets, found)])])
    return found


def _read_batch(
    store: Store, parts: Sequence[Part], batch: list[tuple[ReadItem, Stored]], planner: LoadPlanner
) -> None:
    filled: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
    wanted: dict[int, list[Block]] = {}
    for item, stored in batch:
        target = planner.resolve_tensor(item).detach()
        _check_fits(target, item, stored)
        if _is_plain(target, stored):
            memory = target
        elif target.numel() * target.itemsize > _BATCH_BYTES:
            _read_in_bands(store, parts[stored.span.part], target, item, stored)
            planner.commit_tensor(item, target)
            continue
        else:
            memory = torch.empty(tuple(item.lengths), dtype=stored.dtype)
        if memory.numel():
            block = _block(stored, item.storage_offsets, memory)
            wanted.setdefault(stored.span.part, []).append(block)
        filled.append((item, target, memory))
    copy_blocks(store, [(parts[number], blocks) for number, blocks in wanted.items()])
    for item, target, memory in filled:
        if memory is not target:
            target.copy_(memory)
        planner.commit_tensor(item, target)


def _read_in_bands(store: Store, part: Part, target: torch.Tensor, item: ReadItem, stored: Stored) -> None:
    """Some rows at a time, for a large tensor whose memory is arranged otherwise."""
    rows = max(1, _BATCH_BYTES * len(target) // (target.numel() * target.itemsize))
    for first in range(0, len(target), rows):
        band = target[first : first + rows]
        memory = torch.empty(band.shape, dtype=stored.dtype)
        offsets = (item.storage_offsets[0] + first, *item.storage_offsets[1:])
        copy_blocks(store, [(part, [_block(stored, offsets, memory)])])
        band.copy_(memory)


def _batches(tensors: Sequence[tuple[ReadItem, Stored]]) -> Iterator[list[tuple[ReadItem, Stored]]]:
    """In the order of the parts, so many that threads have enough to do, so few that a planner or a device that needs memory
    of its own for each does not need it for all."""
    batch: list[tuple[ReadItem, Stored]] = []
    size_bytes = 0
    for item, stored in sorted(tensors, key=lambda pair: (pair[1].span.part, pair[1].span.offset_bytes)):
        batch.append((item, stored))
        size_bytes += math.prod(item.lengths) * (stored.dtype.itemsize if stored.dtype else 0)
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _check_fits(target: torch.Tensor, item: ReadItem, stored: Stored) -> None:
    if target.size() != item.lengths or stored.dtype is None:
        found = f"{tuple(item.lengths)}" if stored.dtype else "no tensor"
        raise LoadFailed(
            f"'{stored.name}' is {found} in the checkpoint, but {tuple(target.size())} in the state."
        )


def _is_plain(target: torch.Tensor, stored: Stored) -> bool:
    """Whether copying bytes to its memory is copying the tensor. Otherwise (another device, another type of number) there is a
    tensor in between."""
    is_ordinary = type(target) is torch.Tensor and target.is_cpu and target.layout == torch.strided
    is_same = target.dtype == stored.dtype and not target.is_conj() and not target.is_neg()
    return is_ordinary and is_same and _has_runs(target)


def _has_runs(target: torch.Tensor) -> bool:
    """Whether rows of it lie in memory as those of a contiguous tensor do, in runs that are worth a copy of their own."""
    expected = 1
    for length, stride in zip(reversed(target.shape), reversed(target.stride()), strict=True):
        if length != 1 and stride != expected:
            return expected * target.itemsize >= _SMALLEST_RUN_BYTES
        expected *= length
    return True


def _block(stored: Stored, offsets: Sequence[int], memory: torch.Tensor) -> Block:
    """What lies from these offsets of a stored chunk on, as much as there is memory for. Dimensions that lie in one run on both
    sides are taken together."""
    itemsize = memory.itemsize
    to_strides = [stride * itemsize for stride in memory.stride()]
    strides = [itemsize * math.prod(stored.shape[inner + 1 :]) for inner in range(len(stored.shape))]
    run_bytes, inner = itemsize, memory.ndim
    while inner:
        length = memory.shape[inner - 1]
        if length != 1 and not strides[inner - 1] == to_strides[inner - 1] == run_bytes:
            break
        run_bytes *= length
        inner -= 1
    return Block(
        name=stored.name,
        start_bytes=stored.span.offset_bytes + sum(o * s for o, s in zip(offsets, strides, strict=True)),
        run_bytes=run_bytes,
        address=memory.data_ptr(),
        counts=tuple(memory.shape[:inner]),
        strides=tuple(strides[:inner]),
        to_strides=tuple(to_strides[:inner]),
    )
