"""A snapshot that is written in pieces, beside the appends: no call of the journal takes longer than one piece.

Until `commit` the snapshot before it counts; what a crash leaves of an unfinished one is cleaned away by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from strata.core.messages import Event


class SnapshotInPieces(Protocol):
    """Begun after an append: the history that it is given leads to the state of that moment."""

    def add(self, events: Sequence[Event]) -> int:
        """How many bytes they take."""
        ...

    def commit(self) -> None:
        """From now on this snapshot counts, and the events before it are only kept for the story."""
        ...

    def clean(self) -> bool:
        """Remove a piece of what is no longer needed; whether there is more. Also in place of `commit`, to give it up."""
        ...


@runtime_checkable
class CompactsInPieces(Protocol):
    """A journal that can. Others replace their snapshot in one call."""

    def begin_snapshot(self) -> SnapshotInPieces: ...
