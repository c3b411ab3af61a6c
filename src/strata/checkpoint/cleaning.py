"""Removing checkpoints from a store: the manifest first, so that a half-removed one is never found."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from strata.checkpoint import leases
from strata.checkpoint.catalog import Catalog, Entry
from strata.checkpoint.manifest import CheckpointId
from strata.checkpoint.naming import manifest_key, writer_of
from strata.core.lineage import removable

log = logging.getLogger("strata.checkpoint")

_FOREIGN_ORPHAN_AGE_S = 24 * 3600.0


def remove(catalog: Catalog, entry: Entry) -> None:
    catalog.store.delete(entry.key)
    catalog.forget(entry)
    for part in entry.manifest.parts:
        catalog.store.delete(part.key)


def remove_superseded(
    catalog: Catalog,
    *,
    keep_count: int,
    run: str = "",
    in_use: Collection[CheckpointId] = (),
    damaged: Collection[CheckpointId] = (),
) -> list[Entry]:
    """Remove what newer checkpoints of this run have made superfluous (`strata.core.lineage.removable`); what went."""
    in_use = {*in_use, *leases.being_read(catalog.store)}
    own = {e.manifest.checkpoint_id: e for e in catalog.list().entries if e.manifest.run in ("", run)}
    manifests = [entry.manifest for entry in own.values()]
    removed = []
    for manifest in removable(manifests, keep_count=keep_count, in_use=in_use, damaged=damaged):
        removed.append(own[manifest.checkpoint_id])
        remove(catalog, removed[-1])
        log.info("removed checkpoint %s: there are %d newer ones", manifest.checkpoint_id, keep_count)
    return removed


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
