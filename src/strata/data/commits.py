"""From loaders to the `data` record of a checkpoint, and back.

    ledger = DataLedger(loader)                  # on every rank
    ...
    position = ledger.commit()                   # collective: every rank calls it
    if rank == 0:
        manager.save(state, step, position=position)
    ...
    ledger.restore(restored.info.data, lasting=...)   # False where only memory had it

`commit` gathers what each rank trained since the commit before and adds it to the history the weights have. It
is called once per checkpoint, at a step boundary. When that checkpoint is lost, the next one still carries what
it held, because the weights do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from strata.core.ledger import DataCommit, RankRecord

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
    """Keeps the committed history of one or more loaders.

    A record says what was trained since the last **lasting** checkpoint. Snapshots in memory come and go between
    those, so they repeat it instead of continuing each other, and the chain of lasting records has no gaps.
    """

    def __init__(self, *loaders: Loader, gather: Gather | None = None) -> None:
        self._loaders = loaders
        self._gather = gather or gather_with_torch
        self._base = DataCommit()  # Of the newest lasting checkpoint.
        self._since: list[RankRecord] = []  # What was trained after it.
        self._before: tuple[DataCommit, list[RankRecord]] = (self._base, [])

    def commit(self, *, lasting: bool = True) -> dict[str, Any]:
        """The record for the checkpoint being made now; the same on every rank. Every rank calls it."""
        mine = [record.to_json() for loader in self._loaders for record in loader.records()]
        self._since += [RankRecord.from_json(record) for records in self._gather(mine) for record in records]
        record = self._base.next(
            self._since,
            world_size=max((loader.world_size for loader in self._loaders), default=1),
            states={loader.dataset: loader.state_dict() for loader in self._loaders},
        )
        if lasting:
            self._before = (self._base, self._since)
            self._base, self._since = record, []
        return record.to_json()

    def retract(self) -> None:
        """The last lasting checkpoint did not come to be: the next one carries what it held."""
        base, since = self._before
        self._base, self._since = base, since + self._since
        self._before = (base, [])

    def restore(self, data: Mapping[str, Any], *, lasting: bool = True) -> None:
        """Go back to what a checkpoint committed: loaders stand where its weights do."""
        restored = DataCommit.from_json(data)
        for loader in self._loaders:
            if loader.dataset in restored.states:
                loader.load_state_dict(restored.states[loader.dataset])
        self._base, self._since = (restored, []) if lasting else restored.undone()
        self._before = (self._base, [])

    def restore_onto(self, data: Mapping[str, Any], parent: Mapping[str, Any] | None) -> None:
        """`restore`, where the next lasting checkpoint will continue `parent`, whatever `data` came from: a snapshot
        of another machine may not know which checkpoints have lasted."""
        self.restore(data)
        restored = self._base
        base = DataCommit.from_json(parent) if parent else DataCommit()
        self._base, self._since = base, restored.since(base)
        self._before = (base, [])


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
