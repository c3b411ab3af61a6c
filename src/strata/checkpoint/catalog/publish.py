"""Putting one checkpoint into one store, so that it is there entirely or not at all.

The payload first, durable by the store's promise; then the manifest, only if absent. Before the manifest is there,
nobody can find the checkpoint; afterwards it is complete. A try that fails takes its payload away again, and a
repeated try that finds its own manifest has succeeded.

A name without the checkpoint's id in it may be wanted by two writers, so it is claimed first: `<stem>.claim`, only if
absent. Whoever comes second takes a longer name, with the id. The claim goes when the manifest is there, so a payload
with a claim and no manifest is unfinished, and one with neither was put there by somebody else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from strata.checkpoint.catalog.listing import Entry, where
from strata.checkpoint.catalog.manifest import Manifest, Part, decode
from strata.checkpoint.catalog.naming import Stem, claim_key, manifest_key, payload_key
from strata.checkpoint.copying.digest import Digest
from strata.checkpoint.errors import Damaged
from strata.stores.protocol import AlreadyExists, NotFound, Store, StoreError

PIECE_BYTES = 16 << 20


class Bytes(Protocol):
    """A payload that may still be growing, front to back."""

    @property
    def view(self) -> memoryview: ...

    def wait(self, upto_bytes: int | None = None) -> None: ...


def publish(
    store: Store,
    draft: Manifest,
    payload: Bytes,
    digest: Callable[[], Digest],
    *,
    stem: Stem,
    again: bool = False,
    admit: Callable[[Store], None] | None = None,
) -> Entry:
    """Store payload and manifest. `digest` is asked for when the payload is in place; `again` marks a repeated attempt.
    `admit` is asked just before the manifest is put, and again after it, and raises where this process may not publish
    any more."""
    name = stem(draft.step, draft.checkpoint_id)
    if draft.checkpoint_id not in name and not _claim(store, name, draft):
        name = f"{name}-{draft.checkpoint_id}"
    payload_at, manifest_at = payload_key(name, draft.format), manifest_key(name)
    if again and (own := _find_own(store, manifest_at, draft)):
        return own
    try:
        _put_payload(store, payload_at, payload)
        part = Part(key=payload_at, size_bytes=len(payload.view), digest=digest())
        manifest = replace(draft, parts=(part,))
        if admit is not None:
            admit(store)
        store.put(manifest_at, manifest.encode(), if_absent=True)
    except BaseException as error:
        if own := _find_own_after(error, store, manifest_at, draft):
            return own
        _remove(store, payload_at)
        _remove(store, claim_key(name))
        raise
    if draft.checkpoint_id not in name:
        _remove(store, claim_key(name))
    if admit is not None:
        admit(store)  # Who was superseded just now must not take this for its success.
    return Entry(key=manifest_at, manifest=manifest)


def _put_payload(store: Store, key: str, payload: Bytes) -> None:
    view = payload.view
    if store.free_bytes() is None:
        payload.wait()  # Object storage is fastest with all the bytes at once, in parallel.
        store.put(key, view)
        return
    with store.open_write(key, size_hint_bytes=len(view)) as writer:
        for start in range(0, len(view), PIECE_BYTES):
            payload.wait(min(start + PIECE_BYTES, len(view)))
            writer.write(view[start : start + PIECE_BYTES])
        writer.commit()


def _claim(store: Store, stem: str, draft: Manifest) -> bool:
    """Reserve a name for this save; False when somebody has it."""
    owner = draft.checkpoint_id.encode()
    try:
        store.put(claim_key(stem), owner, if_absent=True)
    except AlreadyExists:
        with contextlib.suppress(NotFound):
            return store.read(claim_key(stem)) == owner
        return False
    if store.stat(payload_key(stem, draft.format)) is None and store.stat(manifest_key(stem)) is None:
        return True
    _remove(store, claim_key(stem))
    return False


def _find_own(store: Store, key: str, draft: Manifest) -> Entry | None:
    """The manifest at `key`, if this very save has put it there."""
    try:
        found = decode(store.read(key), path=where(store, key))
    except (NotFound, Damaged):
        return None
    return Entry(key=key, manifest=found) if found.checkpoint_id == draft.checkpoint_id else None


def _find_own_after(error: BaseException, store: Store, key: str, draft: Manifest) -> Entry | None:
    """Whether the manifest was put in spite of an error. Where nobody can tell, the payload must stay: raises."""
    if not isinstance(error, Exception):
        raise error
    try:
        return _find_own(store, key, draft)
    except StoreError:
        raise error from None


def _remove(store: Store, key: str) -> None:
    with contextlib.suppress(StoreError):
        store.delete(key)
