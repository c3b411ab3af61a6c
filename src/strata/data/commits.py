"""From loaders to the `data` record of a checkpoint, and back.

    ledger = DataLedger(loader)                  # on every rank
    ...
    manager.save(state, step=step, data=ledger.commit())     # collective: every rank calls commit()
    ...
    ledger.restore(manifest.data)

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
    """Keeps the committed history of one or more loaders."""

    def __init__(self, *loaders: Loader, gather: Gather | None = None) -> None:
        self._loaders = loaders
        self._gather = gather or gather_with_torch
        self._last = DataCommit()

    @property
    def last(self) -> DataCommit:
        """What the newest checkpoint holds."""
        return self._last

    def commit(self) -> dict[str, Any]:
        """The record for the checkpoint being made now; the same on every rank."""
        mine = [record.to_json() for loader in self._loaders for record in loader.records()]
        everyone = [RankRecord.from_json(record) for records in self._gather(mine) for record in records]
        self._last = self._last.next(
            everyone,
            world_size=max((loader.world_size for loader in self._loaders), default=1),
            states={loader.dataset: loader.state_dict() for loader in self._loaders},
        )
        return self._last.to_json()

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go back to what a checkpoint committed: loaders stand where its weights do."""
        restored = DataCommit.from_json(data)
        for loader in self._loaders:
            if loader.dataset in restored.states:
                loader.load_state_dict(restored.states[loader.dataset])
        self._last = restored


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
