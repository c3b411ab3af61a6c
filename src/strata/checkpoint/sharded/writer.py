"""`StrataStorageWriter`: one part per rank, then one manifest, published by the coordinating rank."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from strata.checkpoint.catalog.lineage import place_next
from strata.checkpoint.catalog.listing import Catalog
from strata.checkpoint.catalog.manifest import SHARDED, CheckpointId, Json, Manifest, plain_json
from strata.checkpoint.catalog.naming import new_id
from strata.checkpoint.catalog.publish import commit
from strata.checkpoint.catalog.retention import remove_superseded
from strata.checkpoint.destinations import Destination
from strata.checkpoint.errors import (
    CheckpointError,
    InvalidSave,
    LoadFailed,
    SaveFailed,
    UnsupportedState,
)
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.sharded.layout import encode
from strata.checkpoint.sharded.listing import info_of, key_of, opened
from strata.checkpoint.sharded.parts import (
    ALIGNMENT_BYTES,
    PartWriter,
    Span,
    WrittenPart,
    check_parts,
    clean_up_own_parts,
    forget,
    named_last,
    remember_named,
    remove_orphans,
)
from strata.checkpoint.sharded.reader import load_object
from strata.core.jobs.lineage import Lineage
from strata.stores.protocol import StoreError

log = logging.getLogger("strata.checkpoint")


class StaleGeneration(CheckpointError):
    """A newer generation has saved since: this writer belongs to an earlier world and may no longer save."""

    code = "stale_generation"

    def __init__(self, *, seen: int, current: int) -> None:
        super().__init__(
            f"Generation {seen} may not save: generation {current} has saved already.",
            hint="This process belongs to an earlier generation; restart it and load the newest checkpoint.",
        )
        self.seen = seen
        self.current = current


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a rank reports about one item. All items of a rank share one `part`."""

    part: WrittenPart
    offset_bytes: int
    size_bytes: int


