"""Putting one checkpoint into one store, so that it is there entirely or not at all.

The payload first, durable by the store's promise; then the manifest, only if absent. Before the manifest is there,
nobody can find the checkpoint; afterwards it is complete. A try that fails takes its payload away again, and a
repeated try that finds its own manifest has succeeded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from strata.checkpoint.catalog import Entry, where
from strata.checkpoint.digest import Digest
from strata.checkpoint.errors import Damaged
from strata.checkpoint.manifest import Manifest, Part, decode
from strata.checkpoint.naming import Stem, manifest_key, payload_key
from strata.stores.protocol import AlreadyExists, NotFound, Store, StoreError


def publish(
    store: Store,
    draft: Manifest,
    payload: memoryview,
    digest: Callable[[], Digest],
    *,
    stem: Stem,
    again: bool = False,
) -> Entry:
    """Store payload and manifest. `digest` is asked for when the payload is in place; `again` marks a repeated try."""
    name = stem(draft.step, draft.checkpoint_id)
    if draft.checkpoint_id in name:
        return _publish_as(store, name, draft, payload, digest, again=again)
    try:
        return _publish_as(store, name, draft, payload, digest, again=again)
    except AlreadyExists:
        # Somebody's payload has this name: leave it alone, finished or not, and be findable under a longer one.
        return _publish_as(store, f"{name}-{draft.checkpoint_id}", draft, payload, digest, again=again)


def find_own(store: Store, key: str, draft: Manifest) -> Entry | None:
    """The manifest at `key`, if this very save has put it there."""
    try:
        found = decode(store.read(key), path=where(store, key))
    except (NotFound, Damaged):
        return None
    return Entry(key=key, manifest=found) if found.checkpoint_id == draft.checkpoint_id else None


def _publish_as(
    store: Store,
    stem: str,
    draft: Manifest,
    payload: memoryview,
    digest: Callable[[], Digest],
    *,
    again: bool,
) -> Entry:
    payload_at, manifest_at = payload_key(stem, draft.format), manifest_key(stem)
    if again and (own := find_own(store, manifest_at, draft)):
        return own
    store.put(payload_at, payload, if_absent=draft.checkpoint_id not in stem)
    try:
        part = Part(key=payload_at, size_bytes=len(payload), digest=digest())
        manifest = replace(draft, parts=(part,))
        store.put(manifest_at, manifest.encode(), if_absent=True)
    except AlreadyExists:
        if own := find_own(store, manifest_at, draft):
            return own
        _remove(store, payload_at)
        raise
    except BaseException:
        if not find_own_quietly(store, manifest_at, draft):
            _remove(store, payload_at)
        raise
    return Entry(key=manifest_at, manifest=manifest)


def find_own_quietly(store: Store, key: str, draft: Manifest) -> bool:
    """Whether the manifest may have been put in spite of an error: then its payload must stay."""
    try:
        return find_own(store, key, draft) is not None
    except StoreError:
        return True


def _remove(store: Store, key: str) -> None:
    with contextlib.suppress(StoreError):
        store.delete(key)
