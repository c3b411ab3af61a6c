"""The log of the whole fleet: a bounded ring of structured entries that can be searched and followed.

Lines arrive from workers, tasks and the coordinator itself. Names and messages are data: control characters
are replaced, overlong lines are cut, and a worker that floods loses lines by policy. What was dropped is counted
and reported in the log itself, never silently.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from strata.core.views import LogView

LEVELS = ("debug", "info", "warn", "error")
_LEVEL_NAMES = {"warning": "warn", "critical": "error", "fatal": "error", "trace": "debug"}
MESSAGE_LIMIT = 8_192
ENTRIES_KEPT = 20_000
CHARACTERS_KEPT = 16_000_000
LINES_PER_SECOND = 500
"""What one worker may send on average."""
BURST_LINES = 10.0 * LINES_PER_SECOND
LATEST_S = 1e11
"""Far beyond any clock that is merely wrong; a line that claims a later time is given the present."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(message: str) -> str:
    """Text that cannot move a cursor, ring a bell or turn a line around; newlines and tabs stay."""
    message = _CONTROL.sub("�", _ANSI.sub("", message).replace("\r\n", "\n"))
    if len(message) > MESSAGE_LIMIT:
        message = f"{message[:MESSAGE_LIMIT]}… ({len(message):,} characters)"
    return message


def level_of(name: str) -> str:
    name = name.lower()
    name = _LEVEL_NAMES.get(name, name)
    return name if name in LEVELS else "info"


@dataclass(slots=True)
class _Budget:
    """A token bucket, refilled by the monotonic clock."""

    tokens: float
    filled_mono_s: float
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    level: str | None = None
    """The least severe level that is wanted."""
    task_id: str | None = None
    worker_id: str | None = None
    text: str | None = None
    after: str | None = None
    """Only entries newer than the one with this id."""

    def __call__(self, entry: LogView) -> bool:
        if self.level is not None and LEVELS.index(entry.level) < LEVELS.index(self.level):
            return False
        if self.task_id is not None and entry.task_id != self.task_id:
            return False
        if self.worker_id is not None and entry.worker_id != self.worker_id:
            return False
        return self.text is None or self.text.lower() in entry.message.lower()


class LogStore:
    def __init__(self, *, entries_kept: int = ENTRIES_KEPT, characters_kept: int = CHARACTERS_KEPT) -> None:
        self._entries_kept = entries_kept
        self._characters_kept = characters_kept
        self._characters = 0
        self._entries: deque[LogView] = deque()
        self._next = time.time_ns() // 1_000
        """Ids grow over restarts too, so that whoever follows the log does not wait for numbers to come round."""
        self._budgets: dict[str, _Budget] = {}
        self.dropped_total = 0
        self.on_entries: Callable[[list[LogView]], None] = lambda entries: None

    def add(
        self,
        *,
        level: str,
        message: str,
        source: str,
        at_s: float,
        task_id: str | None = None,
        worker_id: str | None = None,
    ) -> None:
        entry = self._entry(level, message, source, at_s, task_id, worker_id)
        self.on_entries([entry])

    def add_from_worker(
        self, worker_id: str, lines: Iterable[tuple[float, str, str, str, str]], *, dropped: int = 0
    ) -> None:
        """Lines of (at_s, level, message, source, task_id), within the worker's budget; `dropped` it lost itself."""
        budget = self._refilled(worker_id)
        accepted = []
        for at_s, level, message, source, task_id in lines:
            if budget.tokens < 1.0:
                dropped += 1
                continue
            budget.tokens -= 1.0
            accepted.append(self._entry(level, message, source, at_s, task_id or None, worker_id))
        self.dropped_total += dropped
        budget.dropped += dropped
        if accepted:
            self.on_entries(accepted)

    def report_drops(self) -> None:
        """Called about once a second: says in the log itself what is missing from it."""
        for worker_id in list(self._budgets):
            budget = self._refilled(worker_id)
            if budget.dropped:
                self.add(
                    level="warn",
                    message=f"{budget.dropped:,} log lines of '{worker_id}' were dropped: more came than the "
                    f"{LINES_PER_SECOND} a second that are kept",
                    source="coordinator",
                    at_s=time.time(),
                    worker_id=worker_id,
                )
                budget.dropped = 0
            elif budget.tokens >= BURST_LINES:
                del self._budgets[worker_id]  # Quiet for long enough to begin anew.

    def newest(self, limit: int, wanted: LogFilter) -> list[LogView]:
        """Newest first, at most `limit`, all of them wanted."""
        after = int(wanted.after.removeprefix("log_"), 16) if wanted.after else 0
        found: list[LogView] = []
        for entry in reversed(self._entries):
            if len(found) >= limit or int(entry.id.removeprefix("log_"), 16) <= after:
                break
            if wanted(entry):
                found.append(entry)
        return found

    def __iter__(self) -> Iterator[LogView]:
        return iter(self._entries)

    def _refilled(self, worker_id: str) -> _Budget:
        now_mono_s = time.monotonic()
        budget = self._budgets.get(worker_id)
        if budget is None:
            budget = self._budgets[worker_id] = _Budget(BURST_LINES, now_mono_s)
        refill = (now_mono_s - budget.filled_mono_s) * LINES_PER_SECOND
        budget.tokens = min(BURST_LINES, budget.tokens + refill)
        budget.filled_mono_s = now_mono_s
        return budget

    def _entry(
        self,
        level: str,
        message: str,
        source: str,
        at_s: float,
        task_id: str | None,
        worker_id: str | None,
    ) -> LogView:
        entry = LogView(
            id=f"log_{self._next:08x}",
            timestamp=at_s if 0.0 <= at_s <= LATEST_S else time.time(),
            level=level_of(level),
            message=clean(message),
            source=clean(source)[:64] or "worker",
            task_id=clean(task_id)[:256] if task_id is not None else None,
            worker_id=worker_id,
        )
        self._next += 1
        self._entries.append(entry)
        self._characters += len(entry.message)
        while len(self._entries) > self._entries_kept or self._characters > self._characters_kept:
            self._characters -= len(self._entries.popleft().message)
        return entry


class LogStoreHandler(logging.Handler):
    """The coordinator's own `logging` records, in the same log. Records of other threads are handed over."""

    def __init__(self, store: LogStore, call_soon: Callable[[Callable[[], None]], object]) -> None:
        super().__init__()
        self._store = store
        self._call_soon = call_soon
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)

        def add() -> None:
            self._store.add(
                level=record.levelname, message=message, source="coordinator", at_s=record.created
            )

        if threading.get_ident() == self._thread:
            add()
        else:
            self._call_soon(add)
