"""Which rank's copy of a replicated state is wrong, when copies that must be equal are not.

Ranks that train the same model on different data have the same parameters and the same optimizer state after every step, bit
for bit. One whose copy differs was not changed by code, but by its memory, its processor or its device. Each rank digests its copy,
all ranks see all digests, and `judge` says which of them are odd. What more than half of the ranks have is right; with two ranks, or
without such a majority, it cannot be told which is right, and only a state that was saved while all agreed can be trusted.

Pure: the digests come from `strata.training.replicas`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """All copies are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Most ranks agree, and these do not."""

    ranks: tuple[int, ...]
    source: int
    """Whose copy replaces theirs: the first rank of the majority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """No copy is that of a majority."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks whose copies are equal to each other."""


def judge(digests: Sequence[Hashable]) -> Agreed | Odd | Undecided:
    """By the digest of each rank's copy, in rank order."""
    counts = Counter(digests)
    if len(counts) <= 1:
        return Agreed()
    common, votes = counts.most_common(1)[0]
    ranks = range(len(digests))
    if 2 * votes <= len(digests):
        return Undecided(
            groups=tuple(tuple(rank for rank in ranks if digests[rank] == each) for each in counts)
        )
    return Odd(
        ranks=tuple(rank for rank in ranks if digests[rank] != common), source=list(digests).index(common)
    )
