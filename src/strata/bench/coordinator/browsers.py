"""Browsers watching the dashboard, reduced to what they cost the coordinator: requests and an event stream."""

from __future__ import annotations

import asyncio
import time

from strata.bench.coordinator.serving import HOST
from strata.errors import StrataError


class Browser:
    """One keep-alive connection for requests; `watch` opens a second one for events."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def get(self, path: str) -> bytes:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        self._writer.write(self._request(path))
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, *headers = head.decode("latin-1").lower().split("\r\n")
        length = next((line for line in headers if line.startswith("content-length:")), None)
        if " 200" not in status or length is None:
            raise StrataError(f"GET {path} answered: {status}")
        return await self._reader.readexactly(int(length.partition(":")[2]))

    async def watch(self) -> None:
        """Read the event stream until cancelled."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(self._request("/api/events"))
            while await reader.read(1 << 16):
                pass
            raise StrataError("The event stream ended.")
        finally:
            writer.close()

    async def poll(self, path: str, *, every_s: float, first_after_s: float, taken_s: list[float]) -> None:
        """Poll until cancelled; how long each answer took goes into `taken_s`."""
        await asyncio.sleep(first_after_s)
        while True:
            began_s = time.perf_counter()
            await self.get(path)
            taken_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(max(0.0, every_s - taken_s[-1]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _request(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nAccept-Encoding: gzip\r\n\r\n".encode()
