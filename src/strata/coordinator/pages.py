"""Ready-made answers for the questions everybody asks all the time.

A page is serialized once and handed to every reader until it is old: at once when a durable batch changed
something, and otherwise after a moment, since heartbeats change soft state all the time. So two hundred
browsers cost little more than one.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from strata.coordinator.engine import Engine
from strata.core.cluster import Cluster

SOFT_AGE_S = 0.25


@dataclass(slots=True)
class Page:
    revision: int
    made_mono_s: float
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
        cluster = await self._engine.settled()
        page = self._pages.get(name)
        now_s = time.monotonic()
        if page is None or page.revision != self._engine.revision or now_s - page.made_mono_s > SOFT_AGE_S:
            # Built and serialized in one go: nothing changes the state in between.
            body = orjson.dumps(self._makers[name](cluster), option=orjson.OPT_SERIALIZE_NUMPY)
            page = self._pages[name] = Page(self._engine.revision, now_s, body)
            await asyncio.sleep(0)
        return page
