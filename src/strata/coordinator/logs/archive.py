"""The log on disk: one SQLite file with a writer thread of its own (`database_writer`), bounded by size and by age.

Callers hand entries over and continue; the entries are on disk a moment later, and outlive a `kill -9` from then on.
When more comes than the disk takes, entries are refused and counted, never waited for. Searches read on connections of
their own, outside the interpreter's lock, and are ended when they take too long.

Entries of other coordinators are taken in beside its own (`take_in`), under the numbers that they have there, and with them how far
the stream they come from has been read: each of them once, whatever is killed when.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from strata.coordinator.database_writer import DatabaseWriter
from strata.coordinator.journal.sqlite import used_bytes
from strata.core.telemetry.logtext import LEVELS
from strata.core.telemetry.segments import Position
from strata.core.views import LogView
from strata.errors import StrataError
from strata.logs import OutageLog

log = logging.getLogger("strata.coordinator.logs")

FLUSH_S = 0.25
PENDING_LIMIT = 50_000
"""Entries that may wait for the disk."""
DROP_AT_A_TIME = 5_000
SPARE = 0.05
"""Share of the limit that is freed when it is reached, so that not every line has to free space for itself."""
SEARCH_LIMIT_S = 5.0
CLOCK_SLACK_S = 3600.0
"""Clocks of workers may be this far ahead of ours, and a search from some time on still finds their lines."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, level INTEGER NOT NULL, source TEXT NOT NULL,
    task TEXT, worker TEXT, message TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_task ON entries (task, id) WHERE task IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_worker ON entries (worker, id) WHERE worker IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_weight ON entries (id) WHERE level >= 2;
CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""


