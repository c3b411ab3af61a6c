"""Removing checkpoints on request, never the last one that is whole unless told so."""

from __future__ import annotations

from dataclasses import dataclass

from strata.checkpoint.catalog import Catalog, Entry, where
from strata.checkpoint.cleaning import remove
from strata.checkpoint.errors import CheckpointError, CheckpointNotFound
from strata.checkpoint.plain import plain_files
from strata.checkpoint.verify import verify_store
from strata.stores.protocol import Store


class LastGood(CheckpointError):
    """Nothing whole would be left. Nothing has been removed."""

    code = "last_good"

    def __init__(self, *, names: list[str]) -> None:
        super().__init__(
            f"Nothing that could be restored would be left without {', '.join(names)}.",
            hint="Use --force to remove it all the same.",
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
    half-removed one is never found. Others are verified until one is found whole; if there is none, `LastGood` is raised, unless
    `force`."""
    entries, files = _meant(store, chosen)
    ids = {entry.manifest.checkpoint_id for entry in entries}
    names = [*(str(entry.manifest.checkpoint_id) for entry in entries), *files]
    if not force:
        others = [e for e in Catalog(store).list().entries if e.manifest.checkpoint_id not in ids]
        if not any(verified.is_whole for verified in verify_store(store, others)):
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
