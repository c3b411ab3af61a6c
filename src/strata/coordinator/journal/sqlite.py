"""The durable history: what the coordinator has acknowledged survives it.

`append` returns only when the events are on disk (SQLite in WAL mode, `synchronous=FULL`, one transaction per batch). A
snapshot is a shorter history that leads to the same state, written in pieces between the appends; loading yields the newest
that was completed and then every event after it. Older events are kept for the story (`strata replay`) up to a bound in
number and in bytes, values without their bodies: however often a value is overwritten, the file stays as large as the state
and the story are.

A write that fails for lack of space is repeated once with the reserve (`space`) released. Nothing else is ever repeated: after
a failed fsync it is unknown what the disk holds. A snapshot leaves the reserve, and the space that changes need, alone.

One writer at a time: a lock on the data directory refuses a second coordinator. Not safe for concurrent
calls; the engine makes one call at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import msgspec

import strata
from strata.coordinator.journal import codec
from strata.coordinator.journal.protocol import Entry, JournalError, JournalFull, JournalSizes
from strata.coordinator.journal.space import RESERVE_BYTES, Space
from strata.core.messages import Event, ValueSwapped
from strata.files import make_file_private

log = logging.getLogger("strata.coordinator")

JOURNAL_NAME = "journal.sqlite"
STORY_EVENTS_KEPT = 200_000
STORY_BYTES_KEPT = 128 << 20
BODY_KEPT_BYTES = 512
"""A longer record of a swapped value is kept in the story without what the value was."""
WAL_LIMIT_BYTES = 4 << 20
"""What SQLite keeps of its log after a large transaction."""
BESIDE_WAL_LIMIT_BYTES, BESIDE_CACHE_KIB = 16 << 20, 16_384
"""The same, and its cache, of databases beside the journal: the log, and the history of metrics."""
NO_SPACE = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR_WRITE,  # What a quota of the file system looks like.
        sqlite3.SQLITE_IOERR_SHMSIZE,
        sqlite3.SQLITE_IOERR_TRUNCATE,
    }
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot(position INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot_2(position INTEGER PRIMARY KEY, kind TEXT NOT NULL, body BLOB NOT NULL);
"""
SNAPSHOT_TABLES = ("snapshot", "snapshot_2")
"""By turns: one counts, and the next is written into the other."""
WRITTEN_TWICE = 2
"""What is written goes to SQLite's log, and from there to the tables."""
CLEANED_AT_ONCE = 2_000
"""Rows. A piece of cleaning takes about as long as a commit."""


class SqliteJournal:
    def __init__(self, data_dir: Path, *, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.path = data_dir / JOURNAL_NAME
        self._lock = lock_directory(data_dir)
        try:
            self.space = Space(data_dir, reserve_bytes=reserve_bytes)
            open_privately(self.path)
            try:
                self._open()
            except sqlite3.OperationalError as error:
                if not _lacks_space(error) or not self.space.release():
                    raise
                self._db.close()
                self._open()
        except (sqlite3.DatabaseError, ValueError, OSError) as error:
            os.close(self._lock)
            raise _damaged(self.path, f"cannot be opened: {error}") from error
        except JournalError:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA journal_size_limit={WAL_LIMIT_BYTES}")
        self._db.executescript(_SCHEMA)
        self._check_format()
        row = self._db.execute("SELECT max(seq), total(length(body)), count(*) FROM events").fetchone()
        self._seq = max(row[0] or 0, self._snapshot_seq())
        self._story_bytes, self._story_records = int(row[1]), int(row[2])
        query = f"SELECT total(length(body)) FROM {self._snapshot_table()}"
        self._snapshot_bytes = int(self._db.execute(query).fetchone()[0])

    def __str__(self) -> str:
        return str(self.path)

    def load(self) -> Iterator[Event]:
        try:
            table = self._snapshot_table()
            for kind, body in self._db.execute(f"SELECT kind, body FROM {table} ORDER BY position"):
                yield _decode(self.path, kind, body)
            last = self._snapshot_seq()
            query = "SELECT seq, kind, body FROM events WHERE seq > ? ORDER BY seq"
            for seq, kind, body in self._db.execute(query, (last,)):
                if seq != last + 1:
                    raise _damaged(self.path, f"has lost events: {seq} follows {last}")
                last = seq
                yield _decode(self.path, kind, body)
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, f"cannot be read: {error}") from error

    def append(self, events: Sequence[Event]) -> None:
        rows = [
            (seq, event.at_s, codec.kind_of(event), codec.encode(event))
            for seq, event in enumerate(events, self._seq + 1)
        ]

        def insert() -> None:
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)

        try:
            try:
                self._attempt(insert)
            except sqlite3.DatabaseError as error:
                if not _lacks_space(error) or not self.space.release():
                    raise
                self._attempt(insert)
        except sqlite3.DatabaseError as error:
            kind = JournalFull if _lacks_space(error) else JournalError
            raise kind(
                f"The journal {self.path} cannot be written: {error}.",
                hint="Free some disk space or check the disk; then start the coordinator again. "
                "Everything it acknowledged is in the journal.",
            ) from error
        self._seq += len(rows)
        self._story_bytes += sum(len(body) for *_, body in rows)
        self._story_records += len(rows)

    def snapshot(self, events: Iterable[Event]) -> None:
        snapshot = self.begin_snapshot()
        snapshot.add(list(events))
        snapshot.commit()
        while snapshot.clean():
            pass

    def begin_snapshot(self) -> SqliteSnapshot:
        return SqliteSnapshot(self)

    def sizes(self) -> JournalSizes:
        """Counted as it is written, not looked up."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return JournalSizes(
            file_bytes=sum(file.stat().st_size for file in files if file.exists()),
            story_bytes=self._story_bytes,
            snapshot_bytes=self._snapshot_bytes,
            records=self._story_records,
        )

    def _attempt(self, work: Callable[[], object]) -> None:
        """All of it, durable, or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            work()
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def _snapshot_seq(self) -> int:
        row = self._db.execute("SELECT value FROM meta WHERE key = 'snapshot_seq'").fetchone()
        return int(row[0]) if row else 0

    def _snapshot_table(self) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = 'snapshot_table'").fetchone()
        return SNAPSHOT_TABLES[int(row[0])] if row else SNAPSHOT_TABLES[0]

    def _check_format(self) -> None:
        """From here on it is a journal of this version: an earlier one, which knows less, refuses it."""
        check_format(self._db, self.path)
        known = self._db.execute("SELECT key, value FROM meta").fetchall()
        wanted = (("schema", str(codec.FORMAT)), ("written_by", strata.__version__))
        # On a full disk nothing is written that is there already.
        rows = [row for row in wanted if row not in known]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)