class SearchTooLong(StrataError):
    """The log is large and the question wide."""

    code = "overloaded"

    def __init__(self) -> None:
        super().__init__(
            f"The search exceeded {SEARCH_LIMIT_S:.0f} s.",
            hint="Narrow it down: name a task, a worker, a level or a time (since).",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    """Which entries are wanted."""

    level: str | None = None
    """The least severe level that is wanted."""
    task_id: str | None = None
    worker_id: str | None = None
    text: str | None = None
    after: str | None = None
    """Only entries newer than the one with this id."""
    before: str | None = None
    """Only entries older than the one with this id."""
    since_s: float | None = None
    until_s: float | None = None

    def __call__(self, entry: LogView) -> bool:
        """Whether an entry is wanted, whatever its place in the log."""
        if self.level is not None and LEVELS.index(entry.level) < LEVELS.index(self.level):
            return False
        if self.task_id is not None and entry.task_id != self.task_id:
            return False
        if self.worker_id is not None and entry.worker_id != self.worker_id:
            return False
        if self.since_s is not None and entry.timestamp < self.since_s:
            return False
        if self.until_s is not None and entry.timestamp >= self.until_s:
            return False
        return self.text is None or self.text.lower() in entry.message.lower()

    @property
    def after_number(self) -> int:
        return number_of(self.after) if self.after else 0

    @property
    def before_number(self) -> int:
        return number_of(self.before) if self.before else 2**63 - 1


def number_of(entry_id: str) -> int:
    return min(int(entry_id.removeprefix("log_"), 16), 2**63 - 1)


@dataclass(slots=True, kw_only=True)
class _Import:
    stream: str
    position: Position
    entries: Sequence[LogView]
    stored: list[LogView] | None = None
    done: threading.Event = field(default_factory=threading.Event)


class LogArchive(DatabaseWriter):
    def __init__(self, path: Path, *, limit_bytes: int, keep_s: float) -> None:
        super().__init__(
            path,
            _SCHEMA,
            what="the log",
            gather_s=FLUSH_S,
            patience_s=10.0,
            outage=OutageLog(log, over="the log is written to disk again"),
        )
        self.refused_total = 0
        """Entries that are not on disk, because it was too slow or failed."""
        self.on_stored: Callable[[Sequence[LogView]], None] = lambda entries: None
        """Called on the writer's thread with entries of its own that are on disk."""
        self._limit_bytes = limit_bytes
        self._keep_s = keep_s
        self._imports: list[_Import] = []
        self._pending: list[LogView] = []
        self._notes: dict[str, bytes] = {}
        self.last_number: int = self._db.execute("SELECT coalesce(max(id), 0) FROM entries").fetchone()[0]
        self._thread.start()

    # --- for the event loop, never waiting ------------------------------------------------------------------

    def put(self, entries: Sequence[LogView]) -> None:
        with self._changed:
            space = PENDING_LIMIT - len(self._pending)
            self._pending += entries[:space] if len(entries) > space else entries
            self.refused_total += max(0, len(entries) - space)

    def keep_note(self, key: str, value: bytes) -> None:
        """A small value that is to be there after a restart."""
        with self._changed:
            self._notes[key] = value

    # --- waiting, for other threads -------------------------------------------------------------------------

    def note(self, key: str) -> bytes | None:
        with closing(self._reader()) as db:
            row = db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
            return bytes(row[0]) if row is not None else None

    def imported(self, stream: str) -> Position | None:
        """How far a stream of another coordinator has been taken in."""
        body = self.note(f"archive {stream}")
        return Position(*map(int, body.split())) if body is not None else None

    def take_in(self, stream: str, position: Position, entries: Sequence[LogView]) -> list[LogView] | None:
        """Entries of another coordinator, with how far its stream is read then. Those that are new here, once they are on disk;
        None where they could not be written."""
        each = _Import(stream=stream, position=position, entries=entries)
        with self._changed:
            if self._closing:
                return None
            self._imports.append(each)
            self._hurry = True
            self._changed.notify_all()
        each.done.wait()
        return each.stored

    def search(self, limit: int, wanted: LogFilter, *, below: int) -> list[LogView]:
        """Newest first, with numbers below `below`, at most `limit`."""
        where, values = ["id < ?"], [min(below, wanted.before_number)]
        terms: list[tuple[str, object]] = []
        first = wanted.after_number
        if wanted.since_s is not None:
            terms.append(("at >= ?", wanted.since_s))
            first = max(first, int((wanted.since_s - CLOCK_SLACK_S) * 1e6))
        if wanted.until_s is not None:
            terms.append(("at < ?", wanted.until_s))
        if wanted.task_id is not None:
            terms.append(("task = ?", wanted.task_id))
        if wanted.worker_id is not None:
            terms.append(("worker = ?", wanted.worker_id))
        if wanted.text is not None:
            terms.append((r"message LIKE ? ESCAPE '\'", f"%{_escaped(wanted.text)}%"))
        where += ["id > ?", *(term for term, _ in terms)]
        if wanted.level is not None:
            where.append(f"level >= {LEVELS.index(wanted.level)}")  # Literally: an index depends on it.
        query = (
            "SELECT id, at, level, source, task, worker, message FROM entries "
            f"WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT ?"
        )
        with closing(self._reader()) as db:
            until_s = time.monotonic() + SEARCH_LIMIT_S
            db.set_progress_handler(lambda: time.monotonic() > until_s, 100_000)
            try:
                rows = db.execute(query, [*values, first, *(value for _, value in terms), limit]).fetchall()
            except sqlite3.OperationalError as error:
                if "interrupted" in str(error):
                    raise SearchTooLong from None
                raise
        return [
            LogView(
                id=f"log_{number:08x}",
                timestamp=at,
                level=LEVELS[level],
                message=message,
                source=source,
                task_id=task,
                worker_id=worker,
            )
            for number, at, level, source, task, worker, message in rows
        ]

    # --- the writer -----------------------------------------------------------------------------------------

    def _collect(self) -> Callable[[], None]:
        entries, self._pending = self._pending, []
        notes, self._notes = self._notes, {}
        imports, self._imports = self._imports, []
        return partial(self._write, entries, notes, imports)

    def _write(self, entries: list[LogView], notes: dict[str, bytes], imports: list[_Import]) -> None:
        try:
            self._store(entries, notes)
            for each in imports:
                self._store_import(each)
        finally:
            for each in imports:
                each.done.set()

    def _store(self, entries: list[LogView], notes: dict[str, bytes]) -> None:
        try:
            self._check_space()
            if entries or notes:
                with self._db:
                    self._db.execute("BEGIN")
                    self._db.executemany(
                        "INSERT OR IGNORE INTO entries VALUES (?,?,?,?,?,?,?)", map(_row, entries)
                    )
                    self._db.executemany("INSERT OR REPLACE INTO notes VALUES (?,?)", notes.items())
                self.on_stored(entries)
            self._tidy()
            self._outage.ended()
        except sqlite3.Error as error:
            self.refused_total += len(entries)
            self._outage.start(
                f"the log cannot be written to {self.path}, lines are kept in memory only: {error}"
            )

    def _store_import(self, each: _Import) -> None:
        if self.is_paused():
            return
        oldest = int((time.time() - self._keep_s) * 1e6)
        stored = []
        with suppress(sqlite3.Error), self._db:
            self._db.execute("BEGIN")
            for entry in each.entries:
                if number_of(entry.id) >= oldest and (placed := self._placed(entry)) is not None:
                    self._db.execute("INSERT INTO entries VALUES (?,?,?,?,?,?,?)", _row(placed))
                    stored.append(placed)
            self._db.execute(
                "INSERT OR REPLACE INTO notes VALUES (?,?)",
                (f"archive {each.stream}", b"%d %d" % (each.position.number, each.position.rows)),
            )
            self._db.execute("COMMIT")
            each.stored = stored

    def _placed(self, entry: LogView) -> LogView | None:
        """The entry under its own number, or the next that is free; None where it is here already."""
        number, row = number_of(entry.id), _row(entry)
        while True:
            found = self._db.execute("SELECT * FROM entries WHERE id = ?", (number,)).fetchone()
            if found is None:
                return replace(entry, id=f"log_{number:08x}")
            if found[1:] == row[1:]:
                return None
            number += 1

    def _make_space(self) -> None:
        """The oldest go: what is too old, and a little more than what is too much."""
        self._drop_below(int((time.time() - self._keep_s) * 1e6))
        if self.used_bytes() <= self._limit_bytes:
            return
        while self.used_bytes() > self._limit_bytes * (1 - SPARE):
            last = self._db.execute(
                "SELECT id FROM entries ORDER BY id LIMIT 1 OFFSET ?", (DROP_AT_A_TIME,)
            ).fetchone()
            self._drop_below(last[0] if last is not None else 2**63 - 1)
            if last is None:
                return

    def _drop_below(self, number: int) -> None:
        self._db.execute("DELETE FROM entries WHERE id < ?", (number,))

    def used_bytes(self) -> int:
        """What the entries take."""
        return used_bytes(self._db)

    def _reader(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self.path))}?mode=ro", uri=True, timeout=SEARCH_LIMIT_S)


def _row(entry: LogView) -> tuple[object, ...]:
    return (
        number_of(entry.id),
        entry.timestamp,
        LEVELS.index(entry.level),
        entry.source,
        entry.task_id,
        entry.worker_id,
        entry.message,
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
