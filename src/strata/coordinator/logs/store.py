"""The log of the whole fleet: structured entries that can be searched and followed, in memory and on disk.

Lines arrive from workers, tasks and the coordinator itself; they are data, tidied as they come in. A sender of more
than its share loses lines by policy: debug and info first, so that a flood does not hide the error behind it. What was
dropped is counted and said in the log itself, never silently. The newest entries are in a bounded ring, all that are
kept in the archive; a question that the ring can answer does not touch the disk. Runs on the event loop and never waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from strata.coordinator.logs.archive import LogArchive, LogFilter, number_of
from strata.core.telemetry.loglines import LogLine
from strata.core.telemetry.logtext import LEVELS, Tidy, clean, level_of
from strata.core.views import LogView

ENTRIES_KEPT = 20_000
CHARACTERS_KEPT = 16_000_000
LINES_PER_SECOND = 500
"""What one sender may send on average, unless the settings say otherwise."""
BURST_S = 10.0
"""Seconds' worth of lines that may come at once."""
RESERVE = 0.2
"""Share of the burst that only warnings and errors may use."""
FLEET_LINES_PER_SECOND = 20_000
"""What all senders together may send."""
RECALLED = 1_000
"""Entries of an earlier life that are in memory from the start."""
LATEST_S = 1e11
"""Far beyond any clock that is merely wrong; a line that claims a later time is given the present."""
COALESCE_S = 0.1
KEEPALIVE_S = 15.0
FOLLOWED_AT_ONCE = 1_000
"""A reader that follows is sent so many entries at a time, and how many more there were."""
FOLLOWED_S = 300.0
"""Entries of another coordinator that are older are found by searching, and not sent to those who follow."""
RESUMED_AT_ONCE = 10_000
"""One that comes back is sent so many that it has not seen."""


@dataclass(slots=True)
class _Budget:
    """A token bucket, refilled by the monotonic clock."""

    per_second: float
    tokens: float
    filled_mono_s: float
    dropped: int = 0
    worker_id: str | None = None
    task_id: str | None = None
    """Whose lines they were, for the notice of those that were dropped."""

    @property
    def burst(self) -> float:
        return BURST_S * self.per_second

    def refill(self, now_mono_s: float) -> None:
        self.tokens = min(self.burst, self.tokens + (now_mono_s - self.filled_mono_s) * self.per_second)
        self.filled_mono_s = now_mono_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """So many entries a follower could not be sent."""

    count: int