class SqliteSnapshot:
    """A snapshot under way. Between its pieces the journal may be appended to."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self._db = journal._db
        self._seq = journal._seq
        self._before = journal._snapshot_seq()
        self._current = journal._snapshot_table()
        self._rows = self._bytes = 0
        other = next(table for table in SNAPSHOT_TABLES if table != self._current)
        self._unused = self._next = other
        while self._clean_table():  # What a crash has left there.
            pass
        self._bodies_after = self._before

    def add(self, events: Sequence[Event]) -> int:
        rows = [(i, codec.kind_of(e), codec.encode(e)) for i, e in enumerate(events, self._rows)]
        size_bytes = sum(len(body) for *_, body in rows)
        if not self._journal.space.has(WRITTEN_TWICE * size_bytes):
            raise JournalFull(
                f"The journal {self._journal} cannot be compacted: what is free is left for changes."
            )
        self._attempt(lambda: self._db.executemany(f"INSERT INTO {self._next} VALUES (?, ?, ?)", rows))
        self._rows += len(rows)
        self._bytes += size_bytes
        return size_bytes

    def commit(self) -> None:
        counts = [
            ("snapshot_seq", str(self._seq)),
            ("snapshot_table", str(SNAPSHOT_TABLES.index(self._next))),
        ]
        self._attempt(lambda: self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", counts))
        self._unused = self._current
        self._journal._snapshot_bytes = self._bytes

    def clean(self) -> bool:
        if self._clean_table():
            return True
        return self._unused == self._current and (self._drop_bodies() or self._drop_oldest())

    def _clean_table(self) -> bool:
        query = f"DELETE FROM {self._unused} WHERE position IN (SELECT position FROM {self._unused} LIMIT ?)"
        deleted = 0

        def delete() -> None:
            nonlocal deleted
            deleted = self._db.execute(query, (CLEANED_AT_ONCE,)).rowcount

        if self._db.execute(f"SELECT 1 FROM {self._unused} LIMIT 1").fetchone() is not None:
            self._attempt(delete)
        return deleted == CLEANED_AT_ONCE

    def _drop_bodies(self) -> bool:
        """What values were is in the snapshot, where they still are that: the story keeps only that they changed."""
        query = "SELECT seq, body FROM events WHERE seq > ? AND seq <= ? AND kind = ? AND length(body) > ? ORDER BY seq LIMIT ?"
        limits = (
            self._bodies_after,
            self._seq,
            ValueSwapped.__name__,
            BODY_KEPT_BYTES,
            CLEANED_AT_ONCE // 10,
        )
        found = self._db.execute(query, limits).fetchall()
        short = []
        for seq, body in found:
            event = _decode(self._journal.path, ValueSwapped.__name__, body)
            assert isinstance(event, ValueSwapped)
            short.append((codec.encode(replace(event, body=b"")), seq))
        if not found:
            return False
        self._attempt(lambda: self._db.executemany("UPDATE events SET body = ? WHERE seq = ?", short))
        self._bodies_after = found[-1][0]
        dropped = sum(len(body) for _, body in found) - sum(len(body) for body, _ in short)
        self._journal._story_bytes -= dropped
        return True

    def _drop_oldest(self) -> bool:
        """The oldest events go: those beyond the number that is kept, and beyond the bytes."""
        excess_bytes = self._journal._story_bytes - STORY_BYTES_KEPT
        last, found_bytes, count, found = self._seq - STORY_EVENTS_KEPT, 0, 0, 0
        query = "SELECT seq, length(body) FROM events WHERE seq <= ? ORDER BY seq LIMIT ?"
        for seq, size_bytes in self._db.execute(query, (self._seq, CLEANED_AT_ONCE)):
            if seq > last and found_bytes >= excess_bytes:
                break
            found, count, found_bytes = seq, count + 1, found_bytes + size_bytes
        if not count:
            return False
        self._attempt(lambda: self._db.execute("DELETE FROM events WHERE seq <= ?", (found,)))
        self._journal._story_bytes -= found_bytes
        self._journal._story_records -= count
        return count == CLEANED_AT_ONCE

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            self._journal._attempt(work)  # The reserve is for what must be recorded.
        except sqlite3.DatabaseError as error:
            kind = JournalFull if _lacks_space(error) else JournalError
            raise kind(f"The journal {self._journal} cannot be compacted: {error}.") from error


def check_format(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a journal that a newer version has written; any earlier one is read."""
    known = dict(db.execute("SELECT key, value FROM meta WHERE key IN ('schema', 'written_by')").fetchall())
    if int(known.get("schema", codec.FORMAT)) > codec.FORMAT:
        writer = known.get("written_by", "a newer version")
        raise JournalError(
            f"The journal {path} has format {known['schema']}, written by Strata {writer}; this is Strata "
            f"{strata.__version__}, which reads formats up to {codec.FORMAT}.",
            hint=f"Use Strata {writer} or a newer one. To go back to this version, restore the backup made before the "
            "upgrade: strata restore FILE --data-dir DIR.",
        )


