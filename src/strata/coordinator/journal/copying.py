"""A journal copied from one place to another: a coordinator's folder, or etcd.

No coordinator may be using either; the target must be empty. It is written as one snapshot, which exists as a whole or not at all, and
read back: what it leads to is what the source leads to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from strata.coordinator.journal import codec
from strata.coordinator.journal.etcd import EtcdJournal, EtcdLocation, hold
from strata.coordinator.journal.protocol import Journal, JournalError
from strata.coordinator.journal.space import Space
from strata.coordinator.journal.sqlite import JOURNAL_NAME, SqliteJournal
from strata.core.messages import Event

REPORT_EVENTS = 1_000

Place = Path | EtcdLocation
Progress = Callable[[str, int], None]
"""Called with what is being done, and how many events that has been done to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    events: int
    size_bytes: int


def copy_journal(source: Place, target: Place, *, progress: Progress) -> Copied:
    """Raises `JournalError`."""
    if isinstance(source, Path) and not (source / JOURNAL_NAME).exists():
        raise JournalError(
            f"There is no journal in {source}.", hint="Pass the --data-dir that `strata serve` was given."
        )
    with _opened(source) as journal:
        events = list(_counted(journal.load(), "read", progress))
    with _opened(target) as journal:
        if next(iter(journal.load()), None) is not None:
            raise JournalError(
                f"The journal {journal} is not empty.",
                hint="Choose a folder, or a prefix in etcd, that no coordinator has used: nothing is overwritten.",
            )
        journal.snapshot(_counted(events, "written", progress))
        if list(_counted(journal.load(), "verified", progress)) != events:
            raise JournalError(f"The journal {journal} differs from what was written to it.")
    return Copied(events=len(events), size_bytes=sum(map(codec.size_bytes, events)))


@contextmanager
def _opened(place: Place) -> Iterator[Journal]:
    if isinstance(place, Path):
        with closing(SqliteJournal(place)) as journal:
            yield journal
        return
    with tempfile.TemporaryDirectory() as folder:
        space = Space(Path(folder), reserve_bytes=1)
        with closing(EtcdJournal(place, space)) as shared, hold(shared, name="strata journal copy"):
            yield shared


def _counted(events: Iterable[Event], what: str, progress: Progress) -> Iterator[Event]:
    count = 0
    for count, event in enumerate(events, 1):
        yield event
        if count % REPORT_EVENTS == 0:
            progress(what, count)
    progress(what, count)
