"""Which checkpoints may go. Pure: manifests in, decisions out.

The line of a checkpoint is itself, its parent, the parent's parent and so on: the history training would fall back
along. The newest `keep_count` of the newest checkpoint's line are kept; what was left behind by going back to an
older checkpoint is not. Damaged checkpoints do not count, and whatever else happens the newest undamaged one stays, and
so does everything that somebody is reading or writing.
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
    """What to remove, oldest first."""
    if keep_count < 1:
        raise ValueError(f"keep_count ({keep_count}) must be at least 1")
    good = [manifest for manifest in manifests if manifest.checkpoint_id not in damaged]
    ordered = sorted(good, key=lambda manifest: manifest.order, reverse=True)
    current = [manifest.checkpoint_id for manifest in _follow(ordered)]
    kept = {*current[:keep_count], *in_use}
    if not good:
        return []  # Nothing is known to be whole: nothing is given up.
    found = []
    for manifest in sorted(manifests, key=lambda manifest: manifest.order):
        if manifest.checkpoint_id in kept:
            continue
        if manifest.checkpoint_id in damaged:
            reason = "it is damaged, and there is a good one"
        elif manifest.checkpoint_id in current:
            reason = f"there are {keep_count} newer ones"
        else:
            reason = "training went back to an earlier checkpoint and took another line"
        found.append(Removal(manifest=manifest, reason=reason))
    return found


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
