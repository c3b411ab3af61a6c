"""Log lines and metrics on their way to the coordinator: bounded, batched, never in a training step's way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from strata.rpc import coordinator_pb2 as pb

LINES_KEPT = 10_000
CHARACTERS_KEPT = 16_000_000
LINES_PER_BATCH = 500
CHARACTERS_PER_BATCH = 1_000_000
MESSAGE_LIMIT = 16_384
METRICS_KEPT_BYTES = 32 << 20
"""Of metrics that the coordinator has not answered for."""
METRICS_PER_BATCH_BYTES = 4 << 20
ANSWER_S = 10.0
"""A batch of metrics that is not answered for so long is sent again."""


class LogOutbox:
    """A ring that any thread may fill. When it is full the oldest line goes, and the loss is counted."""

    def __init__(self) -> None:
        self._lines: deque[pb.LogEntry] = deque()
        self._characters = 0
        self._lock = threading.Lock()
        self._dropped = 0

    def put(self, entry: pb.LogEntry) -> None:
        with self._lock:
            self._lines.append(entry)
            self._characters += len(entry.message)
            while len(self._lines) > LINES_KEPT or self._characters > CHARACTERS_KEPT:
                self._characters -= len(self._lines.popleft().message)
                self._dropped += 1

    def take(self) -> pb.LogBatch | None:
        with self._lock:
            if not self._lines and not self._dropped:
                return None
            batch = pb.LogBatch(dropped=self._dropped)
            self._dropped = 0
            taken = 0
            while self._lines and len(batch.entries) < LINES_PER_BATCH and taken < CHARACTERS_PER_BATCH:
                taken += len(self._lines[0].message)
                batch.entries.append(self._lines.popleft())
            self._characters -= taken
            return batch

    def give_back(self, batch: pb.LogBatch) -> None:
        """A batch that could not be sent goes first again."""
        with self._lock:
            self._lines.extendleft(reversed(batch.entries))
            self._characters += sum(len(entry.message) for entry in batch.entries)
            self._dropped += batch.dropped


class MetricOutbox:
    """Rows of metrics, until the coordinator has them on disk. One batch is under way at a time, and is sent again until it is
    answered. When too many wait, the oldest go, and the loss is counted and reported. `details` say how this start was made, and
    go first."""

    def __init__(self, *, generation: int, started_ms: int, resumed_step: int, details: bytes = b"") -> None:
        self.dropped_total = 0
        self.refused = ""
        """Why the coordinator did not keep a batch, the last time it did not."""
        self._head = pb.MetricBatch(generation=generation, started_ms=started_ms, resumed_step=resumed_step)
        self._details = details
        self._rows: deque[pb.MetricRows] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._dropped = 0
        self._number = 0
        self._under_way: pb.MetricBatch | None = None
        self._sent_mono_s: float | None = None

    def put(self, rows: pb.MetricRows) -> None:
        with self._lock:
            self._rows.append(rows)
            self._bytes += len(rows.values)
            while self._bytes > METRICS_KEPT_BYTES and len(self._rows) > 1:
                lost = self._rows.popleft()
                self._bytes -= len(lost.values)
                self._dropped += len(lost.values) // 8
                self.dropped_total += len(lost.values) // 8

    @property
    def is_empty(self) -> bool:
        with self._lock:
            return self._under_way is None and not self._rows and not self._details

    def take(self) -> pb.MetricBatch | None:
        """What is to be sent now."""
        now_mono_s = time.monotonic()
        with self._lock:
            if self._under_way is None:
                self._under_way = self._next()
            elif self._sent_mono_s is not None and now_mono_s - self._sent_mono_s < ANSWER_S:
                return None
            self._sent_mono_s = now_mono_s
            return self._under_way

    def _next(self) -> pb.MetricBatch | None:
        if not self._rows and not self._details:
            return None
        self._number += 1
        batch = pb.MetricBatch(number=self._number, dropped=self._dropped, details=self._details)
        batch.MergeFrom(self._head)
        self._dropped, self._details = 0, b""
        taken = 0
        while self._rows and taken < METRICS_PER_BATCH_BYTES:
            rows = self._rows.popleft()
            taken += len(rows.values)
            batch.rows.append(rows)
        self._bytes -= taken
        return batch

    def reconnected(self) -> None:
        """What is under way may have been lost."""
        with self._lock:
            self._sent_mono_s = None

    def answered(self, kept: pb.MetricsKept) -> None:
        with self._lock:
            batch = self._under_way
            if batch is None or (kept.number, kept.started_ms) != (batch.number, batch.started_ms):
                return
            self._under_way = None
            if kept.refused:
                self.refused = kept.refused
                self.dropped_total += sum(len(rows.values) // 8 for rows in batch.rows)


class ShippingHandler(logging.Handler):
    """`logging` records of this process, sent to the coordinator with everything else."""

    def __init__(self, outbox: LogOutbox, *, level: int) -> None:
        super().__init__(level)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:  # A record that cannot be formatted must not stop the program that wrote it.
            self.handleError(record)
            return
        self._outbox.put(
            pb.LogEntry(
                timestamp=record.created,
                level=record.levelname.lower(),
                message=message if len(message) <= MESSAGE_LIMIT else _cut(message),
            )
        )


def _cut(message: str) -> str:
    """The beginning and the end: a traceback ends with what went wrong."""
    return f"{message[: MESSAGE_LIMIT // 2]}\n…\n{message[-MESSAGE_LIMIT // 2 :]}"
