"""The ledger: which samples the weights of a checkpoint have been trained on, and the proof of it.

Positions are global within (dataset, epoch). For ordered data a position is a place in `EpochOrder`; for
sharded data it is `shard * shard_size + offset`: one algebra serves both.

A checkpoint carries a `DataCommit` in the same manifest as the weights: for each epoch what its **base** had
committed, and what each rank trained since. Weights and data therefore go back together, and training that was
rolled back is in no ancestor of the newest checkpoint: it does not count. Because every commit carries what came
before it, the proof survives retention removing old checkpoints.

`LedgerChain` says which base that is: the newest durable checkpoint that is known to exist. A save that is still
being written is not, so nothing has to be taken back when it fails; two saves that overlap continue the same base.

Epochs in a row that differ in nothing are one entry, so a record stays small however many there are.

`core.data.audit` adds the records up and proves coverage. Pure: nothing here reads or writes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strata.core.data.spans import MAX_POSITION, Run, Spans, expanded, joined, overlaps, recorded
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
    """One epoch of one dataset as one checkpoint knows it, or several in a row of which the same is true."""

    dataset: str
    epoch: int
    total: int
    count: int = 1
    """How many epochs, beginning with `epoch`, this holds for; everything else is said of each of them."""
    before: Coverage = field(default_factory=Coverage)
    """What the base had committed."""
    ranks: Mapping[int, tuple[Run, ...]] = field(default_factory=dict)
    """What each rank trained since the base."""
    dropped: Spans = field(default_factory=Spans)
    closed: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.dataset, self.epoch)

    @property
    def last(self) -> int:
        return self.epoch + self.count - 1

    @property
    def after(self) -> Coverage:
        return self.before.plus(self.trained) if self.ranks else self.before

    @property
    def trained(self) -> NDArray[np.int64]:
        """Every span since the base, repeats included."""
        return expanded(run for runs in self.ranks.values() for run in runs)

    def part(self, first: int, last: int) -> EpochCommit:
        """The same, said of some of its epochs."""
        return replace(self, epoch=first, count=last - first + 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "epoch": self.epoch,
            **({"count": self.count} if self.count > 1 else {}),
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
        # Refused here, not when it is added up.
        expanded(run for runs in ranks.values() for run in runs)
        epoch, count = _count_from_json(record["epoch"]), _count_from_json(record.get("count", 1))
        if count < 1 or epoch + count > MAX_POSITION:
            raise ValueError(f"{count} is not a number of epochs")
        return cls(
            dataset=str(record["dataset"]),
            epoch=epoch,
            total=_count_from_json(record["total"]),
            count=count,
            before=Coverage(
                covered=_spans_from_json(record["covered"]), repeated=_spans_from_json(record["repeated"])
            ),
            ranks=ranks,
            dropped=_spans_from_json(record["dropped"]),
            closed=bool(record["closed"]),
        )


Trained = tuple[EpochCommit, ...]
"""What was trained in some stretch of a run, nothing said of what came before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCommit:
    """The `data` record of a checkpoint manifest."""

    world_size: int = 1
    epochs: tuple[EpochCommit, ...] = ()
    """Every epoch trained so far, by dataset, oldest first; equal ones in a row are one entry."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """Per dataset the loader state to resume from."""
    base_known: bool = False
    """Whether `base` says what this record continues. Where it does not, that is the manifest's parent."""
    base: str | None = None
    """The checkpoint that this record continues; None: it holds everything from the beginning."""
    unconfirmed: tuple[str, ...] = ()
    """Checkpoints after the base that training went through as well, not known to exist when this was made."""

    def next(
        self, records: Iterable[RankRecord], *, world_size: int, states: Mapping[str, Any] | None = None
    ) -> DataCommit:
        """The commit that follows this one, from what every rank reports since."""
        return self.followed_by(trained_by(records), world_size=world_size, states=states)

    def followed_by(
        self, trained: Trained, *, world_size: int, states: Mapping[str, Any] | None = None
    ) -> DataCommit:
        return DataCommit(
            world_size=world_size,
            epochs=_folded(_continued(base, new) for base, new in _side_by_side(self.epochs, trained)),
            states={**self.states, **(states or {})},
        )

    def undone(self) -> tuple[DataCommit, Trained]:
        """The commit this one continues, as far as its record tells, and what led from that to this one."""
        base = _folded(
            replace(e, ranks={}, dropped=Spans(), closed=False) for e in self.epochs if e.before.covered
        )
        since = _folded(
            replace(e, before=Coverage())
            for e in self.epochs
            if e.ranks or e.dropped or e.closed or not e.before.covered
        )
        return DataCommit(world_size=self.world_size, epochs=base, states=self.states), since

    def find(self, dataset: str, epoch: int) -> EpochCommit | None:
        found = next((e for e in self.epochs if e.dataset == dataset and e.epoch <= epoch <= e.last), None)
        return found.part(epoch, epoch) if found is not None else None

    def coverage(self, dataset: str, epoch: int) -> Coverage:
        found = self.find(dataset, epoch)
        return found.after if found else Coverage()

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "world_size": self.world_size,
            "epochs": [e.to_json() for e in self.epochs],
            "states": dict(self.states),
            **({"base": self.base} if self.base_known else {}),
            **({"unconfirmed": list(self.unconfirmed)} if self.unconfirmed else {}),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataCommit:
        with _reading("data record"):
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']} is not {SCHEMA}")
            epochs = sorted(map(EpochCommit.from_json, record["epochs"]), key=lambda e: e.key)
            for one, other in pairwise(epochs):
                if one.dataset == other.dataset and other.epoch <= one.last:
                    raise ValueError(f"epoch {other.epoch} of {other.dataset!r} is there twice")
            base, unconfirmed = record.get("base"), record.get("unconfirmed", [])
            if not isinstance(base, str | None) or base == "":
                raise ValueError("the base is not the id of a checkpoint")
            if not isinstance(unconfirmed, list) or not all(isinstance(name, str) for name in unconfirmed):
                raise ValueError("unconfirmed is not a list of checkpoints")
            return cls(
                world_size=int(record["world_size"]),
                epochs=tuple(epochs),
                states=dict(record["states"]),
                base_known="base" in record,
                base=base,
                unconfirmed=tuple(unconfirmed),
            )


