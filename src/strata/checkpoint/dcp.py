"""Sharded state (FSDP2, tensor parallel, DTensor) through PyTorch's distributed checkpoints, kept by Strata.

    dcp.save(state, storage_writer=StrataStorageWriter("s3://bucket/run", step=500, generation=7))
    dcp.load(state, storage_reader=StrataStorageReader("s3://bucket/run"))

PyTorch's planners decide which rank writes what (replicated state once, spread over the ranks) and how a state saved
by one number of ranks is read by another. Strata keeps the bytes: each rank writes one part, and when all of them are
durable the coordinating rank publishes one manifest with every part's size and digests. Before that there is no
checkpoint, afterwards it is complete. A writer of an older generation than the newest manifest is refused.

Nothing here is pickled but objects that are no tensors; those must load with `weights_only=True`, when saving as when
loading. A reader reads the one checkpoint it chose when it was made; every byte is verified, and a damaged part raises
`Damaged` (inside DCP's `CheckpointException`, for all ranks at once). Where to fall back to is the caller's choice:
`steps` and `latest` tell what there is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from strata.checkpoint.catalog import Catalog, Entry, where
from strata.checkpoint.cleaning import remove_superseded
from strata.checkpoint.dcp_layout import Span, Stored, decode, encode
from strata.checkpoint.dcp_parts import (
    PartReader,
    PartWriter,
    WrittenPart,
    forget,
    remove_orphans,
    remove_own_leftovers,
)
from strata.checkpoint.errors import (
    CheckpointError,
    CheckpointNotFound,
    Damaged,
    InvalidSave,
    LoadFailed,
    SaveFailed,
    UnsupportedState,
)
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.history import Line
from strata.checkpoint.loading import SECURITY_WARNING
from strata.checkpoint.manifest import SHARDED, CheckpointId, Json, Manifest, plain_json
from strata.checkpoint.naming import manifest_key, new_id, unique_stem
from strata.checkpoint.retention import line
from strata.stores import open_store
from strata.stores.protocol import NotFound, Store, StoreError

log = logging.getLogger("strata.checkpoint")

Place: TypeAlias = "str | os.PathLike[str] | Store"


class StaleGeneration(CheckpointError):
    """A newer generation has saved since: this writer's world is gone, and so is its right to save."""

    code = "stale_generation"

    def __init__(self, *, seen: int, current: int) -> None:
        super().__init__(
            f"Generation {seen} may not save: generation {current} has saved already.",
            hint="This process belongs to an earlier world; restart it and load the newest checkpoint.",
        )
        self.seen = seen
        self.current = current


def steps(place: Place) -> list[CheckpointInfo]:
    """The sharded checkpoints there are, in the order in which training would fall back to them."""
    store = _opened(place)
    return [_info(store, entry.manifest) for entry in _entries(Catalog(store))]