class LogStore:
    def __init__(
        self,
        archive: LogArchive | None = None,
        *,
        tidy: Tidy | None = None,
        lines_per_second: int = LINES_PER_SECOND,
        entries_kept: int = ENTRIES_KEPT,
        characters_kept: int = CHARACTERS_KEPT,
    ) -> None:
        self.archive = archive
        self._tidy = tidy or Tidy()
        self._lines_per_second = lines_per_second
        self._entries_kept = entries_kept
        self._characters_kept = characters_kept
        self._characters = 0
        self._entries: deque[LogView] = deque()
        """By number."""
        self._arrivals: deque[LogView] = deque()
        """As they came, for those who follow: of another coordinator some come later than their numbers say."""
        self._arrived = 0
        self._number = 0
        if archive is not None:
            self._number = archive.last_number
            self._keep(archive.search(RECALLED, LogFilter(), below=2**63 - 1)[::-1])
        self._budgets: dict[str, _Budget] = {}
        self._fleet = _Budget(FLEET_LINES_PER_SECOND, FLEET_LINES_PER_SECOND, time.monotonic())
        self._news = asyncio.Event()
        self._closed = False
        self.counts = dict.fromkeys(LEVELS, 0)
        """Entries taken in, by level."""
        self.dropped_total = 0
        self._refused_reported = 0
        self.followers = 0
        self.on_entries: Callable[[Sequence[LogView]], None] = lambda entries: None

    @property
    def total(self) -> int:
        """Entries taken in since the start."""
        return sum(self.counts.values())

    # --- taking in ------------------------------------------------------------------------------------------

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
        """One entry of the coordinator's own, outside every budget."""
        self._take([LogLine(at_s, level, message, source, task_id or "")], worker_id)

    def add_lines(
        self, lines: Sequence[LogLine], *, sender: str, worker_id: str | None = None, dropped: int = 0
    ) -> None:
        """Lines of a worker or a task, within the sender's budget; `dropped` were lost before they came here."""
        budget = self._refilled(sender)
        budget.worker_id = worker_id
        if lines:
            budget.task_id = lines[-1].task_id or None
        accepted = list(lines)
        if budget.tokens - budget.burst * RESERVE < len(lines) or self._fleet.tokens < len(lines):
            accepted = [line for line in lines if self._affordable(budget, line)]
        else:
            budget.tokens -= len(lines)
            self._fleet.tokens -= len(lines)
        dropped += len(lines) - len(accepted)
        self.dropped_total += dropped
        budget.dropped += dropped
        self._take(accepted, worker_id)

    def _affordable(self, budget: _Budget, line: LogLine) -> bool:
        weighty = level_of(line.level) in ("warn", "error")
        least = 1.0 if weighty else 1.0 + budget.burst * RESERVE
        if budget.tokens < least or (self._fleet.tokens < 1.0 and not weighty):
            return False
        budget.tokens -= 1.0
        self._fleet.tokens -= 1.0
        return True

    def report_drops(self) -> None:
        """Called about once a second: says in the log itself what is missing from it."""
        for sender in list(self._budgets):
            budget = self._refilled(sender)
            if budget.dropped:
                kind, _, name = sender.partition(" ")
                task_id = name if kind == "task" else budget.task_id
                self.add(
                    level="warn",
                    message=f"{budget.dropped:,} log lines of '{name}' were dropped: the limit is "
                    f"{self._lines_per_second:,} lines per second",
                    source="coordinator",
                    at_s=time.time(),
                    worker_id=budget.worker_id,
                    task_id=task_id,
                )
                budget.dropped = 0
            elif budget.tokens >= budget.burst:
                del self._budgets[sender]  # Quiet for long enough to begin anew.
        refused = self.archive.refused_total if self.archive is not None else 0
        if refused > self._refused_reported:
            self.add(
                level="warn",
                message=f"{refused - self._refused_reported:,} log lines are not on disk, which was too slow; the newest "
                f"{self._entries_kept:,} lines can still be read",
                source="coordinator",
                at_s=time.time(),
            )
            self._refused_reported = refused

    def _refilled(self, sender: str) -> _Budget:
        now_mono_s = time.monotonic()
        budget = self._budgets.get(sender)
        if budget is None:
            per_second = self._lines_per_second
            budget = self._budgets[sender] = _Budget(per_second, BURST_S * per_second, now_mono_s)
        budget.refill(now_mono_s)
        self._fleet.refill(now_mono_s)
        return budget

    def _take(self, lines: Sequence[LogLine], worker_id: str | None) -> None:
        if not lines:
            return
        now_s = time.time()
        messages = self._tidy.all([line.message for line in lines])
        # Numbers follow the clock, over restarts too, so that a reader that follows the log never waits for them.
        number = max(self._number, time.time_ns() // 1_000)
        entries = [
            LogView(
                id=f"log_{number + offset:08x}",
                timestamp=line.at_s if 0.0 <= line.at_s <= LATEST_S else now_s,
                level=level_of(line.level),
                message=message,
                source=_label(line.source)[:64] or "worker",
                task_id=_label(line.task_id) or None,
                worker_id=worker_id,
            )
            for offset, (line, message) in enumerate(zip(lines, messages, strict=True), 1)
        ]
        self._number = number + len(entries)
        for entry in entries:
            self.counts[entry.level] += 1
        self._keep(entries)
        self._arrive(entries)
        if self.archive is not None:
            self.archive.put(entries)

    def _arrive(self, entries: Sequence[LogView]) -> None:
        self._arrivals.extend(entries)
        while len(self._arrivals) > len(self._entries):
            self._arrivals.popleft()
        self._arrived += len(entries)
        self._news.set()
        self.on_entries(entries)

    def merge(self, entries: Sequence[LogView]) -> None:
        """Entries of another coordinator, which are on disk. Older ones than those in memory stay there; followers are sent those
        of late, for the others are history."""
        if not entries:
            return
        self._number = max(self._number, number_of(entries[-1].id))
        recent_s = time.time() - FOLLOWED_S
        recent = [entry for entry in entries if entry.timestamp >= recent_s]
        oldest = number_of(self._entries[0].id) if self._entries else 0
        placed = [entry for entry in entries if number_of(entry.id) > oldest] if oldest else recent
        if placed:
            newer: list[LogView] = []
            while self._entries and number_of(self._entries[-1].id) > number_of(placed[0].id):
                newer.append(self._entries.pop())
            self._characters -= sum(len(entry.message) for entry in newer)
            self._keep(sorted([*placed, *newer], key=lambda entry: number_of(entry.id)))
        if recent:
            self._arrive(recent)

    def _keep(self, entries: Sequence[LogView]) -> None:
        self._entries.extend(entries)
        self._characters += sum(len(entry.message) for entry in entries)
        while len(self._entries) > self._entries_kept or self._characters > self._characters_kept:
            self._characters -= len(self._entries.popleft().message)

    async def flush(self) -> None:
        """Until all that was taken in is on disk, or the disk has had its time."""
        if self.archive is not None:
            await asyncio.to_thread(self.archive.flush)

    # --- asking ---------------------------------------------------------------------------------------------

    def newest(self, limit: int, wanted: LogFilter) -> list[LogView]:
        """Of the entries in memory: newest first, at most `limit`, all of them wanted."""
        after, before = wanted.after_number, wanted.before_number
        found: list[LogView] = []
        for entry in reversed(self._entries):
            number = number_of(entry.id)
            if len(found) >= limit or number <= after:
                break
            if number < before and wanted(entry):
                found.append(entry)
        return found

    async def search(self, limit: int, wanted: LogFilter) -> list[LogView]:
        """Newest first, at most `limit`, from memory and from disk."""
        found = self.newest(limit, wanted)
        oldest = number_of(self._entries[0].id) if self._entries else self._number + 1
        if self.archive is None or len(found) >= limit or wanted.after_number >= oldest:
            return found
        return found + await asyncio.to_thread(self.archive.search, limit - len(found), wanted, below=oldest)

    async def follow(self, wanted: LogFilter) -> AsyncIterator[list[LogView] | Missed]:
        """Entries as they come, oldest first, from the one after `wanted.after` or from now on. Empty: still here."""
        self.followers += 1
        try:
            at = self._arrived
            if wanted.after is not None:
                yield (await self.search(RESUMED_AT_ONCE, wanted))[::-1]
            while not self._closed:
                if at == self._arrived and not await self._has_news():
                    yield []
                    continue
                fresh, at = self._arrived - at, self._arrived
                seen = list(islice(reversed(self._arrivals), fresh))[::-1]
                entries = [entry for entry in seen if wanted(entry)]
                missed = fresh - len(seen) + max(0, len(entries) - FOLLOWED_AT_ONCE)
                if missed:
                    yield Missed(count=missed)
                if entries:
                    yield entries[-FOLLOWED_AT_ONCE:]
        finally:
            self.followers -= 1

    async def _has_news(self) -> bool:
        self._news.clear()
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await self._news.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(COALESCE_S)
        return True

    def end_followers(self) -> None:
        """Every follower's stream ends, in order."""
        self._closed = True
        self._news.set()

    def close(self) -> None:
        """What is not on disk yet is written."""
        if self.archive is not None:
            self.archive.close()

    def __iter__(self) -> Iterator[LogView]:
        return iter(self._entries)


@lru_cache(maxsize=4_096)
def _label(name: str) -> str:
    return clean(name)[:256]


class LogStoreHandler(logging.Handler):
    """The coordinator's own `logging` records, in the same log. Records of other threads are handed over."""

    def __init__(self, store: LogStore, call_soon: Callable[[Callable[[], None]], object]) -> None:
        super().__init__(logging.INFO)
        self._store = store
        self._call_soon = call_soon
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:  # A record that cannot be formatted must not stop who wrote it.
            self.handleError(record)
            return

        def add() -> None:
            self._store.add(
                level=record.levelname,
                message=message,
                source="coordinator",
                at_s=record.created,
                worker_id=getattr(record, "worker_id", None),
                task_id=getattr(record, "task_id", None),
            )

        if threading.get_ident() == self._thread:
            add()
        else:
            with suppress(RuntimeError):  # The loop has ended; so has the log.
                self._call_soon(add)
