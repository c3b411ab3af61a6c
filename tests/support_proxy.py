"""A TCP proxy that misbehaves on request: latency, bytes that trickle, resets, connections that are there but silent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Link = tuple[asyncio.StreamWriter, asyncio.StreamWriter]
CHUNK_BYTES = 65_536
TRICKLE_S = 0.001


class Proxy:
    """Forwards `host`:`port` to 127.0.0.1:`target_port`. Use as a context manager."""

    def __init__(self, target_port: int, *, host: str = "127.0.0.1") -> None:
        self.target_port = target_port
        self.host = host
        self.port = 0
        self.latency_s = 0.0
        self.refusing = False
        """New connections are closed at once."""
        self.swallows: frozenset[str] = frozenset()
        """`asked`: what clients say does not get through; `answered`: what they are answered. Connections stay open."""
        self.trickle_bytes = 0
        """If given, what comes is passed on in pieces of this size, with a pause after each."""
        self.reset_after_bytes = 0
        """If given, a connection is reset once so much has passed through it, in the middle of whatever is being said."""
        self.resets_s: list[float] = []
        self.accepted_s: list[float] = []
        """When connections were reset, and accepted, by the machine's monotonic clock."""
        self._links: set[Link] = set()
        self._stalled: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def cut(self) -> int:
        """Reset every connection; how many there were. New ones are accepted, unless `refusing`."""
        return self._run(self._cut())

    def stall(self) -> None:
        """Half-open: the connections there are stay open, and nothing gets through them. New ones work."""
        self._run(self._stall())

    # --- on the proxy's own loop ----------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stall(self) -> None:
        self._stalled |= self._links

    async def _cut(self) -> int:
        links, self._links = self._links, set()
        for pair in links:
            for writer in pair:
                writer.transport.abort()
        return len(links)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        link = (writer, far_writer)
        self._links.add(link)
        self.accepted_s.append(time.monotonic())
        try:
            await asyncio.gather(
                self._pump(link, reader, far_writer, "asked"),
                self._pump(link, far_reader, writer, "answered"),
            )
        except asyncio.CancelledError:
            pass  # The proxy is closing; a task that ends as cancelled would be reported as an error.
        finally:
            self._links.discard(link)
            self._stalled.discard(link)
            for end in link:
                end.transport.abort()

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        passed_bytes = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(self.trickle_bytes or CHUNK_BYTES):
                if self.latency_s or self.trickle_bytes:
                    await asyncio.sleep(self.latency_s or TRICKLE_S)
                passed_bytes += len(data)
                if self.reset_after_bytes and passed_bytes > self.reset_after_bytes:
                    self.resets_s.append(time.monotonic())
                    for end in link:
                        end.transport.abort()
                    return
                if link not in self._stalled and way not in self.swallows:
                    writer.write(data)
                    await writer.drain()
        if link not in self._stalled:
            writer.transport.abort()
