"""What a store holds: its manifests, and nothing that has none."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from strata.checkpoint.catalog import signing
from strata.checkpoint.catalog.manifest import SUFFIX, CheckpointId, Manifest, Part, decode
from strata.checkpoint.errors import Damaged, Untrusted
from strata.stores.protocol import NotFound, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A manifest and the key it was read from."""

    key: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The readable manifests of a store, newest first, and why others could not be read."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]
    untrusted: int = 0
    """How many of the problems are manifests that no accepted key has signed."""


class Catalog:
    """Reads each manifest once: they never change. `fresh` reads them all again."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[str, Manifest] = {}
        self._lock = threading.Lock()

    def list(self, *, fresh: bool = False) -> Listing:
        known: dict[str, Manifest] = {}
        problems = []
        untrusted = 0
        with self._lock:
            before = {} if fresh else self._known
            for blob in self.store.list():
                if not blob.key.endswith(SUFFIX):
                    continue
                try:
                    known[blob.key] = before.get(blob.key) or self.read(blob.key)
                except NotFound:
                    continue  # Deleted since it was listed.
                except Damaged as error:
                    problems.append(str(error))
                    untrusted += isinstance(error, Untrusted)
            self._known = known
        entries = [Entry(key=key, manifest=manifest) for key, manifest in known.items()]
        entries.sort(key=lambda entry: entry.manifest.order, reverse=True)
        return Listing(entries=tuple(entries), problems=tuple(problems), untrusted=untrusted)

    def known_ids(self) -> set[CheckpointId]:
        """As of the last listing, and what was added since."""
        with self._lock:
            return {manifest.checkpoint_id for manifest in self._known.values()}

    def add(self, entry: Entry) -> None:
        """A manifest that was just put there need not be read."""
        with self._lock:
            self._known[entry.key] = entry.manifest

    def forget(self, entry: Entry) -> None:
        """A manifest that was just deleted."""
        with self._lock:
            self._known.pop(entry.key, None)

    def read(self, key: str) -> Manifest:
        return decode(self.store.read(key), path=where(self.store, key), keys=signing.configured())


def where(store: Store, key: str) -> str:
    """A key as a user would write it: a path on disk, or a URL."""
    path_of = getattr(store, "path_of", None)
    return str(path_of(key)) if path_of is not None else f"{store.url.rstrip('/')}/{key}"


def check_part(store: Store, part: Part, *, called: str = "part") -> None:
    """Raises `Damaged` for a part that is missing or has another size."""
    blob = store.stat(part.key)
    if blob is None:
        raise Damaged(path=where(store, part.key), reason=f"the {called} is missing")
    if blob.size_bytes != part.size_bytes:
        raise Damaged(
            path=where(store, part.key),
            reason=f"the {called} has {blob.size_bytes} bytes, its manifest says {part.size_bytes}",
        )
