"""Finding and loading the best checkpoint there is, tier by tier, and saying why anything better was not used."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from strata.checkpoint.catalog import leases
from strata.checkpoint.catalog.listing import Catalog, Entry, Listing, where
from strata.checkpoint.catalog.manifest import (
    BYTES,
    IMAGE,
    SHARDED,
    CheckpointId,
    Manifest,
    Part,
    no_collection,
)
from strata.checkpoint.catalog.naming import manifest_beside, step_of
from strata.checkpoint.copying.digest import KEY_VARIABLE, Digest
from strata.checkpoint.errors import CheckpointNotFound, Damaged, LoadFailed, StateMismatch
from strata.checkpoint.events import MEMORY, CheckpointInfo
from strata.checkpoint.image.plain import load_plain, plain_files
from strata.checkpoint.image.reading import Held, fetch_bytes, fetched, open_image, open_tensors
from strata.core.jobs.lineage import fallback_order
from strata.core.text import counted
from strata.errors import StrataError
from strata.stores.protocol import AccessDenied, Blob, PartReader, StoreError

if TYPE_CHECKING:
    from strata.checkpoint.copying.staging import Snapshot, Staging

log = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A loaded checkpoint, where it came from, and why anything newer or nearer was not used."""

    state: Any
    info: CheckpointInfo
    tier: str
    reasons: tuple[str, ...]


class Wanted(TypedDict, total=False):
    """What `restore` can be asked for."""

    step: int | None
    checkpoint_id: str | None
    name: str | None
    place: str | None
    into: Any
    trusted_source: bool
    warn: bool
    tear_ok: bool
    accept: Callable[[Any, str], Any] | None
    nearest_of_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted(Entry):
    """A file without a manifest, and the manifest it might have."""

    is_named: bool
    """The caller has asked for just this file. No other load takes one that has lost its manifest."""


class Source(Protocol):
    """A tier as something to load from."""

    @property
    def tier(self) -> str: ...

    def list(self, *, fresh: bool) -> Listing: ...

    def path(self, entry: Entry) -> str: ...

    def place(self, entry: Entry | None) -> str:
        """Where a copy is, as reported to others: the store, or the image in memory."""
        ...

    def has_payload(self, entry: Entry) -> bool: ...

    def named(self, name: str) -> Entry | None:
        """The payload of this name. Raises `Damaged` where its manifest cannot be read, or is another's."""
        ...

    def load(
        self,
        entry: Entry,
        *,
        into: Any,
        trusted_source: bool,
        pool: Executor,
        tear_ok: bool = False,
        warn: bool = True,
    ) -> Any:
        """With `tear_ok`, a load into targets that fails may have changed some of them. Without `warn`, a trusted source is not
        warned about."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint and its copies, nearest first."""

    manifest: Manifest
    copies: tuple[tuple[Source, Entry], ...]

    @property
    def info(self) -> CheckpointInfo:
        copies = [(source.tier, source.path(entry)) for source, entry in self.copies]
        return CheckpointInfo.of(self.manifest, copies=copies)

    def was_removed(self) -> bool:
        """Whether somebody has deleted its payload from every durable tier that had it: training is meant to continue
        from the one before, so a copy that is still in memory is not wanted either."""
        return len(self.copies) > len(self._durable()) and self.has_lost_its_payload()

    def has_lost_its_payload(self) -> bool:
        """Whether it is durable by its manifests alone."""
        durable = self._durable()
        return bool(durable) and not any(source.has_payload(entry) for source, entry in durable)

    def _durable(self) -> list[tuple[Source, Entry]]:
        return [(source, entry) for source, entry in self.copies if source.tier != MEMORY]