def read_story(data_dir: Path) -> Iterator[Entry]:
    """Every event still kept, oldest first, without disturbing a coordinator that is running."""
    path = data_dir / JOURNAL_NAME
    if not path.exists():
        raise JournalError(
            f"There is no journal in {data_dir}.", hint="Pass the --data-dir that `strata serve` was given."
        )
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as db:
            check_format(db, path)
            for seq, kind, body in db.execute("SELECT seq, kind, body FROM events ORDER BY seq"):
                yield Entry(seq=seq, event=_decode(path, kind, body))
    except (sqlite3.DatabaseError, ValueError) as error:
        raise _damaged(path, f"cannot be read: {error}") from error


def _lacks_space(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", None) in NO_SPACE


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        f"The journal {path} {what}.", hint="Restore it from a copy, or start with another --data-dir."
    )


def _decode(path: Path, kind: str, body: bytes) -> Event:
    try:
        return codec.decode(kind, body)
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise JournalError(
            f"The journal {path} holds a {kind} that this version cannot read: {error}.",
            hint="Use the version of Strata that wrote it.",
        ) from error


def open_privately(path: Path) -> None:
    """Before SQLite opens a database: no other user may read it, nor what SQLite puts beside it, which gets the same mode."""
    make_file_private(path)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            make_file_private(beside)


def open_or_put_aside(path: Path, schema: str, *, what: str) -> sqlite3.Connection:
    """A database that is worth having, and that nothing depends on: one that cannot be read is put aside, and a new one
    started."""
    try:
        return _open_with(path, schema)
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.unreadable-{time.time_ns() // 1_000_000_000}")
        log.warning(
            "%s %s cannot be read (%s); it is kept as %s, and a new one is created",
            what,
            path,
            error,
            aside.name,
        )
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
        return _open_with(path, schema)


def _open_with(path: Path, schema: str) -> sqlite3.Connection:
    """A power failure may take its last commits."""
    open_privately(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={BESIDE_WAL_LIMIT_BYTES}")
        db.execute(f"PRAGMA cache_size=-{BESIDE_CACHE_KIB}")
        db.executescript(schema)
        for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            db.execute(f'SELECT 1 FROM "{table}" ORDER BY rowid DESC LIMIT 1').fetchone()
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def used_bytes(db: sqlite3.Connection) -> int:
    """What its rows take; freed pages are used again before the file grows."""
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _make_private(data_dir: Path) -> None:
    """A folder that is made here is its user's alone, and so is one that a journal is in already. Any other is left as its
    user made it; what is put into it is private all the same."""
    with suppress(FileExistsError):
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        data_dir.mkdir(mode=0o700)
        return
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if not mode & 0o077:
        return
    if (data_dir / JOURNAL_NAME).exists():
        with suppress(PermissionError):
            data_dir.chmod(0o700)
            log.info(
                "the data directory %s was readable by other users (mode %o); its permissions are fixed now",
                data_dir,
                mode,
            )
            return
    log.warning(
        "the data directory %s is readable by other users (mode %o); fix it with: chmod 700 %s",
        *(data_dir, mode, data_dir),
    )


def lock_directory(data_dir: Path) -> int:
    try:
        _make_private(data_dir)
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(
            f"The data directory {data_dir} cannot be used: {error.strerror}.",
            hint="Choose another with --data-dir.",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise JournalError(
            f"Another coordinator is using {data_dir}.",
            hint="Stop it first, or pass another --data-dir.",
        ) from error
    return lock
