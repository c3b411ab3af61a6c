"""Who did what to what, and whether it was allowed: one line of JSON each, appended and never changed.

`audit.jsonl` in the data directory is private. When it is full it is set aside under a number, and the oldest such file is
removed. Refusals that repeat within a second are one line with a count, so that a caller that is refused cannot fill the disk.
Values never get here: neither bodies nor tokens, only who, what, the name of what it was about, from where, and the outcome.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import orjson

from strata.core.messages import shorten

log = logging.getLogger("strata.coordinator.audit")

FILE_BYTES = 16 << 20
FILES_KEPT = 8
REPEAT_S = 1.0
REPEATS_REMEMBERED = 1_000
TARGET_LIMIT = 200

Outcome = Literal["allowed", "refused", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    at: float
    who: str
    role: str
    action: str
    """`POST /api/tasks/{task_id}/stop`, `RegisterWorker`, `sign in`."""
    target: str
    """The name of what it was about."""
    outcome: Outcome
    reason: str
    """Why it was refused, or failed."""
    client: str
    count: int = 1
    """How many times within a second."""


class AuditLog:
    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = data_dir / "audit.jsonl"
        self._clock = clock
        self._fd: int | None = None
        self._size = 0
        self._repeats: dict[tuple[str, ...], AuditEntry] = {}
        self.lost = 0
        """Entries that could not be written."""

    def add(
        self,
        *,
        who: str,
        role: str = "",
        action: str,
        target: str = "",
        outcome: Outcome = "allowed",
        reason: str = "",
        client: str = "",
    ) -> None:
        entry = AuditEntry(
            at=self._clock(),
            who=who,
            role=role,
            action=action,
            target=shorten(target, TARGET_LIMIT),
            outcome=outcome,
            reason=reason,
            client=client,
        )
        if outcome != "refused":
            self._write(entry)
            return
        key = (who, action, entry.target, reason, client)
        self.flush()
        if key in self._repeats:
            self._repeats[key] = replace(self._repeats[key], count=self._repeats[key].count + 1)
            return
        self._write(entry)
        self._repeats[key] = replace(entry, count=0)

    def flush(self) -> None:
        """Called now and then: repetitions whose second is over are written."""
        now_s = self._clock()
        for key, entry in list(self._repeats.items()):
            if now_s - entry.at >= REPEAT_S or len(self._repeats) > REPEATS_REMEMBERED:
                del self._repeats[key]
                if entry.count:
                    self._write(entry)

    def newest(self, limit: int, *, text: str = "", before_s: float | None = None) -> list[AuditEntry]:
        """Newest first; those in which `text` is found."""
        found: list[AuditEntry] = []
        for path in (self.path, *(self._aside(number) for number in range(1, FILES_KEPT))):
            for entry in _read(path):
                if len(found) >= limit:
                    return found
                is_wanted = before_s is None or entry.at < before_s
                if is_wanted and (not text or text.lower() in orjson.dumps(entry).decode().lower()):
                    found.append(entry)
        return found

    def close(self) -> None:
        for entry in self._repeats.values():
            if entry.count:
                self._write(entry)
        self._repeats.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, entry: AuditEntry) -> None:
        line = orjson.dumps(entry) + b"\n"
        try:
            if self._fd is None or self._size + len(line) > FILE_BYTES:
                self._open()
            assert self._fd is not None
            written = os.write(self._fd, line)
            self._size += written
            if written < len(line):  # The disk is full: a torn line is skipped by readers, and ends here.
                with suppress(OSError):
                    os.write(self._fd, b"\n")
                self.lost += 1
        except OSError as error:
            if not self.lost:
                log.error("the audit log cannot be written: %s", error)
            self.lost += 1

    def _open(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            for number in range(FILES_KEPT - 1, 0, -1):
                older = self._aside(number - 1) if number > 1 else self.path
                with suppress(FileNotFoundError):
                    os.replace(older, self._aside(number))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"audit.{number}.jsonl")


def _read(path: Path) -> Iterator[AuditEntry]:
    """Newest first. What is not an entry, such as a line that a full disk cut off, is skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in reversed(lines):
        with suppress(orjson.JSONDecodeError, TypeError):
            yield AuditEntry(**orjson.loads(line))
