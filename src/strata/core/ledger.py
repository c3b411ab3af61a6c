"""The ledger: which samples the weights of a checkpoint have been trained on, and the proof of it.

Positions are global within (dataset, epoch). For ordered data a position is a place in `EpochOrder`; for
sharded data it is `shard * shard_size + offset`: one algebra serves both.

A checkpoint carries a `DataCommit` in the same manifest as the weights: for each epoch the coverage that its
ancestors had committed, and what each rank trained since its parent. Weights and data therefore go back
together, and training that was rolled back is in no ancestor of the newest checkpoint: it does not count.
Because every commit carries what came before it, the proof survives retention removing old checkpoints.

`core.audit` adds the records up and proves coverage. Pure: nothing here reads or writes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strata.core.spans import MAX_POSITION, Run, Spans, expanded, overlaps, recorded
from strata.errors import StrataError

SCHEMA = 1


class LedgerError(StrataError):
    """A data record that cannot be what a checkpoint committed."""

    code: ClassVar[str] = "ledger_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Positions trained at least once, and those trained more than once."""

    covered: Spans = field(default_factory=Spans)
    repeated: Spans = field(default_factory=Spans)

    def plus(self, bounds: NDArray[np.int64]) -> Coverage:
        """With these rows of (start, stop) trained as well."""
        seen = Spans(bounds)
        return Coverage(
            covered=self.covered | seen, repeated=self.repeated | overlaps(bounds) | (self.covered & seen)
        )

    def per_shard(self, *, total: int, shard_size: int) -> NDArray[np.int64]:
        """How many samples of each shard are trained."""
        edges = np.minimum(np.arange(0, total + shard_size, shard_size, dtype=np.int64), total)
        return np.diff(self.covered.count_below(edges))

    def remaining(self, start: int, stop: int) -> Spans:
        """What of [start, stop) is still to be trained: where the next owner of a shard begins."""
        return Spans([(start, stop)]) - self.covered


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank trained of one epoch since the last commit. Ranks gather these to make a `DataCommit`."""

    dataset: str
    epoch: int
    total: int
    rank: int
    runs: tuple[Run, ...] = ()
    dropped: Spans = field(default_factory=Spans)
    """Positions left out on purpose (drop-last)."""
    closed: bool = False
    """The epoch was read to its end: what is not covered now never will be."""

    def with_span(self, start: int, stop: int) -> RankRecord:
        return replace(self, runs=recorded(self.runs, start, stop))

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "epoch": self.epoch,
            "total": self.total,
            "rank": self.rank,
            "runs": _runs_to_json(self.runs),
            "dropped": self.dropped.to_json(),
            "closed": self.closed,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankRecord:
        with _reading("rank record"):
            return cls(
                dataset=str(record["dataset"]),
                epoch=_count_from_json(record["epoch"]),
                total=_count_from_json(record["total"]),
                rank=_count_from_json(record["rank"]),
                runs=_runs_from_json(record["runs"]),
                dropped=_spans_from_json(record["dropped"]),
                closed=bool(record["closed"]),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCommit:
    """One epoch of one dataset, as one checkpoint knows it."""

    dataset: str
    epoch: int
    total: int
    before: Coverage = field(default_factory=Coverage)
    """What the ancestors had committed."""
    ranks: Mapping[int, tuple[Run, ...]] = field(default_factory=dict)
    """What each rank trained since the parent."""
    dropped: Spans = field(default_factory=Spans)
    closed: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.dataset, self.epoch)

    @property
    def after(self) -> Coverage:
        return self.before.plus(self.trained)

    @property
    def trained(self) -> NDArray[np.int64]:
        """Every span since the parent, repeats included."""
        return expanded(run for runs in self.ranks.values() for run in runs)

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "epoch": self.epoch,
            "total": self.total,
            "covered": self.before.covered.to_json(),
            "repeated": self.before.repeated.to_json(),
            "ranks": {str(rank): _runs_to_json(runs) for rank, runs in sorted(self.ranks.items())},
            "dropped": self.dropped.to_json(),
            "closed": self.closed,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EpochCommit:
        ranks = {int(rank): _runs_from_json(runs) for rank, runs in record["ranks"].items()}
        expanded(
            run for runs in ranks.values() for run in runs
        )  # Refused here, not when somebody adds it up.
        return cls(
            dataset=str(record["dataset"]),
            epoch=_count_from_json(record["epoch"]),
            total=_count_from_json(record["total"]),
            before=Coverage(
                covered=_spans_from_json(record["covered"]), repeated=_spans_from_json(record["repeated"])
            ),
            ranks=ranks,
            dropped=_spans_from_json(record["dropped"]),
            closed=bool(record["closed"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCommit:
    """The `data` record of a checkpoint manifest."""

    world_size: int = 1
    epochs: tuple[EpochCommit, ...] = ()
    """Every epoch trained so far, oldest first; a finished one is a single span."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """Per dataset the loader state to resume from."""

    def next(
        self, records: Iterable[RankRecord], *, world_size: int, states: Mapping[str, Any] | None = None
    ) -> DataCommit:
        """The commit that follows this one, from what every rank reports since."""
        epochs = {e.key: replace(e, before=e.after, ranks={}) for e in self.epochs}
        for record in records:
            key = (record.dataset, record.epoch)
            epoch = epochs.get(key) or EpochCommit(
                dataset=record.dataset, epoch=record.epoch, total=record.total
            )
            if epoch.total != record.total:
                raise LedgerError(
                    f"Rank {record.rank} counts {record.total:,} samples in epoch {record.epoch} of "
                    f"'{record.dataset}', the ledger {epoch.total:,}.",
                    hint="The dataset changed during the epoch: start a new epoch, or restore the data.",
                )
            epochs[key] = replace(
                epoch,
                ranks={**epoch.ranks, record.rank: epoch.ranks.get(record.rank, ()) + record.runs},
                dropped=epoch.dropped | record.dropped,
                closed=epoch.closed or record.closed,
            )
        return DataCommit(
            world_size=world_size,
            epochs=tuple(epochs[key] for key in sorted(epochs)),
            states={**self.states, **(states or {})},
        )

    def undone(self) -> tuple[DataCommit, list[RankRecord]]:
        """The commit this one continued, and the records that led from it to this one."""
        epochs, records = [], []
        for epoch in self.epochs:
            if epoch.before.covered:
                epochs.append(replace(epoch, ranks={}, dropped=Spans(), closed=False))
            for rank, runs in sorted(epoch.ranks.items()) or [(0, ())]:
                records.append(
                    RankRecord(
                        dataset=epoch.dataset,
                        epoch=epoch.epoch,
                        total=epoch.total,
                        rank=rank,
                        runs=runs,
                        dropped=epoch.dropped,
                        closed=epoch.closed,
                    )
                )
        return replace(self, epochs=tuple(epochs)), records

    def since(self, base: DataCommit) -> list[RankRecord]:
        """Records that lead from an ancestor to this commit. Who trained what is known where this commit continues
        that very ancestor; otherwise rank 0 stands for all."""
        records: list[RankRecord] = []
        for epoch in self.epochs:
            known = base.find(epoch.dataset, epoch.epoch)
            done = known.after.covered if known is not None else Spans()
            new = epoch.after.covered - done
            told = RankRecord(
                dataset=epoch.dataset,
                epoch=epoch.epoch,
                total=epoch.total,
                rank=0,
                dropped=epoch.dropped,
                closed=epoch.closed,
            )
            if epoch.before.covered == done and epoch.ranks:
                records += [replace(told, rank=rank, runs=runs) for rank, runs in sorted(epoch.ranks.items())]
            elif new or epoch.closed != (known is not None and known.closed):
                for start, stop in new.to_json():
                    told = told.with_span(start, stop)
                records.append(told)
        return records

    def find(self, dataset: str, epoch: int) -> EpochCommit | None:
        return next((e for e in self.epochs if e.key == (dataset, epoch)), None)

    def coverage(self, dataset: str, epoch: int) -> Coverage:
        found = self.find(dataset, epoch)
        return found.after if found else Coverage()

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "epochs": [e.to_json() for e in self.epochs],
            "states": dict(self.states),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataCommit:
        with _reading("data record"):
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']} is not {SCHEMA}")
            return cls(
                world_size=int(record["world_size"]),
                epochs=tuple(EpochCommit.from_json(e) for e in record["epochs"]),
                states=dict(record["states"]),
            )


def _runs_to_json(runs: Iterable[Run]) -> list[list[int]]:
    return [[run.start, run.length, run.stride, run.count] for run in runs]


def _runs_from_json(rows: Iterable[Sequence[int]]) -> tuple[Run, ...]:
    return tuple(
        Run(start=int(start), length=int(length), stride=int(stride), count=int(count))
        for start, length, stride, count in rows
    )


def _count_from_json(value: Any) -> int:
    if not 0 <= int(value) <= MAX_POSITION:
        raise ValueError(f"{value} is not a count")
    return int(value)


def _spans_from_json(rows: Sequence[Sequence[int]]) -> Spans:
    if any(not 0 <= int(start) < int(stop) for start, stop in rows):
        raise ValueError("a span ends before it begins")
    return Spans(rows)


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Records come from files: whatever is wrong with one is a `LedgerError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LedgerError(f"Not a {what} ({type(error).__name__}: {error}).") from error
