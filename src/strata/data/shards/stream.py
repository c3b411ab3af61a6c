"""One worker's shards as batches, each sample of them once.

For workers that read at their own pace instead of in step. A position is `shard * shard_size + offset`: the
ledger counts shards and ordered epochs with the same arithmetic. Reading begins in each shard where the committed
checkpoint left it. What is read counts when the trainer takes it and a checkpoint commits it; after a crash
the worker that gets the shard continues from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from strata.core.data.ledger import RankRecord
from strata.core.data.order import EpochOrder
from strata.data.loading.steps import MapDataset
from strata.data.shards.manager import Shard


class ShardBatch(NamedTuple):
    """Samples of one shard, and which positions they are."""

    data: list[Any]
    shard: Shard
    start: int
    stop: int


class ShardStream:
    """Batches of the shards that a worker was given."""

    def __init__(
        self,
        samples: MapDataset,
        shards: Sequence[Shard],
        *,
        total: int,
        batch_size: int,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        """`samples` is a `DatasetReader` or any map-style dataset of `total` samples; `rank` says whose record it
        is. With `shuffle`, samples are permuted within their shard."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self._samples = samples
        self._shards = list(shards)
        self._total = total
        self._batch_size = batch_size
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._records: dict[tuple[str, int], RankRecord] = {}
        self.progress = {shard.id: shard.done for shard in shards}
        """Per shard how many samples the trainer has taken, for `report_progress`."""

    def __iter__(self) -> Iterator[ShardBatch]:
        for shard in self._shards:
            while (done := self.progress[shard.id]) < len(shard):
                count = min(self._batch_size, len(shard) - done)
                batch = self._read(shard, done, count)
                self._take(batch)
                yield batch

    def records(self) -> list[RankRecord]:
        """What was taken since the last call; see `DataCommit.next`."""
        records, self._records = list(self._records.values()), {}
        return records

    def _read(self, shard: Shard, done: int, count: int) -> ShardBatch:
        order = shard_order(shard.id, len(shard), seed=self._seed, epoch=shard.epoch, shuffle=self._shuffle)
        ids = (order[done : done + count] + shard.start).tolist()
        many = getattr(self._samples, "__getitems__", None)
        data = many(ids) if many else [self._samples[i] for i in ids]
        return ShardBatch(data, shard, shard.start + done, shard.start + done + count)

    def _take(self, batch: ShardBatch) -> None:
        shard = batch.shard
        key = (shard.dataset_id, shard.epoch)
        record = self._records.get(key) or RankRecord(
            dataset=shard.dataset_id, epoch=shard.epoch, total=self._total, rank=self._rank
        )
        self._records[key] = record.with_span(batch.start, batch.stop)
        self.progress[shard.id] = batch.stop - shard.start


def shard_order(shard_id: int, size: int, *, seed: int, epoch: int, shuffle: bool) -> EpochOrder:
    """The order in which a shard's samples are read: its own for every shard, the same on every machine."""
    return EpochOrder(total=size, seed=seed * 1_000_003 + shard_id, epoch=epoch, shuffle=shuffle)
