"""What a coordinator gathers beside the journal, kept in object storage too: log lines, output of tasks, metrics of runs.

Every coordinator of a cluster writes one stream of segments for each kind (`core.telemetry.segments`), under a name that belongs to its
data directory at this place, and takes in the streams of all others: the one that leads next has what was gathered before, and a
standby shows it meanwhile. No coordinator writes to the stream of another, so one that was deposed does no harm by uploading late.

What is to be uploaded waits in `archive.sqlite`, so a coordinator that was killed uploads the rest when it is back. A caller that
hands something over never waits for storage. While storage is away, the coordinator continues, says so once and catches up later; more
than `OUTBOX_BYTES` is not kept for it, and what is lost that way is counted and said. One thread uploads, takes in and removes what is too
old or too much: by the same limits as on disk.

    streams/STREAM              whose it is, and whether that coordinator leads; written again when that changes
    logs/STREAM/000000000001    segments, each a format, and compressed rows
    metrics/STREAM/000000000001
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import sqlite3
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np
import orjson

from strata.backoff import Backoff
from strata.coordinator.journal.sqlite import open_or_put_aside
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.run_history import Annotation, KeptBatch, RunHistory
from strata.core.messages import InvalidArgument
from strata.core.telemetry.branches import Start
from strata.core.telemetry.logtext import LEVELS
from strata.core.telemetry.run_details import RunDetails
from strata.core.telemetry.run_metrics import MetricBatch, MetricRows, checked
from strata.core.telemetry.segments import (
    SEGMENT_BYTES,
    Position,
    Segment,
    StoredSegment,
    cut,
    expired,
    fresh,
    next_of,
)
from strata.core.views import LogView
from strata.logs import OutageLog
from strata.stores.protocol import Blob, NotFound, Store, StoreError

log = logging.getLogger("strata.coordinator.archive")

FORMAT = 1
"""Of segments. One that is written in a later format is left alone."""
EVERY_S = 2.0
"""Between two uploads, and between two looks at what others have uploaded."""
IMPORT_S = 1.0
"""So long it takes in what others have uploaded before it looks again at what is to be uploaded here."""
TAIL_S = 5.0
"""While storage answers, no more than the last so many seconds of a coordinator that is lost are missing: `EVERY_S`, `IMPORT_S`, and
what an upload takes."""
LINES_PER_ROW = 500
LONGEST_PAUSE_S = 30.0
OUTBOX_BYTES = 256 << 20
TIDY_EVERY_S = 600.0
CLOSE_S = 5.0
FORGOTTEN_S = 86_400.0
"""A stream that has no segments any more is forgotten after so long."""
READ_ATTEMPTS = 3
SEGMENT_LIMIT_BYTES = 64 << 20
"""What a segment may be when it is unpacked; none that is written here comes near."""

Kind = Literal["logs", "metrics"]
KINDS: tuple[Kind, ...] = ("logs", "metrics")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_kind ON outbox (kind, id);
CREATE TABLE IF NOT EXISTS segments (kind TEXT PRIMARY KEY, number INTEGER NOT NULL, sealed_until INTEGER);
CREATE TABLE IF NOT EXISTS own (stream TEXT PRIMARY KEY, place TEXT NOT NULL);
"""
_KEY = re.compile(r"(logs|metrics)/([0-9a-f]{16})/([0-9]{12})")
_STREAM = re.compile(r"streams/([0-9a-f]{16})")
_one_writer: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
"""By stream."""


# --- what is in a segment -------------------------------------------------------------------------------------


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    number: int
    is_sealed: bool
    rows: list[bytes]


class _Lines(msgspec.Struct, frozen=True, tag="lines"):
    entries: list[tuple[str, float, str, str, str, str | None, str | None]]


class _Columns(msgspec.Struct, frozen=True, array_like=True):
    names: list[str]
    steps: bytes
    times: bytes
    values: bytes


class _Batch(msgspec.Struct, frozen=True, tag="batch"):
    run: str
    job: str
    at_s: float
    number: int
    generation: int
    started_ms: int
    resumed_step: int
    dropped: int
    details: bytes
    rows: list[_Columns]


