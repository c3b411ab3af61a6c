"""Log lines and progress on their way to the coordinator: bounded, batched, never in a training step's way."""

from __future__ import annotations

import logging
import threading
from collections import deque

from strata.rpc import coordinator_pb2 as pb

LINES_KEPT = 10_000
CHARACTERS_KEPT = 16_000_000
LINES_PER_BATCH = 500
CHARACTERS_PER_BATCH = 1_000_000
MESSAGE_LIMIT = 16_384


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