class StoreSource:
    """Checkpoints in a store, and the files without a manifest that `adopt` takes for some: it gives their step."""

    def __init__(self, catalog: Catalog, *, adopt: Callable[[str], int | None] | None = None) -> None:
        self._catalog = catalog
        self._adopt = adopt

    @property
    def tier(self) -> str:
        return self._catalog.store.tier

    def list(self, *, fresh: bool) -> Listing:
        listing = self._catalog.list(fresh=fresh)
        if self._adopt is None:
            return listing
        return replace(listing, entries=(*listing.entries, *self._adopted(listing.entries)))

    def _adopted(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """The files, newest first, each with its place in the history: the highest step is the newest of them, as old as the
        store says, and continues what was there before it."""
        assert self._adopt is not None
        files = [
            (step, blob)
            for blob in plain_files(self._catalog.store)
            if (step := self._adopt(blob.key)) is not None
        ]
        files.sort(key=lambda file: (file[0], file[1].modified_s), reverse=True)
        adopted = []
        saved_s = math.inf
        for step, blob in files:
            saved_s = min(blob.modified_s, saved_s - 0.001)
            before = next((e.manifest for e in entries if e.manifest.created_at < saved_s), None)
            adopted.append(_adopt(blob, step=step, saved_s=saved_s, before=before, first=files[-1][1].key))
        return adopted

    def named(self, name: str) -> Entry | None:
        store, at = self._catalog.store, manifest_beside(name)
        if store.stat(at) is None:
            blob = store.stat(name)
            return _adopt(blob, step=step_of(name) or 0, is_named=True) if blob is not None else None
        manifest = self._catalog.read(at)
        if manifest.parts[0].key != name:
            raise Damaged(path=where(store, at), reason=f"it is not the manifest of {name}")
        return Entry(key=at, manifest=manifest)

    def path(self, entry: Entry) -> str:
        return where(self._catalog.store, entry.manifest.parts[0].key)

    def place(self, entry: Entry | None) -> str:
        return self._catalog.store.url

    def has_payload(self, entry: Entry) -> bool:
        """Complete or not; where that cannot be determined, it counts as present."""
        try:
            return self._catalog.store.stat(entry.manifest.parts[0].key) is not None
        except StoreError:
            return True

    def load(
        self,
        entry: Entry,
        *,
        into: Any,
        trusted_source: bool,
        pool: Executor,
        tear_ok: bool = False,
        warn: bool = True,
    ) -> Any:
        manifest = entry.manifest
        if isinstance(entry, Adopted):
            return self._load_adopted(entry, into, trusted_source, warn)
        if manifest.format == SHARDED:
            raise LoadFailed(
                "it holds sharded state.",
                hint="Load it with torch.distributed.checkpoint and strata.checkpoint.dcp.",
            )
        store, part = self._catalog.store, manifest.parts[0]
        with leases.reading(store, manifest.checkpoint_id):
            if manifest.format == BYTES:
                return fetch_bytes(store, part, manifest, pool=pool)
            if tear_ok and into is not None and isinstance(store, PartReader) and not trusted_source:
                from strata.checkpoint.image.in_place import Intake, NotOwn, is_on_cpu, take_from_store

                if is_on_cpu(into) and Intake.suits(part):
                    with contextlib.suppress(NotOwn):
                        return take_from_store(store, manifest, into=into, path=self.path(entry))
            with fetched(store, part, manifest, pool=pool) as held:
                return self._open(held, entry, into, trusted_source, warn)

    def _load_adopted(self, entry: Adopted, into: Any, trusted_source: bool, warn: bool) -> Any:
        if into is not None:
            raise LoadFailed("a file without a manifest can only be loaded completely.")
        return load_plain(
            self._catalog.store,
            entry.key,
            trusted_source=trusted_source,
            warn=warn,
            refuse_images=not entry.is_named,
        )

    def _open(self, held: Held, entry: Entry, into: Any, trusted_source: bool, warn: bool) -> Any:
        manifest, name = entry.manifest, self.path(entry)
        if into is None:
            return open_image(held.path, manifest, trusted_source=trusted_source, warn=warn, name=name)
        state = open_tensors(held.path, manifest, trusted_source=trusted_source, name=name)
        with held.view as view:
            return _load_into(state, into, view, manifest)


class MemorySource:
    """Checkpoints in shared memory."""

    tier = MEMORY

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._snapshots: dict[CheckpointId, Snapshot] = {}

    def list(self, *, fresh: bool) -> Listing:
        self._snapshots = {s.manifest.checkpoint_id: s for s in self._staging.snapshots()}
        entries = [Entry(key=str(s.path), manifest=s.manifest) for s in self._snapshots.values()]
        return Listing(entries=tuple(entries), problems=())

    def path(self, entry: Entry) -> str:
        return entry.key

    def place(self, entry: Entry | None) -> str:
        return entry.key if entry is not None else ""

    def has_payload(self, entry: Entry) -> bool:
        return True

    def named(self, name: str) -> Entry | None:
        return None

    def load(
        self,
        entry: Entry,
        *,
        into: Any,
        trusted_source: bool,
        pool: Executor,
        tear_ok: bool = False,
        warn: bool = True,
    ) -> Any:
        from strata.checkpoint.image.in_place import ImageInMemory

        with self._staging.held(self._snapshots[entry.manifest.checkpoint_id]) as buffer:
            image = ImageInMemory(
                entry.manifest,
                buffer.mapped(),
                path=entry.key,
                lock_pages=buffer.lock_pages,
                is_page_locked=buffer.is_page_locked,
            )
            is_verified = buffer.verified == entry.manifest.parts[0].digest.whole
            return image.load(
                into=into, trusted_source=trusted_source, pool=pool, tear_ok=tear_ok, check=not is_verified
            )


def gather(sources: Iterable[Source], *, fresh: bool = False) -> tuple[list[Found], list[str]]:
    """Every checkpoint in any tier, in the order in which training would fall back, and what could not be read."""
    found, problems, unread = look(sources, fresh=fresh)
    return found, [*map(str, unread), *problems]


def look(sources: Iterable[Source], *, fresh: bool) -> tuple[list[Found], list[str], list[StoreError]]:
    """As `gather`; the stores that could not be listed are returned as their errors."""
    copies: dict[CheckpointId, list[tuple[Source, Entry]]] = {}
    problems: list[str] = []
    unread: list[StoreError] = []
    for source in sources:
        try:
            listing = source.list(fresh=fresh)
        except StoreError as error:
            unread.append(error)
            continue
        problems.extend(listing.problems)
        if listing.untrusted and not listing.entries:
            unread.append(_nothing_trusted(source, listing))
        for entry in listing.entries:
            copies.setdefault(entry.manifest.checkpoint_id, []).append((source, entry))
    manifests = fallback_order(held[0][1].manifest for held in copies.values())
    found = [Found(manifest=m, copies=tuple(copies[m.checkpoint_id])) for m in manifests]
    return found, problems, unread


def _nothing_trusted(source: Source, listing: Listing) -> StoreError:
    """To start from nothing where others have put unsigned checkpoints, or where the key has just been set, loses a run."""
    return AccessDenied(
        f"{source.place(None)} holds {counted(listing.untrusted, 'checkpoint')}, none signed with an accepted key.",
        tier=source.tier,
        key="",
        hint=f"Check that {KEY_VARIABLE} is the key of this run. For a run that was not signed so far: "
        f"{KEY_VARIABLE}=KEYFILE,unsigned.",
    )


def find_named(sources: Iterable[Source], name: str) -> tuple[list[Found], list[StrataError]]:
    """The payload of this name in each tier that has it, and why it could not be looked for in others."""
    found: list[Found] = []
    failures: list[StrataError] = []
    for source in sources:
        try:
            entry = source.named(name)
        except (StoreError, Damaged) as error:
            failures.append(error)
            continue
        if entry is not None:
            found.append(Found(manifest=entry.manifest, copies=((source, entry),)))
    return found, failures


@no_collection()
def restore(
    sources: Sequence[Source],
    *,
    step: int | None = None,
    checkpoint_id: str | None = None,
    name: str | None = None,
    place: str | None = None,
    into: Any = None,
    trusted_source: bool = False,
    warn: bool = True,
    tear_ok: bool = False,
    accept: Callable[[Any, str], Any] | None = None,
    nearest_of_step: bool = False,
    reading: Callable[[CheckpointId], AbstractContextManager[None]],
    on_damaged: Callable[[CheckpointId], None],
) -> Restored:
    """Load the newest intact checkpoint, or the one asked for and no other, from the nearest of `sources` that has it intact,
    or from one `place` of them. `name` asks for the payload of that name.

    `accept` is given each state with its path and returns what to make of it; where it raises `LoadFailed`, the next copy is
    tried. With `nearest_of_step`, checkpoints of one step that follow each other count as copies of one: for callers who save a
    step to each tier by itself.

    Raises `StateMismatch` where it does not fit; `CheckpointNotFound` where every source has answered that there is none;
    else `LoadFailed`, whose `causes` tell what stood in the way. With `tear_ok`, a failure may have changed some targets.
    """
    causes: list[StrataError] = []
    problems: list[str] = []
    if name is None:
        found, problems, unread = look(sources, fresh=True)
        causes.extend(unread)
    else:
        found, causes = find_named(sources, name)
    reasons = [*map(str, causes), *problems]
    is_known = not causes
    wanted = [
        candidate
        for candidate in found
        if (step is None or candidate.manifest.step == step)
        and (checkpoint_id is None or candidate.manifest.checkpoint_id == checkpoint_id)
    ]
    for reason in reasons:
        log.warning("skipped while looking for a checkpoint: %s", reason)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1), thread_name_prefix="strata-verify") as pool:
        for group in _grouped(wanted, by_step=nearest_of_step):
            damaged: Counter[CheckpointId] = Counter()
            with contextlib.ExitStack() as held:
                present = []
                for candidate in group:
                    if candidate.was_removed():
                        reasons.append(f"step {candidate.manifest.step}: {candidate.info.path} was removed")
                        log.warning("could not load %s", reasons[-1])
                        continue
                    present.append(candidate)
                    held.enter_context(reading(candidate.manifest.checkpoint_id))
                for candidate, source, entry in _nearest_first(present, sources):
                    if place is not None and source.place(entry) != place:
                        continue
                    try:
                        state = source.load(
                            entry,
                            into=into,
                            trusted_source=trusted_source,
                            pool=pool,
                            tear_ok=tear_ok,
                            warn=warn,
                        )
                        if accept is not None:
                            state = accept(state, source.path(entry))
                    except StateMismatch:
                        raise  # Older checkpoints would fit no better.
                    except (StoreError, Damaged, LoadFailed) as error:
                        reason = f"step {candidate.manifest.step} in {source.tier}: {error.message}"
                        reasons.append(reason)
                        causes.append(error)
                        damaged[candidate.manifest.checkpoint_id] += isinstance(error, Damaged)
                        log.warning("could not load %s", reason)
                        continue
                    log.info("loaded checkpoint %s from %s", candidate.manifest.checkpoint_id, source.tier)
                    return Restored(
                        state=state, info=candidate.info, tier=source.tier, reasons=tuple(reasons)
                    )
            for candidate in present:
                if damaged[candidate.manifest.checkpoint_id] == len(candidate.copies):
                    on_damaged(candidate.manifest.checkpoint_id)
    called = name if name is not None else checkpoint_id
    asked = f" of step {step}" if step is not None else f" '{called}'" if called is not None else ""
    if wanted:
        raise LoadFailed(f"The checkpoint{asked} could not be loaded.", reasons=reasons, causes=causes)
    if not is_known:
        raise LoadFailed(
            f"It is unknown whether a checkpoint{asked} exists: not every store could be read.",
            reasons=reasons,
            causes=causes,
        )
    raise CheckpointNotFound(f"There is no checkpoint{asked}.", reasons=reasons)


