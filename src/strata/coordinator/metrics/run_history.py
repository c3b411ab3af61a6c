"""What training loops have logged, by run and step: one SQLite file, columnar, bounded by downsampling.

A batch is answered for once it is on disk, and outlives a `kill -9` from then on; one that comes again counts once. Rows
are written as they come (`tail`), and every so often those of a run become columns: for each metric the values in chunks,
and above them a pyramid of buckets (`core.telemetry.downsampling`), in which reading any range at any resolution is a few chunks.
When the file is full, the finest level of the oldest values is removed, then the next, so that the shape of every curve
stays; last of all, whole runs, that which was longest silent first.

Batches of a start are numbered from 1 on: those that never came here are known (`gaps`), and said. What other coordinators have
kept is taken in beside (`take_in`), with how far their streams have been read: each batch once, wherever it comes from, and at its
place among the steps, however late.

Values belong to one start of a run. Which of them are committed is decided by `core.telemetry.branches` when they are read.

A caller hands a batch over and continues. One thread writes (`database_writer`); reading happens on other threads, each
with a connection of its own and one consistent view of the file. Nothing is kept in memory beside batches that wait for the
disk, of which there are a bounded number of bytes. Who reports what is for callers to say: a run is kept for each job that
reports it, and those that are asked for are put together.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import orjson

from strata.coordinator.database_writer import DatabaseWriter
from strata.coordinator.journal.sqlite import used_bytes
from strata.coordinator.metrics.columns import pack, unpack
from strata.core.messages import Overloaded, Unknown
from strata.core.telemetry.branches import Start, committed_until
from strata.core.telemetry.downsampling import FACTOR, TOP, Buckets, cover, joined, level_for
from strata.core.telemetry.run_details import RunDetails
from strata.core.telemetry.run_metrics import (
    TIME,
    MetricBatch,
    MetricRows,
    MetricView,
    RunInfoView,
    RunMetricsView,
    RunView,
    StartView,
)
from strata.core.telemetry.segments import Position
from strata.logs import OutageLog

log = logging.getLogger("strata.coordinator.metrics")

GATHER_S = 0.05
"""How long a batch waits for others, to be written together."""
IDLE_S = 1.0
PENDING_BYTES = 64 << 20
"""What may wait for the disk; a batch beyond it is not taken, and comes again."""
TAIL_VALUES, TAIL_ROWS = 1 << 18, 256
"""So many values, or so many batches, of a run become columns."""
VALUES_PER_CHUNK, BUCKETS_PER_CHUNK = 8_192, 1_024
"""Both multiples of a bucket, so that none is in two chunks."""
NAMES_LIMIT = 2_000
"""Metrics of one start of a run; values of further ones are dropped and counted."""
RUNS_OF_A_JOB = 500
BRANCHES_SHOWN = 100
DROP_AT_A_TIME = 200
SPARE = 0.05
"""Share of the limit that is freed when it is reached."""
READ_LIMIT_S = 10.0
READERS = 2
LAST_STEP = 2**62

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL, job TEXT NOT NULL, created REAL NOT NULL, touched REAL NOT NULL,
    dropped INTEGER NOT NULL DEFAULT 0, UNIQUE (run, job)
);
CREATE INDEX IF NOT EXISTS runs_of_a_job ON runs (job, touched);
CREATE TABLE IF NOT EXISTS starts (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, generation INTEGER NOT NULL, started INTEGER NOT NULL,
    resumed INTEGER NOT NULL, last_batch INTEGER NOT NULL DEFAULT 0, UNIQUE (run, generation, started)
);
CREATE TABLE IF NOT EXISTS series (
    id INTEGER PRIMARY KEY, start INTEGER NOT NULL, name TEXT NOT NULL, count INTEGER NOT NULL DEFAULT 0,
    first_step INTEGER, last_step INTEGER, total BLOB, cut INTEGER, of_cut BLOB, UNIQUE (start, name)
);
CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY, series INTEGER NOT NULL, level INTEGER NOT NULL, number INTEGER NOT NULL,
    count INTEGER NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, is_full INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS by_series ON chunks (series, level, number, first_step, last_step);
CREATE INDEX IF NOT EXISTS by_age ON chunks (level, id) WHERE is_full;
CREATE TABLE IF NOT EXISTS tail (
    id INTEGER PRIMARY KEY, run INTEGER NOT NULL, start INTEGER NOT NULL, names BLOB NOT NULL,
    steps BLOB NOT NULL, times BLOB NOT NULL, vals BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS tail_of_a_run ON tail (run, id);
CREATE TABLE IF NOT EXISTS details (start INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS annotations (
    run INTEGER PRIMARY KEY, tags TEXT NOT NULL, notes TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS gaps (
    start INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, PRIMARY KEY (start, first)
);
CREATE TABLE IF NOT EXISTS imported (stream TEXT PRIMARY KEY, number INTEGER NOT NULL, taken INTEGER NOT NULL);
"""

