"""Who owns which shard: plans that are balanced, and that change as little as they can.

Guarantees, for any sequence of joins, leaves and finished shards:

* **Balanced.** Over the workers of a plan, unfinished shards differ by at most one.
* **Minimal.** A new plan moves exactly as many unfinished shards as balance demands and not one more: a
  leaver's unfinished shards, a joiner's share. Among the shards that could move, those not started move first.
* **Attributed.** A finished shard keeps the name of the worker that finished it, also after that worker left.
* **Deterministic.** The same history gives the same plan on every machine and in every process.

Placement follows a consistent-hash ring with bounded load: a shard belongs to the next worker clockwise that
still has capacity. The first plan is the same step as every other one, starting from shards that no worker owns.
Pure, and vectorised over shards. Knows nothing of datasets, epochs or progress beyond the two masks it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strata.core.text import counted

UNOWNED = -1
STRANGER = -2  # A name that is not in the list it was looked for in.
# Points per worker: the ring's own load varies by 1/sqrt of this, before the bound evens it out.
VIRTUAL_NODES = 32
OWNER_BITS = np.uint64(0xFFFFF)  # Up to a million workers.

Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]
Owners = NDArray[np.int32]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPlan:
    """One version of the assignment of every shard of a dataset."""

    version: int
    workers: tuple[str, ...]
    """The live workers, sorted."""
    owners: Owners
    """Per shard an index into `workers`, then into `former`; -1 is no worker."""
    former: tuple[str, ...] = ()
    """Workers that left but still have finished shards to their name, sorted."""
    salt: str = ""
    reason: str = ""
    """Why this plan differs from the one before it, for people."""

    @property
    def shard_count(self) -> int:
        return len(self.owners)

    def owner_of(self, shard: int) -> str | None:
        index = int(self.owners[shard])
        return None if index == UNOWNED else (self.workers + self.former)[index]

    def shards_of(self, worker: str) -> Ids:
        """Ascending shard ids of a worker, present or former; none for a stranger."""
        names = self.workers + self.former
        if worker not in names:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.owners == names.index(worker)).astype(np.int64)

    def counts(self, among: Mask | None = None) -> Ids:
        """Shards per live worker, in the order of `workers`; with `among`, counting only those shards."""
        owners = self.owners if among is None else self.owners[among]
        live = owners[(owners >= 0) & (owners < len(self.workers))]
        return np.bincount(live, minlength=len(self.workers)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """What changed hands between two plans: all that a journal needs beside the list of workers."""

    shards: Ids
    to: Owners
    """Per shard an index into `names`; -1 is no worker."""
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shards)

    def by_owner(self) -> dict[str, list[int]]:
        """Shard ids grouped by the name of their new owner ('' is no worker): the form to write down."""
        order = np.argsort(self.to, kind="stable")
        owners, starts = np.unique(self.to[order], return_index=True)
        groups = np.split(self.shards[order], starts[1:])
        # No moves split into one empty group.
        return {
            "" if owner == UNOWNED else self.names[owner]: ids.tolist()
            for owner, ids in zip(owners.tolist(), groups, strict=False)
        }

    @classmethod
    def from_owners(cls, grouped: Mapping[str, Sequence[int]]) -> Moves:
        names = tuple(sorted(name for name in grouped if name))
        index = {"": UNOWNED} | {name: i for i, name in enumerate(names)}
        shards = [np.asarray(ids, np.int64) for ids in grouped.values()]
        to = [np.full(len(ids), index[name], np.int32) for name, ids in grouped.items()]
        return cls(
            shards=np.concatenate([np.empty(0, np.int64), *shards]),
            to=np.concatenate([np.empty(0, np.int32), *to]),
            names=names,
        )


def first_plan(workers: Sequence[str], shard_count: int, *, salt: str = "") -> ShardPlan:
    """The plan of a dataset that no worker has read from. `salt` (the dataset's id) decorrelates datasets."""
    if shard_count < 0:
        raise ValueError(f"shard_count must not be negative, got {shard_count}")
    nobody = ShardPlan(version=0, workers=(), owners=np.full(shard_count, UNOWNED, np.int32), salt=salt)
    return replan(nobody, workers, cause="first plan")


def replan(
    plan: ShardPlan,
    workers: Sequence[str],
    *,
    finished: Mask | None = None,
    started: Mask | None = None,
    cause: str = "",
) -> ShardPlan:
    """The next plan for `workers`, moving the fewest unfinished shards that balance allows.

    Returns `plan` itself when nothing changes. `cause` ("worker-7 failed") begins the reason; without it the
    names that came and went do.
    """
    live = tuple(sorted(set(workers)))
    names = _names(plan, live)
    owners = _translate(plan.owners, plan.workers + plan.former, names)
    unfinished = ~_mask(finished, plan)
    in_progress = _mask(started, plan)

    # A departed worker keeps the name on what it finished; everything else it had is up for assignment.
    kept = unfinished & (owners >= 0) & (owners < len(live))
    held = np.bincount(owners[kept], minlength=len(live)).astype(np.int64)
    started_held = np.bincount(owners[kept & in_progress], minlength=len(live))
    quota = _quotas(held, started_held, int(unfinished.sum()), live=live, salt=plan.salt)
    loose = unfinished & ~kept
    loose[_surplus(owners, kept, in_progress, held, quota)] = True
    shards = np.flatnonzero(loose).astype(np.int64)
    owners[shards] = _place(shards, live, quota - np.minimum(held, quota), salt=plan.salt)

    after = _compacted(plan.version + 1, owners, names, live, plan.salt)
    moved = int(np.count_nonzero(_differ(plan, after)))
    if live == plan.workers and not moved:
        return plan
    return replace(after, reason=_reason(plan, after, moved, cause))


def moves_between(before: ShardPlan, after: ShardPlan) -> Moves:
    """The shards whose owner's name differs."""
    shards = np.flatnonzero(_differ(before, after)).astype(np.int64)
    return Moves(shards=shards, to=after.owners[shards], names=after.workers + after.former)


def apply_moves(
    plan: ShardPlan, moves: Moves, workers: Sequence[str], version: int, *, reason: str = ""
) -> ShardPlan:
    """The plan that `moves` leads to. What a departed worker had and did not hand on stays in its name."""
    live = tuple(sorted(set(workers)))
    names = _names(plan, live)
    owners = _translate(plan.owners, plan.workers + plan.former, names)
    to = _translate(moves.to, moves.names, names)
    if np.any(to == STRANGER):
        raise ValueError(
            f"moves name workers that are not in the plan: {sorted(set(moves.names) - set(names))}"
        )
    owners[moves.shards] = to
    return replace(_compacted(version, owners, names, live, plan.salt), reason=reason)


# Names and indices ------------------------------------------------------------------------------------------


def _names(plan: ShardPlan, live: tuple[str, ...]) -> tuple[str, ...]:
    return live + tuple(sorted({*plan.workers, *plan.former} - set(live)))


def _translate(owners: Owners, names: Sequence[str], into: Sequence[str]) -> Owners:
    """The same owners as indices into another list of names."""
    index = {name: i for i, name in enumerate(into)}
    # One more entry for no worker: index -1 reads the last.
    table = np.array([*(index.get(name, STRANGER) for name in names), UNOWNED], np.int32)
    return table[owners]


def _compacted(
    version: int, owners: Owners, names: tuple[str, ...], live: tuple[str, ...], salt: str
) -> ShardPlan:
    """A plan whose `former` lists only workers that still have a shard to their name."""
    used = np.bincount(owners[owners >= 0], minlength=len(names)) > 0
    former = tuple(name for name, seen in zip(names[len(live) :], used[len(live) :], strict=True) if seen)
    return ShardPlan(
        version=version,
        workers=live,
        owners=_translate(owners, names, live + former),
        former=former,
        salt=salt,
    )


def _differ(before: ShardPlan, after: ShardPlan) -> Mask:
    names = after.workers + after.former
    return np.asarray(_translate(before.owners, before.workers + before.former, names) != after.owners)


def _mask(mask: Mask | None, plan: ShardPlan) -> Mask:
    if mask is None:
        return np.zeros(plan.shard_count, np.bool_)
    if len(mask) != plan.shard_count:
        raise ValueError(f"a mask of {len(mask)} entries does not fit {plan.shard_count} shards")
    return np.asarray(mask, np.bool_)


# The decision -----------------------------------------------------------------------------------------------


def _quotas(held: Ids, started_held: Ids, shards: int, *, live: Sequence[str], salt: str) -> Ids:
    """How many unfinished shards each worker shall have: the mean, rounded down or up.

    Rounding up goes to workers that already hold more than the mean, which is what makes movement minimal;
    among them to those with most shards started; then by hash, so that the same names are not always first.
    """
    if not live:
        return np.empty(0, np.int64)
    share, extra = divmod(shards, len(live))
    order = np.lexsort((_worker_hashes(live, salt), -started_held, held <= share))
    quota = np.full(len(live), share, np.int64)
    quota[order[:extra]] += 1
    return quota


def _surplus(owners: Owners, kept: Mask, in_progress: Mask, held: Ids, quota: Ids) -> Ids:
    """The shards that workers above their quota give away: not started first, then the highest id, which a
    worker reading in order reaches last."""
    over = held > quota
    if not over.any():
        return np.empty(0, np.int64)
    shards = np.flatnonzero(kept)
    shards = shards[over[owners[shards]]].astype(np.int64)
    ranked = shards[np.lexsort((shards, ~in_progress[shards], owners[shards]))]
    return ranked[_rank_in_group(owners[ranked]) >= quota[owners[ranked]]]


def _place(shards: Ids, live: Sequence[str], capacity: Ids, *, salt: str) -> Owners:
    """Each shard to the next worker clockwise with capacity left; to none when there are no workers."""
    placed = np.full(len(shards), UNOWNED, np.int32)
    if not len(shards) or not live:
        return placed
    points = _ring(live, salt)
    point_owners = (points & OWNER_BITS).astype(np.int64)
    capacity = capacity.copy()
    hashes = _mix(shards.astype(np.uint64) ^ _seed(salt))
    waiting = np.argsort(hashes)  # `_mix` is a bijection: no ties, so any sort gives this order.
    while len(waiting):  # At least one worker fills up in every round but the last.
        open_points = capacity[point_owners] > 0
        points, point_owners = points[open_points], point_owners[open_points]
        nearest = point_owners[np.searchsorted(points, hashes[waiting]) % len(points)]
        nearest, rank = np.divmod(np.sort(nearest * len(waiting) + np.arange(len(waiting))), len(waiting))
        waiting = waiting[rank]
        accepted = _rank_in_group(nearest) < capacity[nearest]
        placed[waiting[accepted]] = nearest[accepted]
        capacity -= np.bincount(nearest[accepted], minlength=len(capacity))
        waiting = waiting[~accepted]
    return placed


def _rank_in_group(groups: NDArray[np.integer]) -> Ids:
    """For a sorted array, how many equal entries stand before each."""
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else np.empty(0, np.int64)
    sizes = np.diff(np.r_[starts, len(groups)])
    return np.arange(len(groups), dtype=np.int64) - np.repeat(starts, sizes)


# Hashing ----------------------------------------------------------------------------------------------------


def _ring(workers: Sequence[str], salt: str) -> Hashes:
    """Sorted points, each with the index of its worker in the low bits: one plain sort, and never a tie
    between two workers."""
    base = _worker_hashes(workers, salt)
    points = _mix(base[:, None] + np.arange(1, VIRTUAL_NODES + 1, dtype=np.uint64)[None, :])
    index = np.arange(len(workers), dtype=np.uint64)[:, None]
    return np.sort(((points & ~OWNER_BITS) | index).ravel())


def _worker_hashes(workers: Sequence[str], salt: str) -> Hashes:
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in workers)
    return np.asarray(_mix(np.frombuffer(digests, "<u8").astype(np.uint64) ^ _seed(salt)))


def _seed(salt: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little"))


def _mix(values: Hashes) -> Hashes:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


# Words ------------------------------------------------------------------------------------------------------


def _reason(before: ShardPlan, after: ShardPlan, moved: int, cause: str) -> str:
    came = sorted(set(after.workers) - set(before.workers))
    lost = sorted(set(before.workers) - set(after.workers))
    what = cause or "; ".join(
        [f"{_listed(names)} {verb}" for names, verb in ((lost, "left"), (came, "joined")) if names]
    )
    shards = counted(moved, "unfinished shard")
    if not after.workers:
        return f"{what or 'no workers left'}: {shards} unassigned"
    if not moved:
        return f"{what}: no unfinished shard had to move"
    if lost or not before.workers:
        return f"{what}: {shards} spread over {counted(len(after.workers), 'worker')}"
    if came:
        return (
            f"{what}: takes {shards} from the others"
            if len(came) == 1
            else f"{what}: take {shards} from the others"
        )
    return f"{what or 'uneven progress'}: {shards} moved to balance the rest"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