class _Note(msgspec.Struct, frozen=True, tag="annotation"):
    run: str
    job: str | None
    tags: list[str]
    notes: str
    at_s: float


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose stream it is."""

    address: str
    term: int = 0
    """In which it leads, or led last."""
    leads: bool = False
    is_closed: bool = False
    """It was stopped, and has uploaded everything."""
    at_s: float = 0.0


_LINES = msgspec.msgpack.Decoder(_Lines)
_METRICS = msgspec.msgpack.Decoder(_Batch | _Note)
_PACKED = msgspec.msgpack.Decoder(_Packed)
_OWNER = msgspec.json.Decoder(Owner)
_encode = msgspec.msgpack.Encoder().encode


class _Unreadable(Exception):
    """A segment that is damaged."""


class _Newer(Exception):
    """A segment that a newer version has written."""


def pack_segment(segment: Segment) -> bytes:
    body = _encode(_Packed(segment.number, segment.is_sealed, list(segment.rows)))
    return b"%d\n" % FORMAT + zlib.compress(body, 1)


def unpack_segment(body: bytes) -> Segment:
    version, _, packed = body.partition(b"\n")
    if version.isdigit() and int(version[:9]) > FORMAT:
        raise _Newer(f"its format is {int(version[:9])}, and this version reads formats up to {FORMAT}")
    if version != b"%d" % FORMAT:
        raise _Unreadable("it has no known format")
    try:
        unpacking = zlib.decompressobj()
        plain = unpacking.decompress(packed, SEGMENT_LIMIT_BYTES)
        if not unpacking.eof:
            raise _Unreadable("it is cut off or too large")
        found = _PACKED.decode(plain)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise _Unreadable(str(error)) from error
    return Segment(number=found.number, is_sealed=found.is_sealed, rows=tuple(found.rows))


def pack_entries(entries: Sequence[LogView]) -> bytes:
    return _encode(
        _Lines([(e.id, e.timestamp, e.level, e.message, e.source, e.task_id, e.worker_id) for e in entries])
    )


def unpack_entries(row: bytes) -> list[LogView]:
    found = _LINES.decode(row).entries
    return [
        LogView(
            id=id, timestamp=at, level=level, message=message, source=source, task_id=task, worker_id=worker
        )
        for id, at, level, message, source, task, worker in found
        if level in LEVELS and re.fullmatch(r"log_[0-9a-f]{1,16}", id)
    ]


def pack_batch(kept: KeptBatch) -> bytes:
    batch = kept.batch
    return _encode(
        _Batch(
            run=kept.run,
            job=kept.job,
            at_s=kept.at_s,
            number=batch.number,
            generation=batch.start.generation,
            started_ms=batch.start.started_ms,
            resumed_step=batch.start.resumed_step,
            dropped=batch.dropped,
            details=orjson.dumps(batch.details) if batch.details is not None else b"",
            rows=[
                _Columns(
                    list(rows.names),
                    rows.steps.astype("<i8").tobytes(),
                    rows.times.astype("<f8").tobytes(),
                    np.ascontiguousarray(rows.values, "<f8").tobytes(),
                )
                for rows in batch.rows
            ],
        )
    )


def pack_annotation(note: Annotation) -> bytes:
    return _encode(_Note(run=note.run, job=note.job, tags=note.tags, notes=note.notes, at_s=note.at_s))


def unpack_metrics(row: bytes) -> KeptBatch | Annotation:
    """Raises `ValueError`, `InvalidArgument` and what msgspec raises."""
    found = _METRICS.decode(row)
    if isinstance(found, _Note):
        return Annotation(run=found.run, job=found.job, tags=found.tags, notes=found.notes, at_s=found.at_s)
    batch = MetricBatch(
        number=found.number,
        start=Start(
            generation=found.generation, started_ms=found.started_ms, resumed_step=found.resumed_step
        ),
        rows=tuple(
            MetricRows(
                names=tuple(each.names),
                steps=np.frombuffer(each.steps, "<i8"),
                times=np.frombuffer(each.times, "<f8"),
                values=np.frombuffer(each.values, "<f8").reshape(-1, len(each.names)),
            )
            for each in found.rows
        ),
        dropped=found.dropped,
        details=RunDetails(**orjson.loads(found.details)) if found.details else None,
    )
    return KeptBatch(run=found.run, job=found.job, batch=checked(batch), at_s=found.at_s)


# --- what waits to be uploaded --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """The present segment, as it is to be written now."""

    segment: Segment
    until: int
    """The last row of it."""


class Outbox:
    """Rows until they are in a sealed segment. Any thread may add to it; no thread waits for anything but its file."""

    def __init__(self, path: Path, *, limit_bytes: int = OUTBOX_BYTES) -> None:
        self.is_paused: Callable[[], bool] = lambda: False
        """While it says so nothing is written: what space there is belongs to others."""
        self.lost_total = 0
        """Rows that had no place."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._db = open_or_put_aside(path, _SCHEMA, what="the outbox of the archive")
        self.stream = self._own_stream(f"{socket.gethostname()}:{path.resolve()}")
        (self._bytes,) = self._db.execute("SELECT coalesce(sum(length(body)), 0) FROM outbox").fetchone()
        self._uploaded = dict.fromkeys(KINDS, 0)
        self._lost_since_s = 0.0
        self._lost = 0

    def _own_stream(self, place: str) -> str:
        """A folder that was copied to another place writes a stream of its own: the first one may still be written. What waits is
        uploaded there again as far as it was, and readers know it."""
        found = self._db.execute("SELECT stream FROM own WHERE place = ?", (place,)).fetchone()
        if found is not None:
            return str(found[0])
        stream = secrets.token_hex(8)
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM own")
            self._db.execute("INSERT INTO own VALUES (?, ?)", (stream, place))
            for kind in KINDS:
                self._db.execute("INSERT OR REPLACE INTO segments VALUES (?, 1, NULL)", (kind,))
        return stream

    @property
    def waiting_bytes(self) -> int:
        return int(self._bytes)

    def put(self, kind: Kind, rows: Sequence[bytes]) -> None:
        if not rows:
            return
        size, now_s = sum(map(len, rows)), time.time()
        try:
            with self._lock:
                if self._bytes + size > self._limit_bytes or self.is_paused():
                    self._lose(len(rows), now_s)
                    return
                with self._db:
                    self._db.execute("BEGIN")
                    self._db.executemany(
                        "INSERT INTO outbox (kind, at, body) VALUES (?, ?, ?)",
                        [(kind, now_s, row) for row in rows],
                    )
                self._bytes += size
                lost, self._lost = self._lost, 0
        except sqlite3.Error:
            with self._lock:
                self._lose(len(rows), now_s)
            return
        if lost:
            log.warning(
                "%d records of logs and metrics since %s are only on this coordinator's disk, not in the archive: "
                "the backlog was full while storage was unreachable",
                lost,
                _clock(self._lost_since_s),
            )

    def _lose(self, rows: int, now_s: float) -> None:
        if not self._lost:
            self._lost_since_s = now_s
        self._lost += rows
        self.lost_total += rows

    def due(self, kind: Kind) -> _Due | None:
        """What is to be written now; None where it has been. A segment that is to be sealed stays as it is until `written`."""
        with self._lock:
            number, sealed_until = self._db.execute(
                "SELECT number, sealed_until FROM segments WHERE kind = ?", (kind,)
            ).fetchone()
            rows: list[tuple[int, float, bytes]] = []
            size = 0
            last = sealed_until if sealed_until is not None else 2**62
            for row in self._db.execute(
                "SELECT id, at, body FROM outbox WHERE kind = ? AND id <= ? ORDER BY id", (kind, last)
            ):
                rows.append(row)
                size += len(row[2])
                if sealed_until is None and size >= SEGMENT_BYTES:
                    break
            if not rows:
                return None
            now = cut([len(body) for _, _, body in rows], age_s=time.time() - rows[0][1])
            is_sealed = sealed_until is not None or now.is_sealed
            until = rows[-1][0]
            if until <= self._uploaded[kind] and not is_sealed:
                return None
            if is_sealed and sealed_until is None:
                self._db.execute("UPDATE segments SET sealed_until = ? WHERE kind = ?", (until, kind))
            segment = Segment(number=number, is_sealed=is_sealed, rows=tuple(body for _, _, body in rows))
            return _Due(segment=segment, until=until)

    def written(self, kind: Kind, due: _Due) -> None:
        with self._lock:
            self._uploaded[kind] = due.until
            if due.segment.is_sealed:
                with self._db:
                    self._db.execute("BEGIN")
                    self._db.execute("DELETE FROM outbox WHERE kind = ? AND id <= ?", (kind, due.until))
                    self._db.execute(
                        "UPDATE segments SET number = number + 1, sealed_until = NULL WHERE kind = ?", (kind,)
                    )
                self._bytes -= sum(map(len, due.segment.rows))

    def lag_s(self, now_s: float) -> float:
        """How old the oldest row is that has not been uploaded."""
        with self._lock:
            oldest = [
                at
                for kind in KINDS
                for (at,) in self._db.execute(
                    "SELECT at FROM outbox WHERE kind = ? AND id > ? ORDER BY id LIMIT 1",
                    (kind, self._uploaded[kind]),
                )
            ]
        return max(0.0, now_s - min(oldest)) if oldest else 0.0

    def close(self) -> None:
        with self._lock:
            self._db.close()