def latest(place: Place) -> CheckpointInfo | None:
    """The newest sharded checkpoint, by its manifest; nothing of it is read."""
    return next(iter(steps(place)), None)


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
        place: Place,
        *,
        step: int = 0,
        epoch: int = 0,
        generation: int = 0,
        worker: str = "",
        metadata: Mapping[str, Json] | None = None,
        position: Json = None,
        keep_count: int | None = None,
    ) -> None:
        """`position` is the data position that belongs to the state. With `keep_count`, older checkpoints go once the
        new one exists."""
        if step < 0 or epoch < 0 or generation < 0:
            raise InvalidSave(
                f"step ({step}), epoch ({epoch}) and generation ({generation}) must not be negative."
            )
        if keep_count is not None and keep_count < 1:
            raise InvalidSave(f"keep_count ({keep_count}) must be at least 1.")
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
        self.keep_count = keep_count
        self.info: CheckpointInfo | None = None
        """The checkpoint of the last save that succeeded, on the coordinating rank."""
        self._store = _opened(place)
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

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise InvalidSave(
                "A checkpoint without use_collectives would have no moment at which it exists as a whole. "
                "Save with use_collectives=True."
            )
        with self._failing_saves():
            remove_own_leftovers(self._catalog)
            if is_coordinator:
                remove_orphans(self._catalog)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._failing_saves():
            self._place_in_line()  # Refuse a stale generation before its ranks write for nothing.
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        with self._failing_saves():
            future.set_result(self._write_part(plan.items, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = list({written.part.key: written.part for written in _all_written(results)}.values())
        if not parts:
            raise InvalidSave("There is nothing to save: the state is empty.")
        numbers = {part.key: number for number, part in enumerate(parts)}
        spans = {
            result.index: Span(
                part=numbers[result.storage_data.part.key],
                offset_bytes=result.storage_data.offset_bytes,
                size_bytes=result.storage_data.size_bytes,
            )
            for rank in results
            for result in rank
        }
        with self._failing_saves():
            self._check_durable(parts)
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
            manifest = self._place_in_line().extend(draft, lasting=True)
            self._publish(manifest)
        forget(self._store, numbers)
        self.info = _info(self._store, manifest)
        log.info("checkpoint %s is in %s: %d parts", manifest.checkpoint_id, self._store.tier, len(parts))
        if self.keep_count is not None:
            self._clean(self.keep_count)

    def _write_part(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        writer = PartWriter(self._store, self.step)
        try:
            # Objects last: tensors start at aligned places without gaps.
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

    def _check_durable(self, parts: list[WrittenPart]) -> None:
        for part in parts:
            blob = self._store.stat(part.key)
            if blob is None or blob.size_bytes != part.size_bytes:
                found = "is missing" if blob is None else f"has {blob.size_bytes} bytes"
                raise Damaged(
                    path=where(self._store, part.key),
                    reason=f"the part {found}, {part.size_bytes} were written",
                )

    def _place_in_line(self) -> Line:
        """The line the new checkpoint continues. Raises `StaleGeneration` where it may not."""
        found = Line()
        entries = self._catalog.list(fresh=True).entries
        for entry in entries:
            found.sequence = max(found.sequence, entry.manifest.sequence)
            found.generation = max(found.generation, entry.manifest.generation)
        if found.generation > self.generation:
            raise StaleGeneration(seen=self.generation, current=found.generation)
        found.parent = entries[0].manifest.checkpoint_id if entries else None
        return found

    def _publish(self, manifest: Manifest) -> None:
        key = manifest_key(unique_stem(manifest.step, manifest.checkpoint_id))
        try:
            self._store.put(key, manifest.encode(), if_absent=True)
        except StoreError:
            # The reply may have been lost on the way back: it is there, or it is not.
            with contextlib.suppress(NotFound, Damaged):
                if self._catalog.read(key) == manifest:
                    return
            raise

    def _clean(self, keep_count: int) -> None:
        try:
            remove_superseded(self._catalog, keep_count=keep_count, in_use=(), damaged=())
        except StoreError as error:
            log.warning("older checkpoints could not be removed; the save itself is complete: %s", error)

    @contextlib.contextmanager
    def _failing_saves(self) -> Iterator[None]:
        """A store's error is that of a save, and can travel to the other ranks."""
        try:
            yield
        except (StoreError, OSError) as error:
            raise SaveFailed.because(
                error, tier=self._store.tier, path=self._store.url, checkpoint_id="", step=self.step
            ) from error


class StrataStorageReader(StorageReader):
    """Reads one sharded checkpoint: the newest, or the one asked for by step or id."""

    def __init__(
        self,
        place: Place,
        *,
        step: int | None = None,
        checkpoint_id: str | None = None,
        trusted_source: bool = False,
    ) -> None:
        """`trusted_source` lets objects in the checkpoint run code when they are loaded."""
        self._store = _opened(place)
        self._trusted_source = trusted_source
        self._choose(step, checkpoint_id)

    @property
    def info(self) -> CheckpointInfo:
        """The checkpoint this reader reads."""
        return _info(self._store, self._manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """`checkpoint_id` is a step or an id; without one the reader stays with its checkpoint."""
        if checkpoint_id is not None:
            wanted = os.fspath(checkpoint_id)
            self._choose(int(wanted), None) if wanted.isdecimal() else self._choose(None, wanted)

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
                hint="One was saved meanwhile. Choose a step on one rank, tell the others, and load that.",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_part: dict[int, list[tuple[ReadItem, Stored]]] = {}
        for item in plan.items:
            stored = self._metadata.storage_data[item.storage_index]
            by_part.setdefault(stored.span.part, []).append((item, stored))
        try:
            for number, wanted in sorted(by_part.items()):
                part = PartReader(self._store, self._manifest.parts[number])
                for item, stored in sorted(wanted, key=lambda pair: pair[1].span.offset_bytes):
                    self._read_item(part, item, stored, planner)
        except StoreError as error:
            raise LoadFailed(error.message, hint=error.hint) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, part: PartReader, item: ReadItem, stored: Stored, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            raw = bytes(part.read(stored.span, name=stored.name))
            planner.load_bytes(item, self._made_safe(raw, stored.name))
            return
        if stored.dtype is None:
            raise LoadFailed(f"'{stored.name}' is an object in the checkpoint, and a tensor in the state.")
        source = part.tensor(stored.span, stored.dtype, stored.shape, name=stored.name)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != source.size():
            raise LoadFailed(
                f"'{stored.name}' is {tuple(source.size())} in the checkpoint, "
                f"but {tuple(target.size())} in the state."
            )
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _made_safe(self, raw: bytes, name: str) -> io.BytesIO:
        """The pickle for the planner, which will unpickle without any care: so it gets one made here, of what a safe
        load found in the stored one."""
        if self._trusted_source:
            log.warning(SECURITY_WARNING, f"{self._store.url}, '{name}'")
            return io.BytesIO(raw)
        made = io.BytesIO()
        torch.save(load_object(raw, name=name), made)
        made.seek(0)
        return made

    def _choose(self, step: int | None, checkpoint_id: str | None) -> None:
        catalog = Catalog(self._store)
        wanted = [
            entry
            for entry in _entries(catalog)
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
    except Exception as error:  # Damaged pickles raise whatever they run into.
        raise LoadFailed(
            f"'{name}' could not be opened safely: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="If the checkpoint is your own and holds more than tensors, load it with trusted_source=True.",
        ) from error


def _bytes_of(item: WriteItem, planner: SavePlanner) -> memoryview:
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        raw = data.getvalue()
        try:
            load_object(raw, name=item.index.fqn)
        except LoadFailed as error:
            raise UnsupportedState(name=item.index.fqn, kind="value of a class of its own") from error
        return memoryview(raw)
    if data.is_quantized or data.layout != torch.strided:
        raise UnsupportedState(name=item.index.fqn, kind=f"{data.layout} tensor".replace("torch.", ""))
    plain = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy().data)


def _all_written(results: list[list[WriteResult]]) -> Iterator[_Written]:
    for rank in results:
        for result in rank:
            yield cast(_Written, result.storage_data)


def _entries(catalog: Catalog) -> list[Entry]:
    """The sharded checkpoints, as training would fall back to them."""
    by_id: dict[CheckpointId, Entry] = {
        entry.manifest.checkpoint_id: entry
        for entry in catalog.list(fresh=True).entries
        if entry.manifest.format == SHARDED
    }
    return [by_id[manifest.checkpoint_id] for manifest in line(entry.manifest for entry in by_id.values())]


def _info(store: Store, manifest: Manifest) -> CheckpointInfo:
    key = manifest_key(unique_stem(manifest.step, manifest.checkpoint_id))
    return CheckpointInfo.of(manifest, places=[(store.tier, where(store, key))])


def _opened(place: Place) -> Store:
    return open_store(place) if isinstance(place, str | os.PathLike) else place
