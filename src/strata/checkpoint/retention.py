"""Which checkpoints may go. Pure: manifests in, decisions out.

The line of a checkpoint is itself, its parent, the parent's parent and so on: the history training would fall back
along. The newest `keep_count` whole ones of the newest checkpoint's line are kept, and everything older than those may
go, on that line or beside it. What is beside it and not older stays: it belongs to another writer, or was left behind
by going back to an earlier checkpoint, and its time comes when the line has grown past it. So does everything that
somebody is reading or writing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from strata.checkpoint.manifest import CheckpointId, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    manifest: Manifest
    reason: str


def line(manifests: Iterable[Manifest]) -> list[Manifest]:
    """The newest checkpoint and those before it, newest first, then all others, newest first."""
    left = {manifest.checkpoint_id: manifest for manifest in manifests}
    ordered = sorted(left.values(), key=lambda manifest: manifest.order, reverse=True)
    followed = list(_follow(ordered))
    names = {manifest.checkpoint_id for manifest in followed}
    return followed + [manifest for manifest in ordered if manifest.checkpoint_id not in names]


def removals(
    manifests: Sequence[Manifest],
    *,
    keep_count: int,
    in_use: Collection[CheckpointId] = (),
    damaged: Collection[CheckpointId] = (),
) -> list[Removal]:
    """What to remove, oldest first. Damaged ones do not count as kept."""
    if keep_count < 1:
        raise ValueError(f"keep_count ({keep_count}) must be at least 1")
    good = [manifest for manifest in manifests if manifest.checkpoint_id not in damaged]
    ordered = sorted(good, key=lambda manifest: manifest.order, reverse=True)
    kept = list(_follow(ordered))[:keep_count]
    if len(kept) < keep_count:
        return []
    reason = f"there are {keep_count} newer ones"
    older = [manifest for manifest in manifests if manifest.order < kept[-1].order]
    older.sort(key=lambda manifest: manifest.order)
    return [Removal(manifest=m, reason=reason) for m in older if m.checkpoint_id not in in_use]


def _follow(ordered: Sequence[Manifest]) -> Iterator[Manifest]:
    """From the newest along parents. Where a parent is not there (it was only in memory, or is damaged, or went
    already) its nearest lasting one is next, and where that is not there either, the newest one that is older."""
    known = {manifest.checkpoint_id: manifest for manifest in ordered}
    current = ordered[0] if ordered else None
    while current is not None:
        yield current
        named = [known[name] for name in (current.parent, current.lasting_parent) if name in known]
        older = [other for other in named if other.order < current.order]
        older += [other for other in ordered if other.order < current.order][:1]
        current = older[0] if older else None
