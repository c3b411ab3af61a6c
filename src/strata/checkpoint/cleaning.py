"""Removing checkpoints from a store: the manifest first, so that a half-removed one is never found."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from strata.checkpoint import leases
from strata.checkpoint.catalog import Catalog, Entry
from strata.checkpoint.manifest import CheckpointId
from strata.checkpoint.naming import manifest_key, writer_of
from strata.checkpoint.retention import removals

log = logging.getLogger("strata.checkpoint")

_FOREIGN_ORPHAN_AGE_S = 24 * 3600.0


def remove(catalog: Catalog, entry: Entry) -> None:
    catalog.store.delete(entry.key)
    for part in entry.manifest.parts:
        catalog.store.delete(part.key)


def remove_superseded(
    catalog: Catalog, *, keep_count: int, in_use: Collection[CheckpointId], damaged: Collection[CheckpointId]
) -> None:
    """What `retention.removals` decides about this store."""
    in_use = {*in_use, *leases.being_read(catalog.store)}
    entries = {entry.manifest.checkpoint_id: entry for entry in catalog.list().entries}
    manifests = [entry.manifest for entry in entries.values()]
    for removal in removals(manifests, keep_count=keep_count, in_use=in_use, damaged=damaged):
        remove(catalog, entries[removal.manifest.checkpoint_id])
        log.info("removed checkpoint %s: %s", removal.manifest.checkpoint_id, removal.reason)


def remove_orphans(catalog: Catalog) -> int:
    """Remove payloads that never got a manifest and never will, because their writer is gone; how many.

    Only what tells its writer is touched: by its own name, or by the claim beside it. Whether a writer on another
    machine is gone cannot be known from here, so its leftovers go by age.
    """
    store = catalog.store
    blobs = {blob.key: blob for blob in store.list()}
    removed = 0
    for key, blob in blobs.items():
        stem, _, kind = key.rpartition(".")
        if kind not in ("pt", "bin", "claim"):
            continue
        writer = writer_of(store.read(key).decode(errors="replace") if kind == "claim" else stem)
        if writer is None or not (writer.is_gone() or time.time() - blob.modified_s > _FOREIGN_ORPHAN_AGE_S):
            continue
        is_complete = manifest_key(stem) in blobs
        if kind == "claim":
            # Payloads first: without its claim, a payload would look like somebody else's file.
            for payload in () if is_complete else (stem + ".pt", stem + ".bin"):
                store.delete(payload)
            store.delete(key)
        elif not is_complete:
            store.delete(key)
            removed += 1
            log.info("removed %s: its save was never finished", key)
    return removed
