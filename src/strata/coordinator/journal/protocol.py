"""What the engine asks of a journal, and how one says that it cannot. `sqlite` and `etcd` are journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.core.messages import Event
from strata.errors import StrataError


class JournalError(StrataError):
    """The history cannot be read or written. Nothing more may be acknowledged."""

    code = "journal"


class JournalFull(JournalError):
    """There is no space left, not in the reserve either."""

    code = "journal_full"


class Deposed(JournalError):
    """Another coordinator leads, or may: this one must start again as a standby. Nothing that it acknowledged is lost."""

    code = "deposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    seq: int
    event: Event


class JournalSpace(Protocol):
    """Whether there is space for more."""

    @property
    def is_full(self) -> bool: ...

    @property
    def is_closed(self) -> bool:
        """Full, and without a reserve: nothing at all can be recorded."""
        ...

    @property
    def is_blocked(self) -> bool:
        """A write waits for space: what was decided last is not durable, and no reader may see it."""
        ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def low_bytes(self) -> int:
        """With less than this free changes are refused."""
        ...

    @property
    def folder(self) -> Path | str:
        """What is full, for messages."""
        ...

    def explain(self) -> tuple[str, str]:
        """Why changes are refused, and what to do."""
        ...

    def look(self) -> None:
        """Find out. Called once a second, in the thread of the journal."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSizes:
    file_bytes: int
    """Of the files, where freed space is used again and a file does not shrink; in etcd, of the snapshot and of what is after it."""
    story_bytes: int
    """Events, those of the past among them that are only kept to be shown."""
    snapshot_bytes: int
    records: int
    """Events, or batches of them where those are written together."""


class Snapshot(Protocol):
    """One that is written in pieces, beside the appends: no call takes longer than a piece. Begun after an append: the history that it
    is given leads to the state of that moment. Until `commit` the snapshot before it counts; what a crash leaves of an unfinished
    one is cleaned away by the next."""

    def add(self, events: Sequence[Event]) -> int:
        """How many bytes they take."""
        ...

    def commit(self) -> None:
        """From now on this snapshot counts, and the events before it are only kept for the story."""
        ...

    def clean(self) -> bool:
        """Remove a piece of what is no longer needed; whether there is more. Also in place of `commit`, to give it up."""
        ...


class Journal(Protocol):
    """Where the engine keeps its history: anything that appends in order and survives will do."""

    @property
    def space(self) -> JournalSpace: ...

    def __str__(self) -> str:
        """Where it is, for messages."""
        ...

    def load(self) -> Iterator[Event]:
        """The newest snapshot, then everything after it, in order."""
        ...

    def append(self, events: Sequence[Event]) -> None:
        """Durable when it returns; all of them or none."""
        ...

    def snapshot(self, events: Iterable[Event]) -> None:
        """Replace the snapshot by this history, which must lead to the state after the last append."""
        ...

    def begin_snapshot(self) -> Snapshot:
        """The same, little by little."""
        ...

    def sizes(self) -> JournalSizes | None:
        """How large it is, where it knows. May be asked at any time, from any thread."""
        ...

    def close(self) -> None: ...
