"""The one way a checkpoint comes to be in a store, so that it is there entirely or not at all.

The payload first, durable by the store's promise; then the question whether this process may still publish; then the
manifest, only if absent. Before the manifest is there, no reader can find the checkpoint; afterwards it is complete. An attempt
that fails removes its payload again, but only where the manifest is known to be absent: the reply to its write may have
been lost, and then the checkpoint is there and keeps what it names. A repeated attempt that finds its own manifest has
succeeded.

`publish` writes a payload it is given, under a name of its own. `replace_at` writes it to a key that the caller has chosen, in
place of what may be there. `commit` is for payloads that their callers write: piece by piece, or one part per rank.

A name without the checkpoint's id in it may be wanted by two writers, so it is claimed first: `<stem>.claim`, only if
absent. The second writer takes a longer name, with the id. The claim goes when the manifest is there, so a payload
with a claim and no manifest is unfinished, and one with neither was put there by another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from strata.checkpoint.catalog import signing
from strata.checkpoint.catalog.listing import Entry, where
from strata.checkpoint.catalog.manifest import CheckpointId, Manifest, Part, decode
from strata.checkpoint.catalog.naming import claim_key, manifest_beside, manifest_key, payload_key
from strata.checkpoint.copying.digest import Digest
from strata.checkpoint.errors import Damaged
from strata.stores.protocol import AlreadyExists, NotFound, Store, StoreError

PIECE_BYTES = 16 << 20

Admit: TypeAlias = Callable[[Store], None]
"""Raises where this process may not publish to a store any more."""


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
    name: str,
    again: bool = False,
    admit: Admit | None = None,
) -> Entry:
    """Store payload and manifest. `digest` is asked for when the payload is in place; `again` marks a repeated attempt. For
    `admit` see `commit`."""
    is_claimed = draft.checkpoint_id not in name
    if is_claimed and not _claim(store, name, draft):
        name, is_claimed = f"{name}-{draft.checkpoint_id}", False
    payload_at = payload_key(name, draft.format)

    def write() -> Manifest:
        _put_payload(store, payload_at, payload)
        part = Part(key=payload_at, size_bytes=len(payload.view), digest=digest())
        return replace(draft, parts=(part,))

    return commit(
        store,
        draft.checkpoint_id,
        write,
        at=manifest_key(name),
        payload=(payload_at,),
        claim=claim_key(name) if is_claimed else None,
        again=again,
        admit=admit,
    )


def replace_at(
    store: Store,
    draft: Manifest,
    payload: Bytes,
    digest: Callable[[], Digest],
    *,
    key: str,
    admit: Admit | None = None,
) -> Entry:
    """Store a payload at `key` and its manifest beside it, whatever is there. A manifest never stands beside bytes it does not
    fit, so that of the payload which is replaced goes first; it comes back where the payload is known to be still there."""
    at = manifest_beside(key)

    def write() -> Manifest:
        part = Part(key=key, size_bytes=len(payload.view), digest=digest())
        was = store.stat(key)
        before = store.read(at) if store.stat(at) is not None else None
        store.delete(at)
        try:
            _put_payload(store, key, payload)
        except BaseException:
            with contextlib.suppress(StoreError):
                if before is not None and store.stat(key) == was:
                    store.put(at, before)
            raise
        return replace(draft, parts=(part,))

    return commit(store, draft.checkpoint_id, write, at=at, admit=admit)


def commit(
    store: Store,
    checkpoint_id: CheckpointId,
    write: Callable[[], Manifest],
    *,
    at: str,
    payload: Sequence[str] = (),
    claim: str | None = None,
    again: bool = False,
    admit: Admit | None = None,
) -> Entry:
    """Make the payload durable with `write`, which returns the manifest that names it, and put that `at` its key.

    `payload` are the keys that are removed when this fails, `claim` one that is not needed when it is over; `again` marks a
    repeated attempt. `admit` is asked just before the manifest is put, and again after it, and raises where this process may
    not publish any more: who was superseded meanwhile must not take this for its success.
    """
    entry = _find_own(store, at, checkpoint_id) if again else None
    if entry is None:
        try:
            manifest = write()
            if admit is not None:
                admit(store)
            store.put(at, manifest.encode(signing.configured()), if_absent=True)
            entry = Entry(key=at, manifest=manifest)
        except Exception as error:
            entry = _find_own_after(error, store, at, checkpoint_id)
            if entry is None:
                for key in (*payload, *([claim] if claim else [])):
                    _remove(store, key)
                raise
    if claim is not None:
        _remove(store, claim)
    if admit is not None:
        admit(store)
    return entry


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
    """Reserve a name for this save; False when it is taken."""
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
    with contextlib.suppress(AlreadyExists, Damaged):
        # An earlier attempt has got as far as the manifest, and let go of its claim.
        return _find_own(store, manifest_key(stem), draft.checkpoint_id) is not None
    return False


def _find_own(store: Store, key: str, checkpoint_id: CheckpointId) -> Entry | None:
    """The manifest that this very save has put at `key`; None where there is none. Raises `AlreadyExists` where another save's
    is there, and `Damaged` where its owner cannot be determined."""
    try:
        found = decode(store.read(key), path=where(store, key), keys=signing.configured())
    except NotFound:
        return None
    if found.checkpoint_id != checkpoint_id:
        raise AlreadyExists(
            f"'{key}' in {store.url} is the manifest of {found.checkpoint_id}.",
            tier=store.tier,
            key=key,
            reason="already exists",
        )
    return Entry(key=key, manifest=found)


def _find_own_after(error: Exception, store: Store, key: str, checkpoint_id: CheckpointId) -> Entry | None:
    """Whether the manifest was put in spite of an error. Where that cannot be determined, or where another's is in its place, which
    may name the same payload, nothing may be removed: raises the error."""
    try:
        return _find_own(store, key, checkpoint_id)
    except (StoreError, Damaged):
        raise error from None


def _remove(store: Store, key: str) -> None:
    with contextlib.suppress(StoreError):
        store.delete(key)
