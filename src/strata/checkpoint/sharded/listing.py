"""The sharded checkpoints of a destination."""

from __future__ import annotations

import os

from strata.checkpoint.catalog.listing import Catalog, Entry, where
from strata.checkpoint.catalog.manifest import SHARDED, Manifest
from strata.checkpoint.catalog.naming import manifest_key, unique_stem
from strata.checkpoint.destinations import Destination
from strata.checkpoint.events import CheckpointInfo
from strata.core.jobs.lineage import fallback_order
from strata.stores import open_store
from strata.stores.protocol import Store


def steps(place: Destination) -> list[CheckpointInfo]:
    """The sharded checkpoints there are, in the order in which training would fall back to them."""
    store = opened(place)
    return [info_of(store, entry.manifest) for entry in sharded(Catalog(store))]


def latest(place: Destination) -> CheckpointInfo | None:
    """The newest sharded checkpoint, by its manifest; nothing of it is read."""
    return next(iter(steps(place)), None)


def sharded(catalog: Catalog) -> list[Entry]:
    """The same, as manifests."""
    by_id = {
        entry.manifest.checkpoint_id: entry
        for entry in catalog.list(fresh=True).entries
        if entry.manifest.format == SHARDED
    }
    return [by_id[manifest.checkpoint_id] for manifest in fallback_order(e.manifest for e in by_id.values())]


def info_of(store: Store, manifest: Manifest) -> CheckpointInfo:
    return CheckpointInfo.of(manifest, copies=[(store.tier, where(store, key_of(manifest)))])


def key_of(manifest: Manifest) -> str:
    """What the manifest of a sharded checkpoint is called."""
    return manifest_key(unique_stem(manifest.step, manifest.checkpoint_id))


def opened(place: Destination) -> Store:
    return open_store(place) if isinstance(place, str | os.PathLike) else place