def _grouped(found: Iterable[Found], *, by_step: bool) -> Iterator[list[Found]]:
    """Those that are tried together: each by itself, or the successive ones of a step."""
    if not by_step:
        yield from ([candidate] for candidate in found)
        return
    for _, group in itertools.groupby(found, key=lambda candidate: candidate.manifest.step):
        yield list(group)


def _nearest_first(found: Iterable[Found], sources: Sequence[Source]) -> list[tuple[Found, Source, Entry]]:
    copies = [(candidate, source, entry) for candidate in found for source, entry in candidate.copies]
    return sorted(copies, key=lambda copy: sources.index(copy[1]))


def _adopt(
    blob: Blob,
    *,
    step: int,
    saved_s: float | None = None,
    before: Manifest | None = None,
    first: str | None = None,
    is_named: bool = False,
) -> Adopted:
    """A file as an entry: it continues `before`, or else the `first` of such files."""
    saved_s = blob.modified_s if saved_s is None else saved_s
    sequence = max(int(saved_s * 1000), before.sequence + 1 if before is not None else 0)
    digest = Digest(chunk_bytes=1, chunks=(), whole="")
    return Adopted(
        key=blob.key,
        manifest=Manifest(
            checkpoint_id=CheckpointId(blob.key),
            step=step,
            epoch=0,
            created_at=saved_s,
            format=IMAGE,
            parts=(Part(key=blob.key, size_bytes=blob.size_bytes, digest=digest),),
            generation=before.generation if before is not None else 0,
            sequence=sequence,
            lineage=(before.lineage if before is not None else "") or first or blob.key,
        ),
        is_named=is_named,
    )


def _load_into(state: Any, into: Any, view: memoryview, manifest: Manifest) -> Any:
    import torch

    from strata.checkpoint.copying.cuda import page_lock, page_unlock
    from strata.checkpoint.image.in_place import is_on_cuda, load_into, targets_for

    into = targets_for(into, state)
    image = torch.frombuffer(view, dtype=torch.uint8)
    is_locked = is_on_cuda(into) and page_lock(image)
    try:
        return load_into(state, into, image, manifest.tensors, is_lent=False)
    finally:
        if is_locked:
            page_unlock(image)
