"""Log lines and progress on their way to the coordinator: bounded, batched, never in a training step's way."""

from __future__ import annotations

import logging
import threading
from collections import deque

from strata.rpc import coordinator_pb2 as pb

LINES_KEPT = 10_000
LINES_PER_BATCH = 500


class LogOutbox:
    """A ring that any thread may fill. When it is full the oldest line goes, and the loss is counted."""

    def __init__(self) -> None:
        self._lines: deque[pb.LogEntry] = deque()
        self._lock = threading.Lock()
        self._dropped = 0

    def put(self, entry: pb.LogEntry) -> None:
        with self._lock:
            if len(self._lines) >= LINES_KEPT:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(entry)

    def take(self) -> pb.LogBatch | None:
        with self._lock:
            if not self._lines and not self._dropped:
                return None
            count = min(len(self._lines), LINES_PER_BATCH)
            batch = pb.LogBatch(entries=[self._lines.popleft() for _ in range(count)], dropped=self._dropped)
            self._dropped = 0
            return batch

    def give_back(self, batch: pb.LogBatch) -> None:
        """A batch that could not be sent goes first again."""
        with self._lock:
            self._lines.extendleft(reversed(batch.entries))
            self._dropped += batch.dropped


class ShippingHandler(logging.Handler):
    """`logging` records of this process, sent to the coordinator with everything else."""

    def __init__(self, outbox: LogOutbox, *, level: int, task_id: str) -> None:
        super().__init__(level)
        self._outbox = outbox
        self._task_id = task_id

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
                message=message[:16_384],
                source="worker",
                task_id=self._task_id,
            )
        )