Kept = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one metric, with when they were logged."""

    points: Buckets
    times: npt.NDArray[np.float64]
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    name: str
    committed: Curve
    abandoned: list[Curve]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    run: str
    job: str
    batch: MetricBatch
    kept: Kept
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBatch:
    """A batch as another coordinator has kept it."""

    run: str
    job: str
    batch: MetricBatch
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """What people have written about a run."""

    run: str
    job: str | None
    tags: list[str]
    notes: str
    at_s: float


@dataclass(slots=True, kw_only=True)
class _Import:
    stream: str
    position: Position
    records: Sequence[KeptBatch | Annotation]
    is_stored: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """A start as it is kept."""

    id: int
    run: int
    job: str
    start: Start
    limit: int | None
    """The last step whose values are committed."""


@dataclass(frozen=True, slots=True)
class _Series:
    id: int
    count: int
    first_step: int
    last_step: int


class RunHistory(DatabaseWriter):
    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        super().__init__(
            path,
            _SCHEMA,
            what="the history of metrics",
            gather_s=GATHER_S,
            patience_s=30.0,
            outage=OutageLog(log, over="metrics of runs are written to disk again"),
        )
        self.on_batches: Callable[[Sequence[KeptBatch]], None] = lambda batches: None
        """Called on the writer's thread with batches that are about to be kept, and are answered for after that. One may come again."""
        self.on_annotation: Callable[[Annotation], None] = lambda annotation: None
        self._limit_bytes = limit_bytes
        self._waiting: list[_Waiting] = []
        self._waiting_bytes = 0
        self._imports: list[_Import] = []
        self._tails: dict[int, tuple[int, int]] = {}
        """How many values and batches of each run are no columns yet; of runs that were written to of late."""
        self._read_tails()
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="run-history-reader")
        """Who reads for others does it here: so many at a time."""
        self._thread.start()

    # --- for the event loop, never waiting ------------------------------------------------------------------

    def put(self, run: str, job: str, batch: MetricBatch, kept: Kept) -> None:
        """`kept` is called, on another thread, once the batch is on disk. Without it, the batch is to come again."""
        size = sum(rows.values.nbytes + rows.steps.nbytes + rows.times.nbytes for rows in batch.rows)
        with self._changed:
            if self._waiting_bytes + size <= PENDING_BYTES:
                self._waiting.append(_Waiting(run=run, job=job, batch=batch, kept=kept, bytes=size))
                self._waiting_bytes += size
                self._changed.notify_all()

    # --- waiting, for other threads -------------------------------------------------------------------------

    def runs(self, *, limit: int) -> list[RunView]:
        """The latest first."""
        with self._reader() as db:
            rows = db.execute(
                "SELECT run, min(created), max(touched) FROM runs GROUP BY run ORDER BY max(touched) DESC LIMIT ?",
                (limit,),
            ).fetchall()
            return [
                RunView(
                    run=run,
                    jobs=self._jobs(db, run),
                    created_at=created,
                    updated_at=touched,
                    tags=_annotations(db, run, None)[0],
                )
                for run, created, touched in rows
            ]

    def info(self, run: str, *, job: str | None = None) -> RunInfoView:
        """What is known of a run beside its values; `run` is one that `resolve` has answered."""
        with self._reader() as db:
            created, touched = db.execute(
                "SELECT min(created), max(touched) FROM runs WHERE run = ?1 AND (?2 IS NULL OR job = ?2)",
                (run, job),
            ).fetchone()
            if created is None:
                raise _unknown(run)
            found = db.execute(
                "SELECT body FROM details JOIN starts ON starts.id = details.start JOIN runs ON runs.id = starts.run "
                "WHERE runs.run = ?1 AND (?2 IS NULL OR job = ?2) ORDER BY started DESC, starts.id DESC LIMIT 1",
                (run, job),
            ).fetchone()
            tags, notes = _annotations(db, run, job)
            return RunInfoView(
                run=run,
                jobs=[job] if job is not None else self._jobs(db, run),
                created_at=created,
                updated_at=touched,
                tags=tags,
                notes=notes,
                details=None if found is None else RunDetails(**orjson.loads(found[0])),
            )

    def annotate(self, run: str, *, job: str | None, tags: Sequence[str] | None, notes: str | None) -> None:
        """Replace what people have written about a run; None leaves it as it is. On disk when this returns."""
        if self.is_paused():
            raise Overloaded(
                "The disk of the coordinator is full; nothing was changed.",
                hint="Free space there, then retry.",
            )
        with closing(sqlite3.connect(self.path, timeout=READ_LIMIT_S, isolation_level=None)) as db:
            with _transaction(db):
                before = _annotations(db, run, job)
                annotation = Annotation(
                    run=run,
                    job=job,
                    tags=before[0] if tags is None else list(tags),
                    notes=before[1] if notes is None else notes,
                    at_s=time.time(),
                )
                _annotate(db, annotation)
        self.on_annotation(annotation)

    def imported(self, stream: str) -> Position | None:
        """How far a stream of another coordinator has been taken in."""
        with self._reader() as db:
            row = db.execute("SELECT number, taken FROM imported WHERE stream = ?", (stream,)).fetchone()
        return Position(*row) if row is not None else None

    def take_in(self, stream: str, position: Position, records: Sequence[KeptBatch | Annotation]) -> bool:
        """What another coordinator has kept, with how far its stream is read then. Whether it is on disk here."""
        each = _Import(stream=stream, position=position, records=records)
        with self._changed:
            if self._closing:
                return False
            self._imports.append(each)
            self._changed.notify_all()
        each.done.wait()
        return each.is_stored

    def resolve(self, name: str, *, job: str | None = None) -> str:
        """The run of this id, or the latest of this job; raises `Unknown`."""
        with self._reader() as db:
            row = db.execute(
                "SELECT run FROM runs WHERE (run = ?1 OR job = ?1) AND (?2 IS NULL OR job = ?2) "
                "ORDER BY run = ?1 DESC, touched DESC LIMIT 1",
                (name, job),
            ).fetchone()
        if row is None:
            raise _unknown(name)
        return str(row[0])

    def jobs_of(self, name: str) -> list[str]:
        """The jobs that have reported this run, or the latest run of this job; none where it is not known."""
        with suppress(Unknown):
            run = self.resolve(name)
            with self._reader() as db:
                return self._jobs(db, run)
        return []

    def summary(self, run: str, *, job: str | None = None) -> RunMetricsView:
        with self._reader() as db:
            starts = _starts(db, run, job)
            metrics: dict[str, MetricView] = {}
            tails: dict[int, list[MetricRows]] = {}
            for start, rows in _tail_rows(db, starts):
                tails.setdefault(start, []).append(rows)
            for each in starts:
                for name, view in _totals(db, each, tails.get(each.id, [])):
                    metrics[name] = _together(metrics.get(name), view)
            (missing,) = db.execute(
                "SELECT coalesce(sum(gaps.last - gaps.first + 1), 0) FROM gaps JOIN starts ON starts.id = gaps.start "
                "JOIN runs ON runs.id = starts.run WHERE runs.run = ?1 AND (?2 IS NULL OR job = ?2)",
                (run, job),
            ).fetchone()
            (dropped,) = db.execute(
                "SELECT coalesce(sum(dropped), 0) FROM runs WHERE run = ?1 AND (?2 IS NULL OR job = ?2)",
                (run, job),
            ).fetchone()
            return RunMetricsView(
                run=run,
                jobs=[job] if job is not None else self._jobs(db, run),
                starts=[
                    StartView(
                        generation=each.start.generation,
                        job_id=each.job,
                        started_at=each.start.started_ms / 1000,
                        resumed_step=each.start.resumed_step,
                        committed_until=each.limit,
                    )
                    for each in starts
                ],
                metrics=[metrics[name] for name in sorted(metrics)],
                dropped=dropped,
                missing_batches=missing,
            )

    def curves(
        self,
        run: str,
        names: Sequence[str],
        *,
        job: str | None = None,
        first: int = 0,
        last: int = LAST_STEP,
        points: int,
    ) -> list[Curves]:
        """Each metric from step `first` to step `last`, both included, at most `points` of the committed history and as many
        of abandoned branches. A name that is not known has no points."""
        with self._reader() as db:
            starts = _starts(db, run, job)
            tails = _tails(db, starts, [*names, TIME])
            reading = _Reading(db, starts, tails, first=first, last=last, points=points)
            return [reading.curves(name) for name in names]

    @staticmethod
    def _jobs(db: sqlite3.Connection, run: str) -> list[str]:
        rows = db.execute("SELECT job FROM runs WHERE run = ? ORDER BY touched", (run,))
        return [job for (job,) in rows]

    def close(self) -> None:
        super().close()
        self.readers.shutdown(cancel_futures=True)

    def used_bytes(self) -> int:
        """What the history takes; freed pages are used again before the file grows."""
        with self._reader() as db:
            return used_bytes(db)

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        """One consistent view, whatever is written meanwhile."""
        uri = f"file:{quote(str(self.path))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=READ_LIMIT_S, isolation_level=None)) as db:
            db.execute("BEGIN")
            yield db

    # --- the writer -----------------------------------------------------------------------------------------

    def _gather(self) -> None:
        if self._changed.wait_for(
            lambda: self._closing or self._hurry or bool(self._waiting or self._imports), IDLE_S
        ):
            super()._gather()

    def _collect(self) -> Callable[[], None]:
        waiting, self._waiting = self._waiting, []
        self._waiting_bytes = 0
        imports, self._imports = self._imports, []
        return partial(self._write, waiting, imports)

    def _write(self, waiting: list[_Waiting], imports: list[_Import]) -> None:
        try:
            self._store(waiting, imports)
        finally:
            for each in imports:
                each.done.set()

    def _store(self, waiting: list[_Waiting], imports: list[_Import]) -> None:
        try:
            self._check_space()
            if waiting:
                now_s = time.time()
                self.on_batches(
                    [KeptBatch(run=each.run, job=each.job, batch=each.batch, at_s=now_s) for each in waiting]
                )
                with _transaction(self._db):
                    for each in waiting:
                        self._take(each.run, each.job, each.batch)
                for each in waiting:
                    each.kept()
            for imported in imports:
                with _transaction(self._db):
                    self._take_in(imported)
                imported.is_stored = True
            for run, (values, rows) in list(self._tails.items()):
                if values >= TAIL_VALUES or rows >= TAIL_ROWS:
                    with _transaction(self._db):
                        self._settle(run)
            self._tidy()
            self._outage.ended()
        except sqlite3.Error as error:
            self._read_tails()
            self._outage.start(
                f"metrics of runs cannot be written to {self.path}; workers keep them until they can: {error}"
            )

    def _take_in(self, imported: _Import) -> None:
        late: set[int] = set()
        for each in imported.records:
            match each:
                case KeptBatch():
                    run = self._take(each.run, each.job, each.batch, at_s=each.at_s)
                    late |= {run} if run is not None else set()
                case Annotation():
                    _annotate(self._db, each)
        for run in late:
            self._settle(run, is_late=True)
            self._note_cuts(run)
        self._db.execute(
            "INSERT OR REPLACE INTO imported (stream, number, taken) VALUES (?, ?, ?)",
            (imported.stream, imported.position.number, imported.position.rows),
        )

    def _take(self, run_name: str, job: str, batch: MetricBatch, *, at_s: float | None = None) -> int | None:
        """The run, if the batch is new and others that come after it are here already."""
        now_s = time.time() if at_s is None else at_s
        (run,) = self._db.execute(
            "INSERT INTO runs (run, job, created, touched) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (run, job) DO UPDATE SET touched = max(touched, excluded.touched), "
            "created = min(created, excluded.created) RETURNING id",
            (run_name, job, now_s, now_s),
        ).fetchone()
        start = self._start(run, batch.start)
        (last,) = self._db.execute("SELECT last_batch FROM starts WHERE id = ?", (start,)).fetchone()
        is_late = batch.number <= last
        if is_late and not self._fill_gap(start, batch.number):
            return None  # It has come before.
        if not is_late:
            self._db.execute("UPDATE starts SET last_batch = ? WHERE id = ?", (batch.number, start))
            self._note_gap(start, last + 1, batch.number - 1)
        if batch.dropped:
            self._drop(run, batch.dropped)
        if batch.details is not None:
            self._db.execute(
                "INSERT OR REPLACE INTO details (start, body) VALUES (?, ?)",
                (start, orjson.dumps(batch.details)),
            )
        for rows in batch.rows:
            if len(rows.steps):
                self._append(run, start, rows)
        return int(run) if is_late else None

    def _note_gap(self, start: int, first: int, last: int) -> None:
        if first <= last:
            self._db.execute("INSERT INTO gaps (start, first, last) VALUES (?, ?, ?)", (start, first, last))

    def _fill_gap(self, start: int, number: int) -> bool:
        """Whether it was missing."""
        found = self._db.execute(
            "DELETE FROM gaps WHERE start = ?1 AND first <= ?2 AND last >= ?2 RETURNING first, last",
            (start, number),
        ).fetchone()
        if found is None:
            return False
        self._note_gap(start, found[0], number - 1)
        self._note_gap(start, number + 1, found[1])
        return True

    def _start(self, run: int, start: Start) -> int:
        found = self._db.execute(
            "SELECT id FROM starts WHERE run = ? AND generation = ? AND started = ?",
            (run, start.generation, start.started_ms),
        ).fetchone()
        if found is not None:
            return int(found[0])
        self._settle(run)
        new = self._db.execute(
            "INSERT INTO starts (run, generation, started, resumed) VALUES (?, ?, ?, ?) RETURNING id",
            (run, start.generation, start.started_ms, start.resumed_step),
        ).fetchone()
        self._note_cuts(run)
        (job,) = self._db.execute("SELECT job FROM runs WHERE id = ?", (run,)).fetchone()
        for (oldest,) in self._db.execute(
            "SELECT id FROM runs WHERE job = ? ORDER BY touched DESC LIMIT -1 OFFSET ?", (job, RUNS_OF_A_JOB)
        ).fetchall():
            self._remove(oldest)
        return int(new[0])

    def _append(self, run: int, start: int, rows: MetricRows) -> None:
        values, batches = self._tails.get(run, (0, 0))
        self._tails[run] = (values + rows.values.size, batches + 1)
        self._db.execute(
            "INSERT INTO tail (run, start, names, steps, times, vals) VALUES (?, ?, ?, ?, ?, ?)",
            (
                run,
                start,
                orjson.dumps(rows.names),
                rows.steps.astype("<i8").tobytes(),
                rows.times.astype("<f8").tobytes(),
                np.ascontiguousarray(rows.values, "<f8").tobytes(),
            ),
        )

    def _drop(self, run: int, values: int) -> None:
        self._db.execute("UPDATE runs SET dropped = dropped + ? WHERE id = ?", (values, run))

    def _read_tails(self) -> None:
        with suppress(sqlite3.Error):
            rows = self._db.execute("SELECT run, sum(length(vals)) / 8, count(*) FROM tail GROUP BY run")
            self._tails = {run: (values, batches) for run, values, batches in rows}

    # --- columns --------------------------------------------------------------------------------------------

    def _settle(self, run: int, *, is_late: bool = False) -> None:
        try:
            self._make_columns(run, is_late=is_late)
        except ValueError as error:
            log.warning("the history of a run is damaged (%s) and starts over", error)
            self._forget(run)

    def _make_columns(self, run: int, *, is_late: bool) -> None:
        """Of all rows of the run that are none yet. `is_late`: some belong before what is in columns."""
        self._tails.pop(run, None)
        order = "SELECT start, names, steps, times, vals FROM tail WHERE run = ? ORDER BY start, id"
        by_kind: dict[tuple[int, bytes], list[MetricRows]] = {}
        for start, names, *columns in self._db.execute(order, (run,)):
            by_kind.setdefault((start, names), []).append(_rows(names, *columns))
        columns_of: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        for (start, _), parts in by_kind.items():
            steps = np.concatenate([part.steps for part in parts])
            values = np.concatenate([part.values for part in parts]).T
            times = np.concatenate([part.times for part in parts])
            for name, column in zip(parts[0].names, values, strict=True):
                columns_of.setdefault((start, name), []).append((steps, column))
            columns_of.setdefault((start, TIME), []).append((steps, times))
        for (start, name), found in columns_of.items():
            steps = np.concatenate([steps for steps, _ in found])
            values = np.concatenate([values for _, values in found])
            if name == TIME:  # Once for each step, however many calls have logged something.
                steps, which = np.unique(steps, return_index=True)
                values = values[which]
            elif (steps[1:] < steps[:-1]).any():
                order_of = np.argsort(steps, kind="stable")
                steps, values = steps[order_of], values[order_of]
            self._extend(run, start, name, Buckets.of(steps, values), is_late=is_late)
        self._db.execute("DELETE FROM tail WHERE run = ?", (run,))

    def _extend(self, run: int, start: int, name: str, fresh: Buckets, *, is_late: bool = False) -> None:
        row = self._db.execute(
            "SELECT id, count, total, last_step FROM series WHERE start = ? AND name = ?", (start, name)
        ).fetchone()
        if is_late and row is not None and row[1] and int(fresh.first.min()) <= row[3]:
            together = self._sorted_together(row[0], row[1], fresh, is_time=name == TIME)
            if together is None:
                self._drop(run, len(fresh))
                return
            fresh, row = together, (row[0], 0, None, None)
        if row is None:
            (names,) = self._db.execute("SELECT count(*) FROM series WHERE start = ?", (start,)).fetchone()
            if names >= NAMES_LIMIT and name != TIME:
                self._drop(run, len(fresh))
                return
            row = self._db.execute(
                "INSERT INTO series (start, name) VALUES (?, ?) RETURNING id, count, total, last_step",
                (start, name),
            ).fetchone()
        series, count, before, _ = row
        total = _together(_loaded(before) if before is not None else None, _view(name, fresh))
        first_step, last_step = int(fresh.first.min()), int(fresh.last.max())
        for level in range(TOP + 1):
            if not len(fresh):
                break
            there = count // FACTOR**level
            whole = joined([self._partial_chunk(series, level, there), fresh])
            begin = there - (len(whole) - len(fresh))
            self._put_chunks(series, level, begin, whole)
            # The next level has a bucket for each group that has become complete just now.
            fresh = whole[there // FACTOR * FACTOR - begin :].complete_groups()
        self._db.execute(
            "UPDATE series SET count = ?1, total = ?2, first_step = min(coalesce(first_step, ?3), ?3), "
            "last_step = max(coalesce(last_step, ?4), ?4) WHERE id = ?5",
            (total.count, orjson.dumps(total), first_step, last_step, series),
        )

    def _sorted_together(self, series: int, count: int, late: Buckets, *, is_time: bool) -> Buckets | None:
        """All values of a series with those that came late among them, to be put into columns anew; None where some of them are
        no longer kept by themselves."""
        whole = list(_pieces(self._db, series, 0, count, 0))
        if sum(map(len, whole)) != count or any((part.count != 1).any() for part in whole):
            return None
        together = joined([*whole, late])
        if is_time:
            together = together[np.unique(together.last, return_index=True)[1]]
        else:
            together = together[np.argsort(together.last, kind="stable")]
        self._db.execute("DELETE FROM chunks WHERE series = ?", (series,))
        self._db.execute(
            "UPDATE series SET count = 0, first_step = NULL, last_step = NULL, cut = NULL, of_cut = NULL "
            "WHERE id = ?",
            (series,),
        )
        return together

    def _partial_chunk(self, series: int, level: int, there: int) -> Buckets:
        """The buckets of the last chunk, if it is not full."""
        number, rest = divmod(there, _capacity(level))
        if not rest:
            return Buckets.of([], [])
        count, data = self._db.execute(
            "SELECT count, data FROM chunks WHERE series = ? AND level = ? AND number = ?",
            (series, level, number),
        ).fetchone()
        return unpack(level, count, data)

    def _put_chunks(self, series: int, level: int, begin: int, whole: Buckets) -> None:
        capacity = _capacity(level)
        for at in range(0, len(whole), capacity):
            part = whole[at : at + capacity]
            number = (begin + at) // capacity
            self._db.execute(
                "DELETE FROM chunks WHERE series = ? AND level = ? AND number = ?", (series, level, number)
            )
            self._db.execute(
                "INSERT INTO chunks (series, level, number, count, first_step, last_step, is_full, data) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    series,
                    level,
                    number,
                    len(part),
                    int(part.first.min()),
                    int(part.last.max()),
                    int(len(part) == capacity),
                    pack(level, part),
                ),
            )

    def _note_cuts(self, run: int) -> None:
        """A new start may have abandoned some of what earlier ones logged: what is left of it is added up once."""
        (name, job) = self._db.execute("SELECT run, job FROM runs WHERE id = ?", (run,)).fetchone()
        for each in _starts(self._db, name, job):
            if each.limit is None:
                continue
            rows = self._db.execute(
                "SELECT id, name, count, first_step, last_step FROM series "
                "WHERE start = ?1 AND name != ?2 AND last_step > ?3 AND coalesce(cut, ?4) > ?3",
                (each.id, TIME, each.limit, LAST_STEP),
            ).fetchall()
            for series, metric, *extent in rows:
                view = _total_until(self._db, _Series(series, *extent), metric, each.limit)
                self._db.execute(
                    "UPDATE series SET cut = ?, of_cut = ? WHERE id = ?",
                    (each.limit, orjson.dumps(view), series),
                )

    # --- space ----------------------------------------------------------------------------------------------

    def _make_space(self) -> None:
        if used_bytes(self._db) <= self._limit_bytes:
            return
        enough = self._limit_bytes * (1 - SPARE)
        for level in range(TOP):  # Of what is in the top level nothing is left but that.
            while used_bytes(self._db) > enough:
                dropped = self._db.execute(
                    "DELETE FROM chunks WHERE id IN "
                    "(SELECT id FROM chunks WHERE level = ? AND is_full ORDER BY id LIMIT ?)",
                    (level, DROP_AT_A_TIME),
                )
                if not dropped.rowcount:
                    break
        while used_bytes(self._db) > enough:
            oldest = self._db.execute("SELECT id FROM runs ORDER BY touched LIMIT 1").fetchone()
            if oldest is None:
                return
            with _transaction(self._db):
                self._remove(oldest[0])

    def _remove(self, run: int) -> None:
        self._forget(run)
        for table in ("details", "gaps"):
            self._db.execute(
                f"DELETE FROM {table} WHERE start IN (SELECT id FROM starts WHERE run = ?)", (run,)
            )
        for table, column in (("annotations", "run"), ("starts", "run"), ("runs", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", (run,))

    def _forget(self, run: int) -> None:
        """All values of a run."""
        self._tails.pop(run, None)
        of_run = "(SELECT id FROM starts WHERE run = ?)"
        self._db.execute(
            f"DELETE FROM chunks WHERE series IN (SELECT id FROM series WHERE start IN {of_run})", (run,)
        )
        self._db.execute(f"DELETE FROM series WHERE start IN {of_run}", (run,))
        self._db.execute("DELETE FROM tail WHERE run = ?", (run,))


# --- reading --------------------------------------------------------------------------------------------------


class _Reading:
    """One question about the curves of a run."""

    def __init__(
        self,
        db: sqlite3.Connection,
        starts: Sequence[_Started],
        tails: dict[tuple[int, str], Buckets],
        *,
        first: int,
        last: int,
        points: int,
    ) -> None:
        self._db = db
        self._starts = starts
        self._tails = tails
        self._first = first
        self._last = last
        self._points = points
        self._times: tuple[Buckets, dict[int, Buckets]] | None = None

    def curves(self, name: str) -> Curves:
        committed, abandoned = self._branches(name)
        if self._times is None:
            self._times = self._branches(TIME)
        committed = committed.at_most(self._points)
        shown = [each for each in self._starts if each.id in abandoned][-BRANCHES_SHOWN:]
        each_points = max(2, self._points // max(1, len(shown)))
        return Curves(
            name=name,
            committed=Curve(points=committed, times=_times(committed, self._times[0])),
            abandoned=[
                Curve(
                    points=(points := abandoned[each.id].at_most(each_points)),
                    times=_times(points, self._times[1].get(each.id, self._times[0])),
                    generation=each.start.generation,
                )
                for each in shown
            ],
        )

    def _branches(self, name: str) -> tuple[Buckets, dict[int, Buckets]]:
        """The committed history, and what each start logged beyond it."""
        series = self._series_of(name)
        committed: list[tuple[_Series | None, Buckets | None, int, int]] = []
        abandoned: dict[int, tuple[_Series | None, Buckets | None, int, int]] = {}
        for each in self._starts:
            kept, tail = series.get(each.id), self._tails.get((each.id, name))
            limit = LAST_STEP if each.limit is None else each.limit
            if kept is None and tail is None:
                continue
            committed.append((kept, tail, self._first, min(self._last, limit)))
            reached = max(kept.last_step if kept else 0, int(tail.last.max()) if tail is not None else 0)
            if reached > limit and self._last > limit:
                abandoned[each.id] = (kept, tail, max(self._first, limit + 1), self._last)
        parts = self._read(committed)
        branches = {start: self._read([branch]) for start, branch in abandoned.items()}
        return parts, {start: found for start, found in branches.items() if len(found)}

    def _series_of(self, name: str) -> dict[int, _Series]:
        found: dict[int, _Series] = {}
        for at in range(0, len(self._starts), 500):
            ids = [each.id for each in self._starts[at : at + 500]]
            rows = self._db.execute(
                "SELECT start, id, count, first_step, last_step FROM series "
                f"WHERE name = ? AND start IN ({','.join('?' * len(ids))})",
                (name, *ids),
            )
            found |= {start: _Series(*row) for start, *row in rows if row[1]}
        return found

    def _read(self, wanted: Sequence[tuple[_Series | None, Buckets | None, int, int]]) -> Buckets:
        """These ranges of steps, one after the other, at a resolution that is enough for the points asked for."""
        spans = [
            _span(self._db, kept, first, last) if kept is not None and first <= last else (0, 0)
            for kept, _, first, last in wanted
        ]
        tails = [
            tail.within(first, last) if tail is not None and first <= last else None
            for _, tail, first, last in wanted
        ]
        total = sum(stop - begin for begin, stop in spans) + sum(len(t) for t in tails if t is not None)
        level = level_for(total, self._points)
        parts: list[Buckets] = []
        for (kept, _, first, last), (begin, stop), tail in zip(wanted, spans, tails, strict=True):
            if kept is not None and begin < stop:
                parts += [part.within(first, last) for part in _pieces(self._db, kept.id, begin, stop, level)]
            if tail is not None and len(tail):
                parts.append(tail)
        return joined(parts)


def _span(db: sqlite3.Connection, series: _Series, first: int, last: int) -> tuple[int, int]:
    """Which of a series' values have steps in this range."""
    begin = 0 if first <= series.first_step else _position(db, series, first)
    stop = series.count if last >= series.last_step else _position(db, series, last + 1)
    return begin, max(begin, stop)


def _position(db: sqlite3.Connection, series: _Series, step: int) -> int:
    """How many values come before the first one of this step or a later one: exactly, or, where the values themselves are no
    longer kept, as exactly as is known."""
    position = series.count
    for level in range(TOP + 1):
        capacity, width = _capacity(level), FACTOR**level
        row = db.execute(
            "SELECT number, first_step, count, data FROM chunks "
            "WHERE series = ? AND level = ? AND last_step >= ? ORDER BY number LIMIT 1",
            (series.id, level, step),
        ).fetchone()
        if row is None:
            continue
        number, first_step, count, data = row
        at = int(np.argmax(unpack(level, count, data).last >= step))
        position = min(position, (number * capacity + at) * width)
        if number == 0 or first_step < step or _has_chunk(db, series.id, level, number - 1):
            return int(position)
    return int(position)


def _has_chunk(db: sqlite3.Connection, series: int, level: int, number: int) -> bool:
    query = "SELECT 1 FROM chunks WHERE series = ? AND level = ? AND number = ?"
    return db.execute(query, (series, level, number)).fetchone() is not None


def _pieces(db: sqlite3.Connection, series: int, begin: int, stop: int, level: int) -> Iterator[Buckets]:
    for piece in cover(begin, stop, level):
        yield from _piece(db, series, piece.level, piece.first, piece.stop)


def _piece(db: sqlite3.Connection, series: int, level: int, first: int, stop: int) -> Iterator[Buckets]:
    """Buckets of one level; of the next, where these are no longer kept."""
    capacity = _capacity(level)
    numbers = range(first // capacity, (stop - 1) // capacity + 1)
    rows = db.execute(
        "SELECT number, count, data FROM chunks WHERE series = ? AND level = ? AND number BETWEEN ? AND ?",
        (series, level, numbers[0], numbers[-1]),
    )
    found = {number: (count, data) for number, count, data in rows}
    for number in numbers:
        begin = number * capacity
        low, high = max(first, begin), min(stop, begin + capacity)
        if number in found:
            yield unpack(level, *found[number])[low - begin : high - begin]
        elif level < TOP:
            yield from _piece(db, series, level + 1, low // FACTOR, -(-high // FACTOR))


def _annotate(db: sqlite3.Connection, annotation: Annotation) -> None:
    """Unless something newer has been written."""
    db.execute(
        "INSERT INTO annotations (run, tags, notes, at) "
        "SELECT id, ?3, ?4, ?5 FROM runs WHERE run = ?1 AND (?2 IS NULL OR job = ?2) "
        "ON CONFLICT (run) DO UPDATE SET tags = excluded.tags, notes = excluded.notes, at = excluded.at "
        "WHERE at <= excluded.at",
        (
            annotation.run,
            annotation.job,
            orjson.dumps(annotation.tags).decode(),
            annotation.notes,
            annotation.at_s,
        ),
    )


def _annotations(db: sqlite3.Connection, run: str, job: str | None) -> tuple[list[str], str]:
    """Tags and notes, as they were written last."""
    row = db.execute(
        "SELECT tags, notes FROM annotations JOIN runs ON runs.id = annotations.run "
        "WHERE runs.run = ?1 AND (?2 IS NULL OR job = ?2) ORDER BY at DESC LIMIT 1",
        (run, job),
    ).fetchone()
    return ([], "") if row is None else (orjson.loads(row[0]), str(row[1]))


def _unknown(run: str) -> Unknown:
    return Unknown("run", run, hint="A run is known here once it has logged something: job.log({...}).")


def _starts(db: sqlite3.Connection, run: str, job: str | None) -> list[_Started]:
    """Every start of a run, as far as this job has reported it, oldest first."""
    rows = db.execute(
        "SELECT starts.id, runs.id, job, generation, started, resumed FROM starts JOIN runs ON runs.id = starts.run "
        "WHERE runs.run = ?1 AND (?2 IS NULL OR job = ?2) ORDER BY generation, started, starts.id",
        (run, job),
    ).fetchall()
    starts = [
        (each, of_run, at_job, Start(generation=generation, started_ms=started, resumed_step=resumed))
        for each, of_run, at_job, generation, started, resumed in rows
    ]
    limits = committed_until(start for *_, start in starts)
    return [
        _Started(id=each, run=of_run, job=at_job, start=start, limit=limits[start.order])
        for each, of_run, at_job, start in starts
    ]


def _tails(
    db: sqlite3.Connection, starts: Sequence[_Started], names: Sequence[str]
) -> dict[tuple[int, str], Buckets]:
    """What is no columns yet, of these metrics."""
    found: dict[tuple[int, str], list[Buckets]] = {}
    for start, rows in _tail_rows(db, starts):
        for name in names:
            if name == TIME:
                found.setdefault((start, name), []).append(Buckets.of(rows.steps, rows.times))
            elif name in rows.names:
                column = rows.values[:, rows.names.index(name)]
                found.setdefault((start, name), []).append(Buckets.of(rows.steps, column))
    return {key: joined(parts) for key, parts in found.items()}


def _tail_rows(db: sqlite3.Connection, starts: Sequence[_Started]) -> Iterator[tuple[int, MetricRows]]:
    for run in {each.run for each in starts}:
        query = "SELECT start, names, steps, times, vals FROM tail WHERE run = ? ORDER BY id"
        for start, names, *columns in db.execute(query, (run,)):
            yield start, _rows(names, *columns)


def _rows(names: bytes, steps: bytes, times: bytes, values: bytes) -> MetricRows:
    known = _names(names)
    return MetricRows(
        names=known,
        steps=np.frombuffer(steps, "<i8"),
        times=np.frombuffer(times, "<f8"),
        values=np.frombuffer(values, "<f8").reshape(-1, len(known)),
    )


@lru_cache(maxsize=256)
def _names(body: bytes) -> tuple[str, ...]:
    return tuple(orjson.loads(body))


# --- totals ---------------------------------------------------------------------------------------------------


def _totals(
    db: sqlite3.Connection, each: _Started, tail: Sequence[MetricRows]
) -> Iterator[tuple[str, MetricView]]:
    """Of every metric of one start: what is committed."""
    until = LAST_STEP if each.limit is None else each.limit
    rows = db.execute(
        "SELECT id, name, count, first_step, last_step, total, cut, of_cut FROM series "
        "WHERE start = ? AND name != ? AND first_step <= ?",
        (each.id, TIME, until),
    ).fetchall()
    for series, name, count, first_step, last_step, total, cut, of_cut in rows:
        if last_step <= until:
            yield name, _loaded(total)
        elif cut == until:
            yield name, _loaded(of_cut)
        else:
            yield name, _total_until(db, _Series(series, count, first_step, last_step), name, until)
    for part in tail:
        for name, column in zip(part.names, part.values.T, strict=True):
            if len(whole := Buckets.of(part.steps, column).within(0, until)):
                yield name, _view(name, whole)


def _total_until(db: sqlite3.Connection, series: _Series, name: str, until: int) -> MetricView:
    begin, stop = _span(db, series, 0, until)
    return _view(name, joined(list(_pieces(db, series.id, begin, stop, TOP))))


def _loaded(body: bytes) -> MetricView:
    return MetricView(**orjson.loads(body))


def _view(name: str, whole: Buckets) -> MetricView:
    if not len(whole):
        return MetricView(name=name, count=0, nonfinite=0, last=None, last_step=0, min=None, max=None)
    one = whole.at_most(1)
    return MetricView(
        name=name,
        count=int(one.count[0]),
        nonfinite=int(one.bad[0]),
        last=_number(one.final[0]),
        last_step=int(one.last[0]),
        min=_number(one.low[0]),
        max=_number(one.high[0]),
    )


def _together(before: MetricView | None, after: MetricView) -> MetricView:
    if before is None or not before.count:
        return after
    if not after.count:
        return before
    lows = [each.min for each in (before, after) if each.min is not None]
    highs = [each.max for each in (before, after) if each.max is not None]
    return MetricView(
        name=after.name,
        count=before.count + after.count,
        nonfinite=before.nonfinite + after.nonfinite,
        last=after.last,
        last_step=after.last_step,
        min=min(lows, default=None),
        max=max(highs, default=None),
    )


def _times(points: Buckets, times: Buckets) -> npt.NDArray[np.float64]:
    if not len(times):
        return np.zeros(len(points))
    order = np.argsort(times.last, kind="stable")
    return np.interp(points.last, times.last[order], times.final[order])


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


# --- the file -------------------------------------------------------------------------------------------------


def _capacity(level: int) -> int:
    return BUCKETS_PER_CHUNK if level else VALUES_PER_CHUNK


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