class LedgerChain:
    """Which checkpoint the next record continues, and what was trained since.

    The base is the newest durable checkpoint that was confirmed. Until then a save is pending: records made
    meanwhile still continue the base and repeat what the pending one holds. So each record is true by itself,
    whatever the outcome of the saves before it, and whichever of them a rank knows of. Nothing is taken back.

    Every pending save ends with `confirm` or `fail`; either may come late, out of order or for a save that this
    process does not know of.
    """

    def __init__(self) -> None:
        self._start(DataCommit(), base_known=True)

    def _start(self, base: DataCommit, *, base_known: bool, base_id: str | None = None) -> None:
        self.base = base
        self.base_id = base_id
        """The base's checkpoint; None: the beginning, or (`base_known` False) one whose id was not given."""
        self.base_known = base_known
        self._passed: tuple[
            str, ...
        ] = ()  # Unconfirmed checkpoints of a restored record: no use but to be named.
        self._pending: list[_Pending] = []  # Oldest first.
        self._since: Trained = ()  # After the newest pending one.

    @property
    def pending(self) -> tuple[str, ...]:
        """Checkpoints that are neither confirmed nor failed, oldest first."""
        return tuple(save.checkpoint_id for save in self._pending)

    def commit(
        self,
        records: Iterable[RankRecord],
        checkpoint_id: str | None = None,
        *,
        durable: bool = True,
        world_size: int = 1,
        states: Mapping[str, Any] | None = None,
    ) -> DataCommit:
        """The record of a checkpoint, from what every rank trained since the record before. A durable one without an
        id counts as confirmed at once, and leaves it to the manifest what it continues; one that is not durable never
        becomes a base."""
        unnamed = durable and checkpoint_id is None
        if checkpoint_id is not None:
            self.fail(checkpoint_id)  # A save that is attempted again takes the place of the attempt before.
        self._since = _together(self._since, trained_by(records))
        trained = reduce(_together, [*(save.trained for save in self._pending), self._since])
        record = replace(
            self.base.followed_by(trained, world_size=world_size, states=states),
            base_known=self.base_known and not unnamed,
            base=None if unnamed else self.base_id,
            unconfirmed=(*self._passed, *self.pending),
        )
        if unnamed:
            self._start(record, base_known=False)
        elif durable and checkpoint_id is not None:
            self._pending.append(_Pending(checkpoint_id=checkpoint_id, record=record, trained=self._since))
            self._since = ()
        return record

    def confirm(self, checkpoint_id: str) -> None:
        """This checkpoint exists durably: what is saved from now on continues it, or a newer one."""
        for at, save in enumerate(self._pending):
            if save.checkpoint_id == checkpoint_id:
                later, since = self._pending[at + 1 :], self._since
                self._start(save.record, base_known=True, base_id=checkpoint_id)
                self._pending, self._since = later, since
                return

    def fail(self, checkpoint_id: str) -> None:
        """This checkpoint will never exist; the next ones hold what it held anyway."""
        for at, save in enumerate(self._pending):
            if save.checkpoint_id == checkpoint_id:
                del self._pending[at]
                if at < len(self._pending):
                    later = self._pending[at]
                    self._pending[at] = replace(later, trained=_together(save.trained, later.trained))
                else:
                    self._since = _together(save.trained, self._since)
                return

    def restore(self, record: DataCommit, *, checkpoint_id: str | None = None, durable: bool = True) -> None:
        """Training continues from a checkpoint with this record. One that only memory had is no base: the next
        record continues what it continued. Should it become durable after all, `confirm` makes it the base."""
        if durable:
            self._start(record, base_known=checkpoint_id is not None, base_id=checkpoint_id)
            return
        base, trained = record.undone()
        self._start(base, base_known=record.base_known, base_id=record.base)
        self._passed = record.unconfirmed
        if checkpoint_id is None:
            self._since = trained
        else:
            self._pending = [_Pending(checkpoint_id=checkpoint_id, record=record, trained=trained)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A durable checkpoint that may or may not come to exist."""

    checkpoint_id: str
    record: DataCommit
    trained: Trained
    """Since the save before it."""


def trained_by(records: Iterable[RankRecord]) -> Trained:
    """What some ranks trained, added up."""
    epochs: dict[tuple[str, int], EpochCommit] = {}
    for record in records:
        new = EpochCommit(
            dataset=record.dataset,
            epoch=record.epoch,
            total=record.total,
            ranks={record.rank: record.runs},
            dropped=record.dropped,
            closed=record.closed,
        )
        known = epochs.get(new.key)
        epochs[new.key] = _summed(known, new)
    return _folded(epochs[key] for key in sorted(epochs))


def _together(first: Trained, then: Trained) -> Trained:
    """What was trained in two stretches, one after the other."""
    if not first or not then:
        return first or then
    return _folded(_summed(known, new) for known, new in _side_by_side(first, then))


def _summed(known: EpochCommit | None, new: EpochCommit | None) -> EpochCommit:
    if known is None or new is None:
        found = known or new
        assert found is not None
        return found
    _check_total(known, new)
    ranks = dict(known.ranks)
    for rank, runs in new.ranks.items():
        ranks[rank] = joined(ranks.get(rank, ()), runs)
    return replace(known, ranks=ranks, dropped=known.dropped | new.dropped, closed=known.closed or new.closed)


def _continued(base: EpochCommit | None, new: EpochCommit | None) -> EpochCommit:
    """What was trained since, after what the base says."""
    known = replace(base, before=base.after, ranks={}) if base is not None else None
    return _summed(known, new)


def _check_total(known: EpochCommit, new: EpochCommit) -> None:
    if known.total != new.total:
        raise LedgerError(
            f"Rank {min(new.ranks, default=0)} counts {new.total:,} samples in epoch {new.epoch} of '{new.dataset}', "
            f"the ledger {known.total:,}.",
            hint="The dataset changed during the epoch: start a new epoch, or restore the data.",
        )


def _side_by_side(
    ours: Iterable[EpochCommit], theirs: Iterable[EpochCommit]
) -> Iterator[tuple[EpochCommit | None, EpochCommit | None]]:
    """Two lists of entries, cut so that the entries of a pair are about the same epochs. Both are sorted."""
    by_dataset: dict[str, tuple[list[EpochCommit], list[EpochCommit]]] = {}
    for which, entries in enumerate((ours, theirs)):
        for entry in entries:
            by_dataset.setdefault(entry.dataset, ([], []))[which].append(entry)
    for _, sides in sorted(by_dataset.items()):
        edges = sorted({edge for side in sides for e in side for edge in (e.epoch, e.last + 1)})
        at = [0, 0]
        for first, end in pairwise(edges):
            pair: list[EpochCommit | None] = [None, None]
            for which, side in enumerate(sides):
                while at[which] < len(side) and side[at[which]].last < first:
                    at[which] += 1
                if at[which] < len(side) and side[at[which]].epoch <= first:
                    pair[which] = side[at[which]].part(first, end - 1)
            if pair != [None, None]:
                yield pair[0], pair[1]


def _folded(entries: Iterable[EpochCommit]) -> tuple[EpochCommit, ...]:
    """Epochs in a row that differ in nothing as one entry. The entries are sorted."""
    folded: list[EpochCommit] = []
    for entry in entries:
        last = folded[-1] if folded else None
        if (
            last is not None
            and last.last + 1 == entry.epoch
            and replace(entry, epoch=last.epoch, count=last.count) == last
        ):
            folded[-1] = replace(last, count=last.count + entry.count)
        else:
            folded.append(entry)
    return tuple(folded)


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