class StrataStorageWriter(StorageWriter):
    """Writes one sharded checkpoint, or one after the other: set `step` before each save, or pass it to `dcp.save` as
    `checkpoint_id`. Saves of one process to one place come one after the other."""

    def __init__(
        self,
        place: Destination,
        *,
        step: int = 0,
        epoch: int = 0,
        generation: int = 0,
        worker: str = "",
        metadata: Mapping[str, Json] | None = None,
        position: Json = None,
        parent: str | None = None,
        keep_count: int | None = None,
    ) -> None:
        """`position` is the data position that belongs to the state, `parent` the id of the checkpoint training was
        restored from, where that is not the newest. With `keep_count`, older ones go once the new one exists."""
        for name, number, least in (
            ("step", step, 0),
            ("epoch", epoch, 0),
            ("generation", generation, 0),
            ("keep_count", 1 if keep_count is None else keep_count, 1),
        ):
            if type(number) is not int or number < least:
                raise InvalidSave(f"{name} ({number!r}) must be a whole number of at least {least}.")
        try:
            plain_json(metadata or {}, name="metadata")
            plain_json(position, name="position")
        except ValueError as error:
            raise InvalidSave(f"{error}.") from error
        self.step = step
        self.epoch = epoch
        self.generation = generation
        self.worker = worker
        self.metadata = dict(metadata or {})
        self.position = position
        self.parent = CheckpointId(parent) if parent else None
        self.keep_count = keep_count
        self.info: CheckpointInfo | None = None
        """The checkpoint of the last save that succeeded, on the coordinating rank."""
        self._store = opened(place)
        self._catalog = Catalog(self._store)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdecimal()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise InvalidSave(f"checkpoint_id ({os.fspath(checkpoint_id)!r}) must be the number of a step.")
        self.step = int(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidSave(
                "Without collectives the checkpoint could not be published atomically: "
                "save with use_collectives=True."
            )
        if is_coordinator:
            with self._raised_as_save():
                remove_orphans(self._catalog)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._raised_as_save():
            self._lineage()  # Refuse a stale generation before its ranks write for nothing.
        return [replace(plan, storage_data=named_last(self._store)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        with self._raised_as_save():
            forget(self._store, plan.storage_data or ())
            clean_up_own_parts(self._catalog)
            future.set_result(self._write_part(plan.items, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = {result.index: result.storage_data for rank in results for result in rank}
        parts = list({item.part.key: item.part for item in written.values()}.values())
        if not parts:
            raise InvalidSave("There is nothing to save: the state is empty.")
        numbers = {part.key: number for number, part in enumerate(parts)}
        spans = {
            index: Span(
                part=numbers[item.part.key], offset_bytes=item.offset_bytes, size_bytes=item.size_bytes
            )
            for index, item in written.items()
        }
        draft = Manifest(
            checkpoint_id=new_id(self.step),
            step=self.step,
            epoch=self.epoch,
            created_at=time.time(),
            format=SHARDED,
            parts=tuple(part.part for part in parts),
            layout=encode(metadata, spans),
            metadata=self.metadata,
            data=self.position,
            world_size=len(results),
            generation=self.generation,
            author=self.worker,
        )

        def complete() -> Manifest:
            check_parts(self._store, draft.parts)
            return place_next(self._lineage(), draft)

        with self._raised_as_save():
            # Parts that get no manifest are removed when their ranks save again: only they know of them all.
            manifest = commit(self._store, draft.checkpoint_id, complete, at=key_of(draft)).manifest
        remember_named(self._store, numbers)
        self.parent = None  # The next one continues this one.
        self.info = info_of(self._store, manifest)
        log.info("checkpoint %s is in %s: %d parts", manifest.checkpoint_id, self._store.tier, len(parts))
        if self.keep_count is not None:
            self._clean(self.keep_count)

    def _write_part(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        writer = PartWriter(self._store, self.step, size_hint_bytes=sum(map(_size_bytes, items)))
        try:
            # Tensors first: they need alignment, objects do not.
            ordered = sorted(items, key=lambda item: item.type == WriteItemType.BYTE_IO)
            places = [(item, writer.add(_bytes_of(item, planner))) for item in ordered]
            part = writer.finish()
        except BaseException:
            writer.abort()
            raise
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=size_bytes,
                storage_data=_Written(part=part, offset_bytes=offset_bytes, size_bytes=size_bytes),
            )
            for item, (offset_bytes, size_bytes) in places
        ]

    def _lineage(self) -> Lineage:
        """What the new checkpoint continues. Raises `StaleGeneration` where it may not."""
        manifests = [entry.manifest for entry in self._catalog.list().entries]
        generation = max((manifest.generation for manifest in manifests), default=0)
        if generation > self.generation:
            raise StaleGeneration(seen=self.generation, current=generation)
        parent = self.parent or (manifests[0].checkpoint_id if manifests else None)
        sequence = max((manifest.sequence for manifest in manifests), default=0)
        name = manifests[0].lineage if manifests else ""
        return Lineage(
            name=name, sequence=sequence, generation=self.generation, parent=parent, durable_parent=parent
        )

    def _clean(self, keep_count: int) -> None:
        try:
            remove_superseded(self._catalog, keep_count=keep_count)
        except StoreError as error:
            log.warning("older checkpoints could not be removed; the save itself is complete: %s", error)

    @contextlib.contextmanager
    def _raised_as_save(self) -> Iterator[None]:
        """A store's error becomes that of a save, which can travel to the other ranks."""
        try:
            yield
        except (StoreError, OSError) as error:
            key = error.key if isinstance(error, StoreError) else ""
            path = f"{self._store.url}/{key}".rstrip("/")
            raise SaveFailed.because(
                error, tier=self._store.tier, path=path, checkpoint_id="", step=self.step
            ) from None


def _size_bytes(item: WriteItem) -> int:
    """What it will need in its part, about: the size of an object is not known yet, and it is small."""
    size_bytes = item.tensor_storage_size() or 0
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes_of(item: WriteItem, planner: SavePlanner) -> memoryview:
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        raw = data.getvalue()
        try:
            load_object(raw, name=item.index.fqn)
        except LoadFailed as error:
            raise UnsupportedState(name=item.index.fqn, kind="value of a custom class") from error
        return memoryview(raw)
    if data.is_quantized or data.layout != torch.strided:
        raise UnsupportedState(name=item.index.fqn, kind=f"{data.layout} tensor".replace("torch.", ""))
    plain = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy().data)
