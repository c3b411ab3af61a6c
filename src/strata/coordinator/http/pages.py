"""Ready-made answers for the questions everybody asks all the time.

A page is serialized once and handed to every reader until it is old: at once when a durable batch changed
something, and otherwise after a moment, since heartbeats change soft state all the time. A page that is dear to
make is made for no more than a third of the time, however much happens; a reader that asks in between waits for the
next one, so none reads what was true before it asked. So two hundred browsers cost little more than one.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from strata.coordinator.engine import Engine
from strata.core.cluster import Cluster

SOFT_AGE_S = 0.25
REST = 3
"""How many times as long as it takes to make a page must pass until it is made anew."""

# Three times as fast as orjson on dataclasses.
_ENCODER = msgspec.json.Encoder()


@dataclass(slots=True, kw_only=True)
class Page:
    revision: int
    made_mono_s: float
    duration_s: float
    body: bytes
    _gzip: bytes | None = None

    @property
    def gzip(self) -> bytes:
        if self._gzip is None:
            packer = zlib.compressobj(1, zlib.DEFLATED, 31)
            self._gzip = packer.compress(self.body) + packer.flush()
        return self._gzip


class Pages:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._makers: dict[str, Callable[[Cluster], Any]] = {}
        self._pages: dict[str, Page] = {}

    def define(self, name: str, make: Callable[[Cluster], Any]) -> None:
        self._makers[name] = make

    async def get(self, name: str) -> Page:
        asked_s = time.monotonic()
        while True:
            cluster = await self._engine.settled()
            page, now_s = self._pages.get(name), time.monotonic()
            if page is None:
                break
            same = page.revision == self._engine.revision and now_s - page.made_mono_s <= SOFT_AGE_S
            if same or page.made_mono_s >= asked_s:
                return page
            rest_s = page.made_mono_s + REST * page.duration_s - now_s
            if rest_s <= 0:
                break
            await asyncio.sleep(rest_s)
        # Built and serialized in one go: nothing changes the state in between.
        body = _ENCODER.encode(self._makers[name](cluster))
        page = self._pages[name] = Page(
            revision=self._engine.revision, made_mono_s=now_s, duration_s=time.monotonic() - now_s, body=body
        )
        await asyncio.sleep(0)
        return page
