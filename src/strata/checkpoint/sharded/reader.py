"""`StrataStorageReader`: any rank reads what it needs of any part, and nothing that has not been verified."""

from __future__ import annotations

import io
import logging
import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from strata.checkpoint.catalog.listing import Catalog, where
from strata.checkpoint.copying.digest import WindowBuffer
from strata.checkpoint.destinations import Destination
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.image.reading import SECURITY_WARNING
from strata.checkpoint.sharded.layout import Span, Stored, decode
from strata.checkpoint.sharded.listing import info_of, opened, sharded
from strata.checkpoint.sharded.parts import PartReader
from strata.stores.protocol import StoreError

log = logging.getLogger("strata.checkpoint")


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

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        """Nothing to do: the metadata is this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._manifest.checkpoint_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise LoadFailed(
                f"The ranks would load different checkpoints: {', '.join(chosen)}.",
                hint="One was saved meanwhile. Choose a step on one rank, broadcast it, and load that.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_part: dict[int, list[tuple[ReadItem, Stored]]] = {}
        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            by_part.setdefault(stored.span.part, []).append((item, stored))
        buffer = WindowBuffer()
        try:
            for number, wanted in sorted(by_part.items()):
                part = PartReader(self._store, self._manifest.parts[number], buffer)
                for item, stored in sorted(wanted, key=lambda pair: pair[1].span.offset_bytes):
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, self._made_safe(part, stored))
                    else:
                        read_tensor(part, item, stored, planner)
        except StoreError as error:
            raise LoadFailed(error.message, hint=error.hint) from None
        future: Future[None] = Future()
        future.set_result(None)
        return future

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
            f"'{name}' could not be opened safely: {reason}",
            hint="If the checkpoint is your own and holds more than tensors, load it with trusted_source=True.",
        ) from None


def read_tensor(part: PartReader, item: ReadItem, stored: Stored, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.size() != item.lengths or stored.dtype is None:
        found = f"{tuple(item.lengths)}" if stored.dtype else "no tensor"
        raise LoadFailed(
            f"'{stored.name}' is {found} in the checkpoint, but {tuple(target.size())} in the state."
        )
    rows = _rows(item, stored)
    if rows is not None and target.is_cpu and target.is_contiguous() and target.dtype == stored.dtype:
        flat = target.reshape(-1).view(torch.uint8)
        for start, piece in part.pieces(rows, name=stored.name):
            flat[start : start + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
    else:
        target.copy_(_block(part, item, stored, stored.dtype, rows))
    planner.commit_tensor(item, target)


def _rows(item: ReadItem, stored: Stored) -> Span | None:
    """The bytes of the block that is wanted, where they lie in one run: whole rows of the chunk."""
    if tuple(item.lengths[1:]) != stored.shape[1:]:
        return None
    if not stored.shape:
        return stored.span
    row_bytes = math.prod(stored.shape[1:]) * (stored.dtype.itemsize if stored.dtype else 0)
    return Span(
        part=stored.span.part,
        offset_bytes=stored.span.offset_bytes + item.storage_offsets[0] * row_bytes,
        size_bytes=item.lengths[0] * row_bytes,
    )


def _block(
    part: PartReader, item: ReadItem, stored: Stored, dtype: torch.dtype, rows: Span | None
) -> torch.Tensor:
    """The block that is wanted, as a tensor."""
    if math.prod(item.lengths) == 0:
        return torch.empty(item.lengths, dtype=dtype)
    raw = torch.frombuffer(part.read(rows or stored.span, name=stored.name), dtype=torch.uint8).view(dtype)
    if rows is not None:
        return raw.reshape(item.lengths)
    block = raw.reshape(stored.shape)
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        block = block.narrow(dimension, start, length)
    return block
