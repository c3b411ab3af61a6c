"""What happened, live: one ring of ready-made bytes that any number of browsers read at their own pace.

Each entry is serialized once. A reader holds only a position; one that falls out of the ring, or that comes
from an earlier life of the coordinator, is sent `resync` and continues from the present. Readers can never
slow the engine: publishing is an append.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from strata.core import stream_events
from strata.core.messages import Event

ENTRIES_KEPT = 5_000
BYTES_KEPT = 16_000_000
RECENT_KEPT = 1_000
COALESCE_S = 0.1
KEEPALIVE_S = 15.0


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    body: bytes


class Feed:
    def __init__(self, boot_id: str) -> None:
        self._boot = boot_id
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._recent: deque[bytes] = deque(maxlen=RECENT_KEPT)
        self._number = 0
        self._news = asyncio.Event()
        self._joined: tuple[tuple[int, int], bytes] = ((0, 0), b"")
        self._closed = False
        self.readers = 0

    def committed(self, events: Sequence[Event]) -> None:
        for event in events:
            published = stream_events.publish(event)
            if published is not None:
                self.publish(*published)

    def publish(self, kind: str, data: Any) -> None:
        self._number += 1
        body = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        entry = b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (
            self._boot.encode(),
            self._number,
            kind.encode(),
            body,
        )
        if isinstance(data, dict) and data.get("severity", "debug") != "debug":
            shown = (self.position.encode(), kind.encode(), time.time(), body)
            self._recent.append(b'{"id":"%s","event":"%s","at":%.3f,"data":%s}' % shown)
        self._entries.append(_Entry(self._number, entry))
        self._bytes += len(entry)
        while len(self._entries) > ENTRIES_KEPT or (self._bytes > BYTES_KEPT and len(self._entries) > 1):
            self._bytes -= len(self._entries.popleft().body)
        self._news.set()

    def recent(self) -> bytes:
        """A JSON list of what happened lately, oldest first: for a browser that comes late to the story."""
        return b"[" + b",".join(self._recent) + b"]"

    @property
    def position(self) -> str:
        return f"{self._boot}-{self._number}"

    def close(self) -> None:
        """Every reader's stream ends, in order."""
        self._closed = True
        self._news.set()

    async def follow(self, last_event_id: str | None) -> AsyncGenerator[bytes]:
        """Chunks of an event stream, from just after `last_event_id` or from now on."""
        at, known = self._find(last_event_id)
        self.readers += 1
        try:
            yield b"retry: 1000\n\n"
            if not known:
                yield self._resync("the coordinator restarted, or too much has happened since")
            while not self._closed:
                if at == self._number:
                    self._news.clear()
                    try:
                        async with asyncio.timeout(KEEPALIVE_S):
                            await self._news.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
                        continue
                    await asyncio.sleep(COALESCE_S)  # One write for a burst, and the same bytes for everyone.
                if not self._entries or self._entries[0].number > at + 1:
                    at = self._number
                    yield self._resync("this reader was too slow")
                    continue
                chunk, at = self._chunk(at), self._number
                yield chunk
        finally:
            self.readers -= 1

    def _find(self, last_event_id: str | None) -> tuple[int, bool]:
        if not last_event_id:
            return self._number, True
        boot, _, number = last_event_id.rpartition("-")
        if boot != self._boot or not number.isdecimal() or int(number) > self._number:
            return self._number, False
        oldest = self._entries[0].number if self._entries else self._number + 1
        if int(number) + 1 < oldest:
            return self._number, False
        return int(number), True

    def _chunk(self, at: int) -> bytes:
        span = (at, self._number)
        if self._joined[0] != span:
            first = self._entries[0].number
            self._joined = (span, b"".join(e.body for e in list(self._entries)[at + 1 - first :]))
        return self._joined[1]

    def _resync(self, why: str) -> bytes:
        body = orjson.dumps(stream_events.Resync(reason=why))
        return b"id: %s\nevent: resync\ndata: %s\n\n" % (self.position.encode(), body)