# --- where the rows of others go ------------------------------------------------------------------------------


class Sink(Protocol):
    def imported(self, stream: str) -> Position | None: ...

    def take_in(self, stream: str, position: Position, rows: Sequence[bytes]) -> bool:
        """Whether they are on disk; raises what decoding raises."""
        ...


class LogSink:
    def __init__(self, logs: LogStore, in_loop: Callable[[Callable[[], None]], None]) -> None:
        assert logs.archive is not None
        self._logs, self._archive, self._in_loop = logs, logs.archive, in_loop

    def imported(self, stream: str) -> Position | None:
        return self._archive.imported(stream)

    def take_in(self, stream: str, position: Position, rows: Sequence[bytes]) -> bool:
        stored = self._archive.take_in(stream, position, [e for row in rows for e in unpack_entries(row)])
        for at in range(0, len(stored or ()), LINES_PER_ROW):  # Heartbeats come between.
            self._in_loop(partial(self._logs.merge, (stored or [])[at : at + LINES_PER_ROW]))
        return stored is not None


class MetricSink:
    def __init__(self, history: RunHistory) -> None:
        self._history = history

    def imported(self, stream: str) -> Position | None:
        return self._history.imported(stream)

    def take_in(self, stream: str, position: Position, rows: Sequence[bytes]) -> bool:
        return self._history.take_in(stream, position, [unpack_metrics(row) for row in rows])


