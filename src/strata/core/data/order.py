"""The order of an epoch, and how one global batch is divided among ranks.

`EpochOrder` is a permutation of the samples that is a pure function of (seed, epoch): position in, sample out.
It needs no memory proportional to the dataset and seeks to any position in constant time, because it computes
the sample at a position instead of looking it up: a Feistel network permutes the next power of two, and a
value that lands outside the dataset is sent through again until it lands inside (cycle walking), which keeps
it a permutation. Fewer than two passes are needed on average.

`slice_for` cuts a range of positions into one contiguous slice per rank. World size decides only who reads a
position, never which sample stands there. Not cryptography: the order is hard to tell from random, not secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Halves of a few bits mix slowly: small datasets take more rounds, so that every one of the permutations of,
# say, five samples is equally likely.
ROUNDS, SMALL_ROUNDS, SMALL_BITS = 8, 24, 12
MAX_TOTAL = 2**62

Samples = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Which sample stands at each position of one epoch."""

    total: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    _keys: Words = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.total <= MAX_TOTAL:
            raise ValueError(f"total must be between 0 and 2^62, got {self.total}")
        if self.epoch < 0:
            raise ValueError(f"epoch must not be negative, got {self.epoch}")
        rounds = SMALL_ROUNDS if self.total.bit_length() <= SMALL_BITS else ROUNDS
        digest = hashlib.shake_128(f"{self.seed}/{self.epoch}".encode()).digest(8 * rounds)
        object.__setattr__(self, "_keys", np.frombuffer(digest, "<u8").astype(np.uint64))

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, positions: slice) -> Samples:
        """The samples at a contiguous range of positions."""
        start, stop, step = positions.indices(self.total)
        return self.take(np.arange(start, stop, step, dtype=np.int64))

    def take(self, positions: ArrayLike) -> Samples:
        """The samples at any positions."""
        return self._walk(self._inside(positions, "position"), forward=True)

    def positions_of(self, samples: ArrayLike) -> Samples:
        """Where samples stand: the inverse of `take`."""
        return self._walk(self._inside(samples, "sample"), forward=False)

    def _inside(self, values: ArrayLike, what: str) -> Samples:
        array = np.atleast_1d(np.asarray(values, np.int64))
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.total):
            raise IndexError(f"{what} outside an epoch of {self.total:,} samples")
        return array

    def _walk(self, values: Samples, *, forward: bool) -> Samples:
        if not self.shuffle or self.total < 2:
            return values
        bits = np.uint64((self.total - 1).bit_length())
        permuted = _feistel(values.astype(np.uint64), bits, self._keys, forward=forward)
        outside = np.flatnonzero(permuted >= self.total)
        while len(outside):
            again = _feistel(permuted[outside], bits, self._keys, forward=forward)
            permuted[outside] = again
            outside = outside[again >= self.total]
        return permuted.astype(np.int64)


def samples_of(orders: Sequence[EpochOrder], which: Samples, positions: Samples) -> Samples:
    """The samples at positions of several orders at once: what `orders[which[i]].take(positions[i])` gives for each. Pays where
    each has few of the positions."""
    samples = positions.copy()
    rounds_of = np.asarray([len(o._keys) if o.shuffle and o.total > 1 else 0 for o in orders])
    totals = np.asarray([order.total for order in orders], np.uint64)
    bits = np.asarray([max(order.total - 1, 1).bit_length() for order in orders], np.uint64)
    for rounds in (ROUNDS, SMALL_ROUNDS):
        chosen = np.flatnonzero(rounds_of[which] == rounds)
        if not len(chosen):
            continue
        keys = np.stack(
            [
                o._keys if n == rounds else np.zeros(rounds, np.uint64)
                for o, n in zip(orders, rounds_of, strict=True)
            ]
        )
        values = samples[chosen].astype(np.uint64)
        outside = np.arange(len(chosen))
        while len(outside):
            of = which[chosen[outside]]
            again = _feistel(values[outside], bits[of], keys[of].T, forward=True)
            values[outside] = again
            outside = outside[again >= totals[of]]
        samples[chosen] = values.astype(np.int64)
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlice:
    """One rank's part of one global batch: positions [start, stop)."""

    start: int
    stop: int
    weight: float
    """What to multiply a mean loss over this slice with, so that DDP's average over ranks is the mean over
    the whole global batch: a rank with fewer samples counts for less, one with none for nothing."""

    def __len__(self) -> int:
        return self.stop - self.start


def slice_for(rank: int, world_size: int, batch_start: int, batch_size: int) -> BatchSlice:
    """The part of positions [batch_start, batch_start + batch_size) that falls to `rank`.

    Slices are contiguous, in rank order, cover the batch exactly and differ by at most one sample, so the
    global batch is the same whatever the number of ranks.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    if batch_size < 0:
        raise ValueError(f"batch_size must not be negative, got {batch_size}")
    share, extra = divmod(batch_size, world_size)
    start = batch_start + rank * share + min(rank, extra)
    count = share + (1 if rank < extra else 0)
    return BatchSlice(start=start, stop=start + count, weight=loss_weight(count, world_size, batch_size))


def loss_weight(count: int, world_size: int, global_count: int) -> float:
    """The weight of a mean over `count` samples under averaging over ranks, in a batch of `global_count`."""
    return count * world_size / global_count if global_count else 0.0


def _feistel(
    values: Words, bits: np.uint64 | Words, keys: Iterable[np.uint64 | Words] | Words, *, forward: bool
) -> Words:
    """One pass over `bits` bits, a key for each round. Each round changes one half by a hash of the other, so running the
    rounds backwards undoes them; the halves may differ by a bit."""
    one = np.uint64(1)
    low_bits = bits >> one
    low_mask = (one << low_bits) - one
    high_mask = (one << (bits - low_bits)) - one
    high, low = values >> low_bits, values & low_mask
    rounds = list(enumerate(keys))
    for i, key in rounds if forward else reversed(rounds):
        if i % 2 == 0:
            high ^= _hash(low, key) & high_mask
        else:
            low ^= _hash(high, key) & low_mask
    return np.asarray((high << low_bits) | low)


def _hash(values: Words, key: np.uint64 | Words) -> Words:
    """A keyed mix whose low bits depend on every input bit."""
    z = (values ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(32)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(29)
    return z
