"""`CheckpointManager`: save from a training loop without stopping it, and load what is intact.

    with CheckpointManager("s3://bucket/run", keep_count=5) as manager:
        handle = manager.save({"model": model.state_dict(), "step": step}, step=step)
        ...
        state = manager.load()

A save returns as soon as the state has been copied; the rest happens on the engine's threads. A load walks the tiers
from memory outwards, verifies every byte, and falls back to the next tier and then to the checkpoint before, saying
why. State dictionaries become images (`strata.checkpoint.image.layout`); bytes are stored as they are.

Faces built on top use `Policy`, `Memory`, `Author`, a stem strategy (`strata.checkpoint.catalog.naming`) and an `Observer`;
they need nothing private. A manager may be used from several threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from strata.checkpoint.catalog.lineage import place_next, placed, read_lineage
from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import BYTES, IMAGE, CheckpointId, Json, Manifest, plain_json
from strata.checkpoint.catalog.naming import NAMED, Stem, new_id, payload_key, unique_stem
from strata.checkpoint.catalog.retention import remove_orphans, remove_superseded
from strata.checkpoint.destinations import Destination, default_job, open_stores
from strata.checkpoint.errors import InvalidSave, ManagerClosed, SaveFailed, SaveSkipped
from strata.checkpoint.events import MEMORY, CheckpointInfo, Observer, SaveHandle
from strata.checkpoint.pipeline import ByteBudget, BytesPayload, Payload, Pipeline, Policy, Save
from strata.checkpoint.restore import (
    MemorySource,
    Restored,
    Source,
    StoreSource,
    Wanted,
    gather,
    look,
    restore,
)
from strata.core.jobs.job import Ready
from strata.core.jobs.lineage import Lineage, Placement
from strata.errors import MissingDependency
from strata.stores.protocol import Store, StoreError

if TYPE_CHECKING:
    import torch

    from strata.checkpoint.copying.staging import Holder, Staging
    from strata.checkpoint.image.layout import Plan, Prepared
    from strata.checkpoint.sharded.publishing import Board, ShardPublisher, Shards

log = logging.getLogger("strata.checkpoint")

_BYTES_UNDER_WAY = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory tier: where snapshots are copied to, and what survives the process."""

    job: str | None = None
    """Name that images belong to; by default derived from the stores' URLs and RANK."""
    images: int = 2
    launch: str = ""
    """How this process was started, shown to other processes that find its images in use."""
    budget_bytes: int | None = None
    """Limit for the tensors in all images together: older snapshots are dropped for a new one. By default, the space of the
    file system at `root`."""
    record: bytes = b""
    """Stored with every snapshot: what the agent of this machine needs to upload it (`strata.checkpoint.finishing`)."""
    root: str | os.PathLike[str] | None = None
    """The folder below which images are; by default `STRATA_MEMORY_ROOT`, else /dev/shm, and a folder on disk for images
    that do not fit there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who writes, as recorded in the manifests."""

    worker: str = ""
    world_size: int = 1
    generation: int = 0
    run: str = ""
    """The run that saves belong to. If set, checkpoints of other runs are neither listed, continued nor removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFound:
    """One copy of a checkpoint."""

    manifest: Manifest
    tier: str
    where: str
    """The store's URL, or the file of an image in memory."""
    distance: int
    """0 is memory; stores count from 1, near to far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyed:
    """What there is to restore, by what every tier answered."""

    copies: tuple[CopyFound, ...]
    unreachable: tuple[StoreError, ...]
    """Tiers that did not answer."""
    unreadable: tuple[str, ...]
    """Manifests that are damaged."""
    removed: tuple[CheckpointId, ...]
    """Checkpoints whose payload was deleted from every store that had them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """What is to be saved, looked at but not copied yet."""

    format: str
    size_bytes: int
    """At most."""
    make: Callable[[Save], tuple[Payload, Callable[[], None]]]
    """Gives it a place, which may have to be waited for, and a way to fill that."""
    by_device: bool = False
    """A device does the copying, beside the computation."""


