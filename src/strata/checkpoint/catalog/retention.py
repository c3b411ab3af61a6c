"""Removing checkpoints from a store: the manifest first, so that a half-removed one is never found.

A payload whose name does not tell its writer is claimed before that: if the process ends in between, the payload would otherwise
look like a file of another program, and stay.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from strata.checkpoint.catalog import leases
from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import CheckpointId, Manifest
from strata.checkpoint.catalog.naming import (
    NAMED,
    claim_key,
    manifest_beside,
    manifest_key,
    new_id,
    writer_of,
)
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound, Damaged
from strata.checkpoint.image.plain import SUFFIX, plain_files
from strata.checkpoint.verify import verify_store
from strata.core.jobs.lineage import removable
from strata.stores.protocol import Store, StoreError

log = logging.getLogger("strata.checkpoint")

_FOREIGN_ORPHAN_AGE_S = 24 * 3600.0


def remove(catalog: Catalog, entry: Entry) -> None:
    store = catalog.store
    stem = entry.key.removesuffix(manifest_key(""))
    is_claimed = False
    if writer_of(stem) is None:
        # Another writer may want the name, or there is no space for a claim: removing makes some.
        with contextlib.suppress(StoreError):
            store.put(claim_key(stem), new_id(entry.manifest.step).encode(), if_absent=True)
            is_claimed = True
    store.delete(entry.key)
    catalog.forget(entry)
    for part in entry.manifest.parts:
        store.delete(part.key)
    if is_claimed:
        store.delete(claim_key(stem))


def remove_superseded(
    catalog: Catalog,
    *,
    keep_count: int,
    run: str = "",
    in_use: Collection[CheckpointId] = (),
    damaged: Collection[CheckpointId] = (),
) -> list[Entry]:
    """Remove what newer checkpoints of this run have made superfluous (`strata.core.jobs.lineage.removable`); what went. What a user
    has named stays."""
    in_use = {*in_use, *leases.being_read(catalog.store)}
    own = {
        entry.manifest.checkpoint_id: entry
        for entry in catalog.list().entries
        if entry.manifest.run in ("", run) and NAMED not in entry.manifest.metadata
    }
    manifests = [entry.manifest for entry in own.values()]
    removed = []
    for manifest in removable(manifests, keep_count=keep_count, in_use=in_use, damaged=damaged):
        removed.append(own[manifest.checkpoint_id])
        remove(catalog, removed[-1])
        log.info("removed checkpoint %s: there are %d newer ones", manifest.checkpoint_id, keep_count)
    return removed


def remove_named(store: Store, name: str) -> None:
    """Remove the checkpoint or file with a payload of this name; one that is not there is removed already."""
    store.delete(manifest_beside(name))
    store.delete(name)


def newest_first(store: Store) -> list[str]:
    """The names of all `.pt` files, by the time they were saved: as their manifests tell, else as the store does."""
    saved_ms = {blob.key: int(blob.modified_s * 1000) for blob in store.list() if blob.key.endswith(SUFFIX)}
    for entry in Catalog(store).list().entries:
        for part in entry.manifest.parts:
            if part.key in saved_ms:
                saved_ms[part.key] = entry.manifest.sequence
    return sorted(saved_ms, key=lambda name: (saved_ms[name], name), reverse=True)


def remove_older(store: Store, *, keep_count: int) -> list[str]:
    """Remove all `.pt` files but the newest, whichever program made them; the names of those removed. What is visibly broken does not
    count as kept: a manifest that cannot be read, or a file of another length than it says."""
    removed: list[str] = []
    kept = 0
    for name in newest_first(store):
        if kept >= keep_count:
            remove_named(store, name)
            removed.append(name)
        elif _looks_intact(store, name):
            kept += 1
    return removed


def _looks_intact(store: Store, name: str) -> bool:
    blob, at = store.stat(name), manifest_beside(name)
    if blob is None or store.stat(at) is None:
        return blob is not None
    try:
        manifest: Manifest = Catalog(store).read(at)
    except Damaged:
        return False
    return manifest.parts[0].size_bytes == blob.size_bytes


def remove_orphans(catalog: Catalog) -> int:
    """Remove payloads that never got a manifest and never will, because their writer has ended; how many.

    Only what tells its writer is touched: by its own name, or by the claim beside it. Whether a writer on another
    machine has ended cannot be known from here, so its orphans are removed by age.
    """
    store = catalog.store
    blobs = {blob.key: blob for blob in store.list()}
    removed = 0
    for key, blob in blobs.items():
        stem, _, kind = key.rpartition(".")
        if kind not in ("pt", "bin", "claim"):
            continue
        writer = writer_of(store.read(key).decode(errors="replace") if kind == "claim" else stem)
        if writer is None or not (
            writer.has_ended() or time.time() - blob.modified_s > _FOREIGN_ORPHAN_AGE_S
        ):
            continue
        is_complete = manifest_key(stem) in blobs
        if kind == "claim":
            # Payloads first: without its claim, a payload would look like another program's file.
            for payload in () if is_complete else (stem + ".pt", stem + ".bin"):
                store.delete(payload)
            store.delete(key)
        elif not is_complete:
            store.delete(key)
            removed += 1
            log.info("removed %s: its save was never finished", key)
    return removed


class LastGood(CheckpointError):
    """No intact checkpoint would be left. Nothing has been removed."""

    code = "last_good"

    def __init__(self, *, names: list[str]) -> None:
        super().__init__(
            f"Without {', '.join(names)}, no restorable checkpoint would be left.",
            hint="Use --force to remove it anyway.",
        )
        self.names = tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    name: str
    step: int | None
    path: str
    size_bytes: int


def remove_chosen(store: Store, chosen: list[str], *, force: bool = False) -> list[Removed]:
    """Remove checkpoints by step, id or file name, and files without a manifest by name: the manifest first, so that a
    half-removed one is never found. Others are verified until an intact one is found; if there is none, `LastGood` is raised, unless
    `force`."""
    entries, files = _meant(store, chosen)
    ids = {entry.manifest.checkpoint_id for entry in entries}
    names = [*(str(entry.manifest.checkpoint_id) for entry in entries), *files]
    if not force:
        others = [e for e in Catalog(store).list().entries if e.manifest.checkpoint_id not in ids]
        if not any(verified.is_intact for verified in verify_store(store, others)):
            raise LastGood(names=names)
    catalog = Catalog(store)
    removed = []
    for entry in entries:
        remove(catalog, entry)
        removed.append(
            Removed(
                name=entry.manifest.checkpoint_id,
                step=entry.manifest.step,
                path=where(store, entry.key),
                size_bytes=entry.manifest.size_bytes,
            )
        )
    for name, size_bytes in files.items():
        store.delete(name)
        removed.append(Removed(name=name, step=None, path=where(store, name), size_bytes=size_bytes))
    return removed


def _meant(store: Store, chosen: list[str]) -> tuple[list[Entry], dict[str, int]]:
    listed = Catalog(store).list().entries
    plain = {blob.key: blob.size_bytes for blob in plain_files(store)}
    entries: list[Entry] = []
    files: dict[str, int] = {}
    for name in dict.fromkeys(chosen):
        fitting = [entry for entry in listed if _is_meant(entry, name)]
        if name in plain:
            files[name] = plain[name]
        elif fitting:
            entries += [entry for entry in fitting if entry not in entries]
        else:
            raise CheckpointNotFound(f"There is no checkpoint '{name}' in {store.url}. Nothing was removed.")
    return entries, files


def _is_meant(entry: Entry, name: str) -> bool:
    manifest = entry.manifest
    if name.isdecimal() and int(name) == manifest.step:
        return True
    return name in (manifest.checkpoint_id, entry.key, *(part.key for part in manifest.parts))
