"""A snapshot that is written in pieces, beside the appends: no call of the journal takes longer than one piece.

Until `commit` the snapshot before it counts; what a crash leaves of an unfinished one is cleaned away by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from strata.core.messages import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSizes:
    file_bytes: int
    """Of the files. Freed space is used again; a file does not shrink."""
    story_bytes: int
    """Events, those of the past among them that are only kept to be shown."""
    snapshot_bytes: int


@runtime_checkable
class MeasuresItself(Protocol):
    """A journal that knows how large it is. May be asked at any time, from any thread."""

    def sizes(self) -> JournalSizes: ...


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