# --- the thread -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    limit_bytes: int
    keep_s: float | None


class Archive:
    """Made with the server and started once its address is known."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        url: str,
        outbox: Outbox,
        *,
        retention: dict[Kind, Retention],
        every_s: float = EVERY_S,
        import_s: float = IMPORT_S,
    ) -> None:
        self.outbox = outbox
        self.uploads_total = 0
        self.failures_total = 0
        self._open_store = open_store
        self._store: Store | None = None
        self._url = url
        self._retention = retention
        self._every_s = every_s
        self._import_s = import_s
        self._import_until_mono_s = 0.0
        self._sinks: dict[Kind, Sink] = {}
        self._owner = Owner(address="")
        self._announced: Owner | None = None
        self._owners: dict[str, tuple[tuple[object, ...], Owner]] = {}
        self._looked_at: dict[str, tuple[object, ...]] = {}
        self._unreadable: set[str] = set()
        self._attempts: dict[str, int] = {}
        self._missing: dict[str, str] = {}
        """Streams of which the end is missing, and the address of their coordinator."""
        self._said_for_term = -1
        self._next_tidy_mono_s = 0.0
        self._wake = threading.Event()
        self._closing = False
        self._outage = OutageLog(log, over=f"the archive {url} answers again: uploading the backlog")
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)

    @property
    def stream(self) -> str:
        return self.outbox.stream

    def lag_s(self) -> float:
        """How old the oldest record is that is here alone."""
        return self.outbox.lag_s(time.time())

    def gather(
        self, logs: LogStore, history: RunHistory | None, in_loop: Callable[[Callable[[], None]], None]
    ) -> None:
        """What they store from now on is uploaded, and what others have uploaded goes to them."""
        if logs.archive is not None:
            logs.archive.on_stored = lambda entries: self.outbox.put("logs", _rows_of(entries))
            self._sinks["logs"] = LogSink(logs, in_loop)
        if history is not None:
            history.on_batches = lambda batches: self.outbox.put("metrics", list(map(pack_batch, batches)))
            history.on_annotation = lambda note: self.outbox.put("metrics", [pack_annotation(note)])
            self._sinks["metrics"] = MetricSink(history)

    def start(self, address: str) -> None:
        self._owner = Owner(address=address)
        self._thread.start()

    def leads(self, term: int) -> None:
        self._owner = msgspec.structs.replace(self._owner, term=term, leads=True)
        self._wake.set()

    def close(self) -> None:
        """Uploads what there is, in the time that there is for it; the rest waits on disk."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        else:
            self.outbox.close()

    def _run(self) -> None:
        # One that was deposed starts again in its process, and storage may still answer the one before.
        with _one_writer[self.stream]:
            self._keep_working()

    def _keep_working(self) -> None:
        pauses = Backoff(first_s=self._every_s, longest_s=LONGEST_PAUSE_S)
        pause_s = self._every_s
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            is_last = self._closing
            try:
                self.work_once(is_last=is_last)
                self._outage.ended()
                pauses = Backoff(first_s=self._every_s, longest_s=LONGEST_PAUSE_S)
                pause_s = self._every_s
            except (StoreError, sqlite3.Error, OSError) as error:
                self.failures_total += 1
                # Once for each outage, whatever the attempts say.
                self._outage.start(
                    f"the archive {self._url} is unavailable; logs and metrics are kept on this coordinator's disk until "
                    f"it answers: {error}"
                )
                pause_s = pauses.pause_s() or LONGEST_PAUSE_S
            except Exception:  # Nothing depends on the archive; what depends on the thread is notified.
                self.failures_total += 1
                log.exception("the archive %s failed", self._url)
                pause_s = LONGEST_PAUSE_S
            if is_last:
                self.outbox.close()
                return

    def work_once(self, *, is_last: bool = False) -> None:
        """Upload what waits, take in what others have uploaded. Raises `StoreError`."""
        store = self._store = self._store or self._open_store()
        self._announce(store, self._owner)
        for kind in KINDS:
            self._upload(store, kind)
        if is_last:
            self._announce(store, msgspec.structs.replace(self._owner, is_closed=True))
            return
        self._import_until_mono_s = time.monotonic() + self._import_s
        self._read_owners(store)
        for stream in list(self._owners):
            for kind, sink in self._sinks.items():
                self._take_in(store, kind, stream, sink)
        if time.monotonic() <= self._import_until_mono_s:
            self._say_what_is_missing()
        if self._owner.leads and time.monotonic() >= self._next_tidy_mono_s:
            self._next_tidy_mono_s = time.monotonic() + TIDY_EVERY_S
            self.tidy(store)

    # --- uploading ------------------------------------------------------------------------------------------

    def _announce(self, store: Store, owner: Owner) -> None:
        if owner != self._announced:
            body = msgspec.json.encode(msgspec.structs.replace(owner, at_s=time.time()))
            store.put(f"streams/{self.stream}", body)
            self._announced = owner

    def _upload(self, store: Store, kind: Kind) -> None:
        while (due := self.outbox.due(kind)) is not None:
            store.put(_key(kind, self.stream, due.segment.number), pack_segment(due.segment))
            self.uploads_total += 1
            self.outbox.written(kind, due)
            if not due.segment.is_sealed:
                return

    # --- taking in ------------------------------------------------------------------------------------------

    def _read_owners(self, store: Store) -> None:
        for blob in store.list("streams/"):
            found = _STREAM.fullmatch(blob.key)
            if found is None or found[1] == self.stream:
                continue
            if found[1] in self._owners and self._owners[found[1]][0] == _mark(blob):
                continue
            try:
                self._owners[found[1]] = (_mark(blob), _OWNER.decode(store.read(blob.key)))
            except (msgspec.MsgspecError, NotFound) as error:
                self._refuse(blob.key, str(error))

    def _take_in(self, store: Store, kind: Kind, stream: str, sink: Sink) -> None:
        position = sink.imported(stream)
        while not self._closing:
            if time.monotonic() > self._import_until_mono_s:
                self._wake.set()  # Further at once, after what this coordinator has to upload.
                return
            key = _key(kind, stream, position.number) if position is not None else ""
            blob = store.stat(key) if key else None
            if blob is None:
                position = self._continue_at(store, kind, stream, position)
                if position is None:
                    return
                continue
            if self._looked_at.get(key) == _mark(blob):
                return
            assert position is not None
            try:
                rows, then = fresh(position, unpack_segment(store.read(key)))
                if then != position and not sink.take_in(stream, then, rows):
                    return  # The disk is full, or this coordinator stops: later.
            except NotFound:
                continue  # It was too old in between.
            except _Newer as error:
                self._refuse(key, str(error))
                return  # A coordinator that is upgraded reads on.
            except (_Unreadable, ValueError, InvalidArgument, msgspec.MsgspecError) as error:
                is_last = max(_numbers(store, kind, stream), default=0) <= position.number
                if is_last or self._is_to_be_read_again(key):
                    return  # The newest may yet be written again.
                self._refuse(key, str(error))
                rows, then = (), Position(position.number + 1)
                if not sink.take_in(stream, then, rows):
                    return
            if rows:
                self._arrived(stream)
            if then.number == position.number:
                self._looked_at[key] = _mark(blob)
                return
            self._looked_at.pop(key, None)
            position = then

    def _continue_at(
        self, store: Store, kind: Kind, stream: str, position: Position | None
    ) -> Position | None:
        found = next_of(position, _numbers(store, kind, stream))
        if found is None or found == position:
            return None
        if position is not None:
            log.info(
                "segments %d to %d of %s of the coordinator at %s are no longer in the archive",
                position.number,
                found.number - 1,
                kind,
                self._owners[stream][1].address,
            )
        return found

    def _is_to_be_read_again(self, key: str) -> bool:
        """What is damaged may have been so on its way."""
        self._attempts[key] = self._attempts.get(key, 0) + 1
        return self._attempts[key] < READ_ATTEMPTS

    def _refuse(self, key: str, why: str) -> None:
        if key not in self._unreadable:
            self._unreadable.add(key)
            log.warning("%s in the archive %s cannot be read and is skipped: %s", key, self._url, why)

    def _arrived(self, stream: str) -> None:
        address = self._missing.pop(stream, None)
        if address is not None:
            log.warning("the missing logs and metrics of the coordinator at %s have arrived", address)

    def _say_what_is_missing(self) -> None:
        """One that leads says what it cannot know of the one that led before, once."""
        mine = self._owner
        if not mine.leads or self._said_for_term == mine.term:
            return
        self._said_for_term = mine.term
        before = [
            (owner.term, owner.at_s, stream)
            for stream, (_, owner) in self._owners.items()
            if owner.leads and owner.term <= mine.term
        ]
        if not before:
            return
        _, _, stream = max(before)
        owner = self._owners[stream][1]
        if owner.is_closed:
            return
        self._missing[stream] = owner.address
        log.warning(
            "the previous leader at %s was lost: logs and metrics of its last seconds (at most %.0f, if it could "
            "reach the archive) are missing here until that coordinator is back",
            owner.address,
            TAIL_S,
        )

    # --- removing -------------------------------------------------------------------------------------------

    def tidy(self, store: Store) -> None:
        """Remove what is too old or too much."""
        now_s = time.time()
        in_use: set[str] = set()
        for kind, limits in self._retention.items():
            stored = [
                StoredSegment(key=blob.key, size_bytes=blob.size_bytes, modified_s=blob.modified_s)
                for blob in store.list(f"{kind}/")
                if _KEY.fullmatch(blob.key)
            ]
            expired_keys = expired(stored, limit_bytes=limits.limit_bytes, keep_s=limits.keep_s, now_s=now_s)
            for key in expired_keys:
                store.delete(key)
                self._unreadable.discard(key)
                self._looked_at.pop(key, None)
            in_use |= {each.key.split("/")[1] for each in stored if each.key not in set(expired_keys)}
        for blob in store.list("streams/"):
            found = _STREAM.fullmatch(blob.key)
            if found and found[1] not in in_use | {self.stream} and blob.modified_s < now_s - FORGOTTEN_S:
                store.delete(blob.key)
                self._owners.pop(found[1], None)


def _rows_of(entries: Sequence[LogView]) -> list[bytes]:
    return [pack_entries(entries[at : at + LINES_PER_ROW]) for at in range(0, len(entries), LINES_PER_ROW)]


def _key(kind: Kind, stream: str, number: int) -> str:
    return f"{kind}/{stream}/{number:012d}"


def _numbers(store: Store, kind: Kind, stream: str) -> list[int]:
    keys = (_KEY.fullmatch(blob.key) for blob in store.list(f"{kind}/{stream}/"))
    return [int(key[3]) for key in keys if key is not None]


def _mark(blob: Blob) -> tuple[object, ...]:
    """Differs where the object was written again."""
    return (blob.size_bytes, blob.modified_s, blob.version)


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