class SaveOptions(TypedDict, total=False):
    """What `save` takes by name alone."""

    position: Json
    tiers: Sequence[str] | None
    placement: Placement | None
    must_arrive: bool
    name: str | None


class LoadOptions(TypedDict, total=False):
    """What `load` takes by name alone."""

    into: Any
    trusted_source: bool
    tiers: Sequence[str] | None
    name: str | None


class CheckpointManager:
    def __init__(
        self,
        path: Destination | Sequence[Destination] | None = None,
        keep_count: int = 5,
        *,
        memory: Memory | None = None,
        policy: Policy | None = None,
        author: Author | None = None,
        stem: Stem = unique_stem,
        observer: Observer | None = None,
        admit: Callable[[Store], None] | None = None,
        adopt: Callable[[str], int | None] | None = None,
        board: Board | None = None,
        on_kept: Callable[[Manifest, str], None] | None = None,
    ) -> None:
        """`path` is a folder, a URL, a store, or a list of them, nearest first; by default what the environment names
        (`STORAGE_BACKEND` and so on, or `CHECKPOINT_DIR`). An empty list keeps checkpoints in memory only. `admit` is called
        before a manifest is published, and raises if this process may no longer publish. `adopt` maps the name of a `.pt`
        file without a manifest to its step, or to None if it is not a checkpoint: such files can be restored too. `board` is
        how the ranks that save a sharded state report to each other. `on_kept` is called with each snapshot in memory and its
        path, on a thread of the manager."""
        if keep_count < 1:
            raise ValueError(f"keep_count ({keep_count}) must be at least 1")
        stores = open_stores(path)
        self.keep_count = keep_count
        self.author = author or Author()
        self._memory = memory or Memory()
        self._policy = policy or Policy()
        self._stem = stem
        self._adopt = adopt
        self._board = board
        self._catalogs = [Catalog(store) for store in stores]
        self._lock = threading.RLock()
        self._pending: dict[CheckpointId, SaveHandle] = {}
        self._failed: SaveFailed | None = None
        self._reading: Counter[CheckpointId] = Counter()
        self._damaged: set[CheckpointId] = set()
        self._lineage: Lineage | None = None
        self._observer = observer
        self._staging: Staging | None = None
        self._plan: Plan | None = None
        self._bytes = ByteBudget(_BYTES_UNDER_WAY)
        self._is_closed = False
        self._pipeline = Pipeline(
            stores,
            policy=self._policy,
            observer=observer,
            on_published=self._clean,
            on_ended=self._ended,
            admit=admit,
            on_kept=on_kept,
        )

    # Saving

    def save(
        self,
        data: object,
        step: int,
        epoch: int = 0,
        metadata: Mapping[str, Json] | None = None,
        *,
        position: Json = None,
        tiers: Sequence[str] | None = None,
        placement: Placement | None = None,
        must_arrive: bool = False,
        name: str | None = None,
        shards: Shards | None = None,
        destinations: Sequence[str] | None = None,
        keep: CheckpointId | None = None,
        wait_s: float | None = None,
    ) -> SaveHandle:
        """Start saving bytes or a state, and return when it has been copied.

        `placement` sets the checkpoint's id and its place in the lineage, if the caller decides them.

        `position` is the data position that belongs to the state. `tiers` limits the save to some of the stores, by
        their tiers' names; `["MEMORY"]` names none of them and makes a snapshot that survives the process but not the
        machine. With `must_arrive`, the save waits for a free image whatever the policy says, and no newer save overtakes it;
        with `wait_s`, it waits that long. With `on_error='fail'`, the failure of an earlier save is raised here.

        With `shards`, `data` is this rank's part of a sharded state, as returned by `prepared`, and every rank makes the
        same save, for the same stores; `destinations` are their URLs, and `keep` the snapshot that must stay meanwhile. It needs a
        `placement`, and a manager with a `board`.

        `name` names the payload; a checkpoint of that name is replaced. A named checkpoint stands alone: it has no parent, and
        retention does not remove it.
        """
        started_s = time.monotonic()
        self._check_open()
        self.raise_failure()
        for count, number in (("step", step), ("epoch", epoch)):
            if type(number) is not int or number < 0:
                raise InvalidSave(f"{count} ({number!r}) must be a whole number and not negative.")
        spared = None if shards is None else {each for each in (keep,) if each is not None}
        staged = (
            self._stage_bytes(data)
            if isinstance(data, bytes | bytearray | memoryview)
            else self._stage(data, sparing=spared)
        )
        if name is not None:
            metadata = {**(metadata or {}), NAMED: True}
        draft = self._draft(step, epoch, staged.format, metadata or {}, position)
        if placement is not None:
            draft = placed(draft, placement)
        stores = self._stores_for(tiers)
        if destinations is not None:
            stores = tuple(store for store in stores if store.url in destinations)
        publisher = self._publisher(draft.checkpoint_id, shards, stores)
        if shards is not None:
            draft = replace(draft, layout=shards.plan.mark)
        stem = self._free_stem(draft, stores) if name is None else name
        save = Save(
            draft=draft,
            stores=stores,
            stem=stem,
            key=payload_key(stem, staged.format) if name is None else name,
            size_bytes=staged.size_bytes,
            handle=SaveHandle(draft.checkpoint_id, step),
            started_s=started_s,
            must_arrive=must_arrive,
            wait_s=wait_s,
            replaces=name is not None,
            publisher=publisher,
        )
        save.handle.path = save.started.path
        if staged.format == BYTES and not save.stores:
            raise InvalidSave("Bytes are saved to stores, and this save names none.")
        self._await(save.handle)
        try:
            self._pipeline.check_space(save)
            if name is not None:
                own = Lineage(run=self.author.run, generation=self.author.generation)
                save.draft = place_next(own, save.draft, durable=bool(stores))
            elif placement is None:
                self._continue_lineage(save)
            save.payload, fill = staged.make(save)
        except SaveSkipped as skipped:
            log.warning("step %d: %s", step, skipped)
            if publisher is not None:
                publisher.end(str(skipped))
            self._ended(save, None)
            save.handle.future.set_exception(skipped)
        except Exception as error:
            self._pipeline.give_up(save, error)
        except BaseException as error:  # Interrupted while it waited for an image.
            if publisher is not None:
                publisher.end("it was interrupted")
            self._ended(save, None)
            save.handle.future.set_exception(error)
            raise
        else:
            save.handle.copied = save.payload.wait
            save.size_bytes = len(save.payload.view)
            save.draft = replace(save.draft, tensors=save.payload.tensors)
            # A device's copies are only queued here, and the ranks of one machine share its cores: the pipeline's threads would
            # be in the way. Otherwise it follows.
            is_filled_first = staged.by_device or shards is not None
            try:
                if is_filled_first:
                    fill()
            finally:
                self._pipeline.submit(save)
            if not is_filled_first:
                fill()  # The pipeline follows, so the first bytes are on their way before the last are copied.
        return save.handle

    async def save_async(
        self,
        data: object,
        step: int,
        epoch: int = 0,
        metadata: Mapping[str, Json] | None = None,
        **options: Unpack[SaveOptions],
    ) -> CheckpointInfo:
        """Like `save`; awaits until every tier has it."""
        handle = await asyncio.to_thread(self.save, data, step, epoch, metadata, **options)
        return await asyncio.wrap_future(handle.future)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let saves of CUDA tensors overlap with training until this optimizer's next step changes them.

        Without a guard, saves are just as safe, but the device waits for the copy. Code that changes the optimizer's
        parameters or state outside of `step` must call `settle` first.
        """
        self._images().copier.guard(optimizer)

    def settle(self) -> None:
        """Make the current CUDA streams wait for copies in progress. Call it before changing guarded tensors."""
        self._images().copier.settle()

    def raise_failure(self) -> None:
        """Raise the failure of an earlier save, once, unless the policy is `warn`."""
        with self._lock:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def wait_pending(self, timeout: float | None = None) -> bool:
        """Wait for saves in progress; returns whether all have ended in time. Raises the error of a failed one."""
        with self._lock:
            pending = [handle.future for handle in self._pending.values()]
        is_done = not concurrent.futures.wait(pending, timeout).not_done
        self.raise_failure()
        return is_done

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait for saves in progress, whatever their outcome; returns whether all have ended in time."""
        with self._lock:
            pending = [handle.future for handle in self._pending.values()]
        return not concurrent.futures.wait(pending, timeout).not_done

    # Finding and loading

    def get_latest(self) -> CheckpointInfo | None:
        """The checkpoint that training would resume from, according to its manifest; the payload is not read."""
        return next(iter(self.all_checkpoints()), None)

    latest = get_latest

    def get_by_step(self, step: int) -> CheckpointInfo | None:
        return next((info for info in self.all_checkpoints() if info.step == step), None)

    def all_checkpoints(self) -> list[CheckpointInfo]:
        """Every checkpoint in any tier, in the order in which training would fall back to them."""
        found, problems = gather(self._sources())
        removed = [each for each in found if each.was_removed()]
        for problem in [*problems, *(f"{each.info.path} was removed" for each in removed)]:
            log.warning("skipped while listing checkpoints: %s", problem)
        return [each.info for each in found if each not in removed and self._is_own(each.manifest)]

    list_checkpoints = all_checkpoints

    def survey(self, tiers: Sequence[str] | None = None) -> Surveyed:
        """Every copy that could be restored, and what could not be read: for callers that choose what to load. Reads every
        manifest again, and no payload. `tiers` limits where to look, by name."""
        sources = [source for source in self._sources() if tiers is None or source.tier in tiers]
        found, problems, unread = look(sources, fresh=True)
        own = [each for each in found if self._is_own(each.manifest)]
        return Surveyed(
            copies=tuple(
                CopyFound(
                    manifest=entry.manifest,
                    tier=source.tier,
                    where=source.place(entry),
                    distance=sources.index(source) + (0 if sources[0].tier == MEMORY else 1),
                )
                for each in own
                for source, entry in each.copies
            ),
            unreachable=tuple(unread),
            unreadable=tuple(problems),
            removed=tuple(each.manifest.checkpoint_id for each in own if each.has_lost_its_payload()),
        )

    def restore_copy(
        self, checkpoint_id: CheckpointId, *, where: str, into: Any, tear_ok: bool = False
    ) -> Restored:
        """Load one copy that `survey` has found, and no other."""
        self._check_open()
        return restore(
            [s for s in self._sources() if s.tier == MEMORY or s.place(None) == where],
            checkpoint_id=checkpoint_id,
            place=where,
            into=into,
            tear_ok=tear_ok,
            reading=self._being_read,
            on_damaged=self._damaged.add,
        )

    def verify_snapshot(self, path: Path) -> bool:
        """Verify every byte of one of this process's snapshots; raises `Damaged`. False if the file is not one of them."""
        from strata.checkpoint.image.in_place import verify_image

        for snapshot in self._images().snapshots():
            if snapshot.path == path:
                with self._images().held(snapshot) as buffer:
                    verify_image(buffer.mapped(), snapshot.manifest, path=snapshot.path)
                return True
        return False

    def fence(self, generation: int) -> None:
        """Join a generation of the run: older ones may no longer keep snapshots on this machine. Raises `Superseded`."""
        self.author = replace(self.author, generation=generation)
        self._images().fence(generation)

    def lock_ahead(self) -> None:
        """After a restore to a device: page-lock the images of earlier processes in the background, for the saves to come."""
        self._images().lock_ahead()

    def holders(self) -> list[Holder]:
        """Other live processes that hold snapshots of the same job on this machine."""
        return self._images().live_holders()

    def snapshots(self) -> list[CheckpointInfo]:
        """The checkpoints in memory, newest first."""
        return [each.info for each in gather([MemorySource(self._images())])[0]] if self._has_memory() else []

    def drop_snapshots(self, checkpoint_ids: Collection[CheckpointId] | None = None) -> None:
        """Drop these checkpoints in memory, or all of them, and free their memory."""
        if self._has_memory():
            self._images().drop(checkpoint_ids)

    def load(
        self,
        step: int | str | SaveHandle | CheckpointInfo | None = None,
        checkpoint_id: str | None = None,
        *,
        into: Any = None,
        trusted_source: bool = False,
        tiers: Sequence[str] | None = None,
        name: str | None = None,
        warn: bool = True,
    ) -> Any:
        """The state or bytes of a checkpoint: of the newest intact one, or of the one selected by step, id, save handle (which
        is waited for) or listed info.

        `into` is a state whose tensors receive the loaded values in place. `tiers` limits where to look, by name. `name` selects
        the payload of this name, with or without a manifest. `warn=False` omits the warning about a trusted source.
        """
        if isinstance(step, SaveHandle):
            step.result()
        if isinstance(step, SaveHandle | CheckpointInfo):
            checkpoint_id, step = step.checkpoint_id, None
        elif isinstance(step, str):
            checkpoint_id, step = step, None
        return self._load(
            tiers,
            step=step,
            checkpoint_id=checkpoint_id,
            name=name,
            into=into,
            trusted_source=trusted_source,
            warn=warn,
        ).state

    async def load_async(
        self,
        step: int | str | SaveHandle | CheckpointInfo | None = None,
        checkpoint_id: str | None = None,
        **options: Unpack[LoadOptions],
    ) -> Any:
        """Like `load`; awaits the result."""
        return await asyncio.to_thread(self.load, step, checkpoint_id, **options)

    def restore(
        self,
        step: int | None = None,
        checkpoint_id: str | None = None,
        *,
        into: Any = None,
        trusted_source: bool = False,
        tiers: Sequence[str] | None = None,
        tear_ok: bool = False,
        name: str | None = None,
        warn: bool = True,
        accept: Callable[[Any, str], Any] | None = None,
        nearest_of_step: bool = False,
    ) -> Restored:
        """Like `load`, and the next save continues this checkpoint. With `tear_ok`, bytes are verified while they are copied
        `into` place, which is faster; if that fails, some tensors have changed. For `accept` and
        `nearest_of_step` see `strata.checkpoint.restore.restore`."""
        restored = self._load(
            tiers,
            step=step,
            checkpoint_id=checkpoint_id,
            name=name,
            into=into,
            trusted_source=trusted_source,
            warn=warn,
            tear_ok=tear_ok,
            accept=accept,
            nearest_of_step=nearest_of_step,
        )
        is_durable = any(tier != MEMORY for tier in restored.info.tiers)
        with self._lock:
            self._look_around().go_back_to(restored.info, durable=is_durable)
        return restored

    # Ending

    def close(self, *, keep_memory: bool = False, timeout_s: float | None = None) -> None:
        """Finish the saves in progress and free the memory; with `keep_memory`, the snapshots stay for the job's next process.
        Saves not finished after `timeout_s` are abandoned, and their handles report it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pipeline.close(timeout_s)
        if self._staging is not None:
            self._staging.close(keep=keep_memory)
        self.raise_failure()

    def abandon(self, *, stay_mapped: bool = False) -> None:
        """Abandon the saves in progress without waiting, and leave the snapshots in memory to the job's next process: for a
        process that crashes. With `stay_mapped`, this process will open them again and keeps them mapped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pipeline.abandon()
        if self._staging is not None:
            self._staging.close(keep=True, wait=False, stay_mapped=stay_mapped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # After an error this process will be started again, and finds its newest snapshot in memory.
            self.close(keep_memory=error is not None)
        except SaveFailed:
            if error is None:
                raise
            log.exception("an earlier checkpoint failed as well")

    # The parts of a save

    def _stores_for(self, tiers: Sequence[str] | None) -> tuple[Store, ...]:
        stores = tuple(catalog.store for catalog in self._catalogs)
        if tiers is None:
            return stores
        if unknown := set(tiers) - {MEMORY, *(store.tier for store in stores)}:
            raise InvalidSave(f"This job has no tier {', '.join(sorted(unknown))}.")
        return tuple(store for store in stores if store.tier in tiers)

    def _free_stem(self, draft: Manifest, stores: Sequence[Store]) -> str:
        """With the checkpoint's id where the name is taken already: a step that is trained again after going back. An object
        store is not asked, which takes long; `publish` finds out."""
        stem = self._stem(draft.step, draft.checkpoint_id)
        if draft.checkpoint_id in stem or not stores or stores[0].free_bytes() is None:
            return stem
        try:
            is_free = stores[0].stat(payload_key(stem, draft.format)) is None
        except StoreError:
            return stem  # The save will say what is wrong.
        return stem if is_free else f"{stem}-{draft.checkpoint_id}"

    def _await(self, handle: SaveHandle) -> None:
        """Count a save as under way until its handle has an outcome."""

        def forget(_: object) -> None:
            with self._lock:
                self._pending.pop(handle.checkpoint_id, None)

        with self._lock:
            self._pending[handle.checkpoint_id] = handle
        handle.future.add_done_callback(forget)

    def _stage_bytes(self, data: bytes | bytearray | memoryview) -> _Staged:
        size_bytes = len(memoryview(data).cast("B"))
        if not size_bytes:
            raise InvalidSave("There are no bytes to save.")

        def make(save: Save) -> tuple[Payload, Callable[[], None]]:
            if not self._bytes.take(size_bytes, timeout_s=self._patience_s(save)):
                raise SaveSkipped(reason="the bytes of earlier saves are still being written")
            kept = data if isinstance(data, bytes) else bytes(data)
            return BytesPayload(kept, lambda: self._bytes.give_back(size_bytes)), lambda: None

        return _Staged(format=BYTES, size_bytes=size_bytes, make=make)

    def prepared(self, state: object) -> Prepared:
        """A state, looked at but not copied: `plan` is the same object as long as states have the same structure. It can be
        saved in the place of the state."""
        from strata.checkpoint.image.layout import prepare

        found = prepare(state, self._plan)
        self._plan = found.plan
        return found

    def ready(self, plan: Plan, *, part: str) -> Ready:
        """What this rank says before a sharded save of this plan; `part` is what of the state it has, where others have it too."""
        return replace(self._images().readiness(plan), busy=self._pipeline.busy(), part=part)

    def _publisher(
        self, checkpoint_id: CheckpointId, shards: Shards | None, stores: Sequence[Store]
    ) -> ShardPublisher | None:
        if shards is None or not stores:
            return None
        from strata.checkpoint.sharded.publishing import ShardPublisher

        assert self._board is not None
        return ShardPublisher(checkpoint_id, shards, stores, self._board)

    def _stage(self, state: object, *, sparing: Collection[CheckpointId] | None = None) -> _Staged:
        try:
            from strata.checkpoint.copying.staging import ImagePayload
            from strata.checkpoint.image.layout import Prepared
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise MissingDependency("torch", extra="torch", feature="Saving a state") from error
        prepared = state if isinstance(state, Prepared) else self.prepared(state)
        plan = prepared.plan

        def make(save: Save) -> tuple[Payload, Callable[[], None]]:
            staging, patience_s, must_keep = self._images(), self._patience_s(save), not save.stores
            buffer = staging.acquire(plan, timeout_s=patience_s, must_keep=must_keep, sparing=sparing)
            if buffer is None and self._pipeline.overtake(save):
                buffer = staging.acquire(plan, timeout_s=patience_s, must_keep=must_keep, sparing=sparing)
            if buffer is None:
                raise SaveSkipped(reason="the images of earlier saves are still being written")
            save.holds_image = True
            payload = ImagePayload(staging, buffer)
            return payload, lambda: payload.fill(prepared)

        return _Staged(format=IMAGE, size_bytes=plan.bound_bytes, make=make, by_device=prepared.is_on_cuda)

    def _patience_s(self, save: Save) -> float | None:
        if save.wait_s is not None:
            return save.wait_s
        return None if save.must_arrive or self._policy.when_full == "wait" else 0.0

    def _draft(
        self, step: int, epoch: int, payload_format: str, metadata: Mapping[str, Json], position: Json
    ) -> Manifest:
        try:
            plain_json(metadata, name="metadata")
            plain_json(position, name="position")
        except ValueError as error:
            raise InvalidSave(f"{error}.") from error
        return Manifest(
            checkpoint_id=new_id(step),
            step=step,
            epoch=epoch,
            created_at=time.time(),
            format=payload_format,
            parts=(),
            metadata=dict(metadata),
            data=position,
            world_size=self.author.world_size,
            generation=self.author.generation,
            author=self.author.worker,
        )

    def _continue_lineage(self, save: Save) -> None:
        """Give the save its place in the history."""
        with self._lock:
            save.draft = place_next(self._look_around(), save.draft, durable=bool(save.stores))

    def _look_around(self) -> Lineage:
        """The lineage training is on; the first look also removes what dead writers left."""
        if self._lineage is None:
            author = self.author
            self._lineage = read_lineage(
                self._sources(adopt=False), run=author.run, generation=author.generation
            )
            self.remove_orphans()
        return self._lineage

    def _is_own(self, manifest: Manifest) -> bool:
        """Everything is, unless this manager belongs to a run."""
        return not self.author.run or manifest.run in ("", self.author.run)

    def remove_orphans(self) -> None:
        """Remove payloads of unfinished saves whose writer has ended."""
        for catalog in self._catalogs:
            with contextlib.suppress(StoreError):  # The next process will try again.
                remove_orphans(catalog)

    # The parts of loading and ending

    def _sources(self, *, adopt: bool = True) -> list[Source]:
        near: list[Source] = [MemorySource(self._images())] if self._has_memory() else []
        return near + [
            StoreSource(catalog, adopt=self._adopt if adopt else None) for catalog in self._catalogs
        ]

    def _has_memory(self) -> bool:
        return self._staging is not None or importlib.util.find_spec("torch") is not None

    def _images(self) -> Staging:
        from strata.checkpoint.copying.staging import Staging

        with self._lock:
            if self._staging is None:
                self._staging = Staging(
                    self._memory.job or default_job([catalog.store for catalog in self._catalogs]),
                    images=self._memory.images,
                    budget_bytes=self._memory.budget_bytes,
                    root=Path(self._memory.root) if self._memory.root else None,
                    launch=self._memory.launch,
                    record=self._memory.record,
                )
            return self._staging

    def _load(self, tiers: Sequence[str] | None, **wanted: Unpack[Wanted]) -> Restored:
        self._check_open()
        return restore(
            [source for source in self._sources() if tiers is None or source.tier in tiers],
            reading=self._being_read,
            on_damaged=self._damaged.add,
            **wanted,
        )

    @contextlib.contextmanager
    def _being_read(self, checkpoint_id: CheckpointId) -> Iterator[None]:
        with self._lock:
            self._reading[checkpoint_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[checkpoint_id] -= 1

    def _clean(self, store: Store, entry: Entry) -> None:
        """After a save: remove what retention lets go. Runs on the store's thread."""
        catalog = next(known for known in self._catalogs if known.store is store)
        catalog.add(entry)
        with self._lock:
            in_use = {*self._pending, *(+self._reading)}
        removed = remove_superseded(
            catalog,
            keep_count=self.keep_count,
            run=self.author.run,
            in_use=in_use,
            damaged=self._damaged,
        )
        others = {i for other in self._catalogs if other is not catalog for i in other.known_ids()}
        for manifest in (entry.manifest for entry in removed):
            if self._observer is not None and manifest.checkpoint_id not in others:
                self._observer.on_removed(
                    manifest.checkpoint_id,
                    step=manifest.step,
                    epoch=manifest.epoch,
                    path=where(catalog.store, manifest.parts[0].key),
                    reason=f"there are {self.keep_count} newer ones",
                )

    def _ended(self, save: Save, error: SaveFailed | None) -> None:
        with self._lock:
            if self._lineage is not None and any(tier != MEMORY for tier, _ in save.copies):
                self._lineage.confirm(save.draft.checkpoint_id)
            elif self._lineage is not None and not save.copies:
                self._lineage.fail(save.draft.checkpoint_id)
            if error is not None and self._policy.on_error != "warn":
                self._failed = self._failed or error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ManagerClosed
