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

    def look(self) -> None:
        """Find out. Called once a second, in the thread of the journal."""
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

    def close(self) -> None: ...
