"""From loaders to the `data` record of a checkpoint, and back.

    ledger = DataLedger(loader)                  # on every rank
    ...
    position = ledger.commit()                   # collective: every rank calls it
    if rank == 0:
        manager.save(state, step, position=position)
    ...
    ledger.restore(restored.info.data)

`commit` gathers what each rank trained since the commit before and adds it to the history the weights have. It
is called once per checkpoint, at a step boundary.

Where other ranks are lost, `commit_alone` makes the record of a snapshot without asking them: every rank has trained the same
steps, and which samples of them is arithmetic.

A caller that saves in the background names the checkpoint, `commit(checkpoint_id)`, and reports its outcome later:
`confirm` or `fail`. Until then nothing relies on it; see `strata.core.data.ledger.LedgerChain`, which decides all this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from strata.core.data.ledger import DataCommit, LedgerChain, RankRecord, trained_by
from strata.data.errors import StateMismatch
from strata.data.loading.sampler import WithSampler

Gather = Callable[[list[dict[str, Any]]], Sequence[list[dict[str, Any]]]]
"""Exchange one value among all ranks; every rank gets all of them."""


class Loader(Protocol):
    """Anything whose reading can be committed."""

    @property
    def dataset(self) -> str: ...

    @property
    def world_size(self) -> int: ...

    def records(self) -> list[RankRecord]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class DataLedger:
    """Keeps the committed history of one or more loaders: a `LedgerChain`, fed by every rank's loaders."""

    def __init__(self, *loaders: Loader, gather: Gather | None = None) -> None:
        names = [loader.dataset for loader in loaders]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"several loaders read a dataset named {', '.join(map(repr, twice))}: the ledger could not tell them "
                "apart. Give each its own name, e.g. ElasticSampler(..., dataset='images')."
            )
        self._loaders = loaders
        self._gather = gather or gather_with_torch
        self._chain = LedgerChain()
        self._unsaid: list[RankRecord] = []
        """What this rank has trained, and not reported yet: the exchange it was meant for has failed."""
        self._since = self._positions()

    def commit(self, checkpoint_id: str | None = None, *, durable: bool = True) -> dict[str, Any]:
        """The record for the checkpoint being made now. Every rank calls it, with the same arguments.

        A durable checkpoint with an id is pending until `confirm` or `fail`; without an id it counts as confirmed.
        One that is not durable (a snapshot in memory) is never continued by another.
        """
        self._take_records()
        gathered = self._gather([record.to_json() for record in self._unsaid])
        everyone = [RankRecord.from_json(record) for records in gathered for record in records]
        return self._commit(everyone, checkpoint_id, durable=durable)

    def commit_alone(self, checkpoint_id: str) -> dict[str, Any]:
        """The record of a snapshot that this rank makes without the others: of all that trained what it trained.

        Raises `StateMismatch` where their records do not follow from its own.
        """
        self._take_records()
        derived: list[RankRecord] = []
        for loader in self._loaders:
            if not isinstance(loader, WithSampler):
                raise StateMismatch(
                    f"This rank does not know what other ranks have trained of '{loader.dataset}'."
                )
            for rank in range(loader.world_size):
                derived += loader.sampler.records_of(rank, self._since[loader.dataset])
        own = {
            (loader.dataset, loader.sampler.rank)
            for loader in self._loaders
            if isinstance(loader, WithSampler)
        }
        expected = [record for record in derived if (record.dataset, record.rank) in own]
        if trained_by(expected) != trained_by(self._unsaid):
            raise StateMismatch(
                "This rank has not trained everything from its last commit to its position, so the samples of other "
                "ranks cannot be derived from it."
            )
        return self._commit(derived, checkpoint_id, durable=False)

    def _take_records(self) -> None:
        self._unsaid += [record for loader in self._loaders for record in loader.records()]

    def _commit(
        self, records: Sequence[RankRecord], checkpoint_id: str | None, *, durable: bool
    ) -> dict[str, Any]:
        record = self._chain.commit(
            records,
            checkpoint_id,
            durable=durable,
            world_size=max((loader.world_size for loader in self._loaders), default=1),
            states={loader.dataset: loader.state_dict() for loader in self._loaders},
        )
        self._unsaid, self._since = [], self._positions()
        return record.to_json()

    def _positions(self) -> dict[str, tuple[int, int]]:
        """Epoch and position of each dataset: where the next records begin."""
        return {
            loader.dataset: (loader.sampler.epoch, loader.sampler.position)
            for loader in self._loaders
            if isinstance(loader, WithSampler)
        }

    def confirm(self, checkpoint_id: str) -> None:
        """This checkpoint is durable. May come late, out of order, or for one that is not known here."""
        self._chain.confirm(checkpoint_id)

    def fail(self, checkpoint_id: str) -> None:
        """This checkpoint will never be durable. Nothing is lost: the next ones hold what it held."""
        self._chain.fail(checkpoint_id)

    def restore(
        self, data: Mapping[str, Any], *, checkpoint_id: str | None = None, durable: bool = True
    ) -> None:
        """Go back to what a checkpoint committed: loaders stand where its weights do.

        `durable=False` where only memory had it: the next durable checkpoint continues what this one continued.
        Raises `StateMismatch` where the checkpoint was trained on data that no loader here has the name of; then
        nothing was changed.
        """
        record = DataCommit.from_json(data)
        self._check_names(record)
        for loader in self._loaders:
            if loader.dataset in record.states:
                loader.load_state_dict(record.states[loader.dataset])
        self._chain.restore(record, checkpoint_id=checkpoint_id, durable=durable)
        self._unsaid, self._since = [], self._positions()

    def _check_names(self, record: DataCommit) -> None:
        """A dataset that is new beside the known ones begins at its beginning; one that was renamed must not."""
        here = {loader.dataset for loader in self._loaders}
        trained = {epoch.dataset for epoch in record.epochs}
        unknown = here - set(record.states)
        orphans = (trained | set(record.states)) - here
        if unknown & trained or (unknown and orphans):
            known = ", ".join(map(repr, sorted(trained | set(record.states))))
            raise StateMismatch(
                f"The checkpoint was trained on {known}; it has no position in "
                f"{', '.join(map(repr, sorted(unknown)))}, which this run reads.",
                hint="If the dataset was renamed, use the name it was saved with: ElasticSampler(..., "
                f"dataset={sorted(orphans or unknown)[0]!r}). To train on other data from its beginning, start a new run "
                "in another checkpoint folder.",
            )


def gather_with_torch(mine: list[dict[str, Any]]) -> Sequence[list[dict[str, Any]]]:
    """All ranks' values through torch.distributed; this process's alone where it is not in use."""
    try:
        from torch import distributed
    except ImportError:
        return [mine]
    if not (distributed.is_available() and distributed.is_initialized()):
        return [mine]
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, mine)
    return everyone
