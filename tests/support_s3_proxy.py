"""An HTTP proxy between a client and a real server that spoils chosen exchanges.

    with s3_proxy(server.endpoint) as proxy:
        proxy.spoil(LoseReply(), when=lambda request: request.method == "PUT", times=1)
        store = open_store("s3://bucket", **server.options(endpoint=proxy.endpoint))

Requests that no rule matches pass through unchanged. `proxy.seen` lists all of them, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer at once with this status, and do not ask the server."""

    status: int
    code: str = "InternalError"
    message: str = "injected"


@dataclass(frozen=True, slots=True)
class Hang:
    """Take the request and never answer; the server does not hear of it."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Close the connection without asking the server."""


@dataclass(frozen=True, slots=True)
class LoseReply:
    """Let the server do it, then close the connection instead of passing its answer on."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """Pass the server's answer on, but close the connection after so many bytes of its body."""

    after_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Ask the server only once `release` is set."""

    release: threading.Event


Spoil = Answer | Hang | Reset | LoseReply | CutBody | Hold


@dataclass(slots=True)
class _Rule:
    spoil: Spoil
    when: Callable[[Request], bool]
    times: int | None


class S3Proxy:
    """Rules are tried in the order they were given; the first that matches and is not used up applies."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.seen: list[Request] = []
        self.spoilt: list[Request] = []
        self.endpoint = ""
        self.connections: set[asyncio.Task[None]] = set()

    def spoil(
        self,
        spoil: Spoil,
        *,
        when: Callable[[Request], bool] = lambda request: True,
        times: int | None = None,
    ) -> None:
        """Spoil the next `times` requests (None: all) that `when` picks."""
        with self._lock:
            self._rules.append(_Rule(spoil, when, times))

    def heal(self) -> None:
        """Forget all rules."""
        with self._lock:
            self._rules.clear()

    def _verdict(self, request: Request) -> Spoil | None:
        with self._lock:
            self.seen.append(request)
            for rule in self._rules:
                if rule.times != 0 and rule.when(request):
                    if rule.times is not None:
                        rule.times -= 1
                    self.spoilt.append(request)
                    return rule.spoil
        return None

    async def serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        server_side: asyncio.StreamWriter | None = None
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)  # asyncio itself holds on to it only weakly.
        try:
            server, server_side = await asyncio.open_connection(*self._upstream)
            while await self._exchange(client, answers, server, server_side):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # The proxy is closing; asyncio would report a cancelled connection as an error.
        finally:
            self.connections.discard(task)
            answers.close()
            if server_side is not None:
                server_side.close()

    async def _exchange(
        self,
        client: asyncio.StreamReader,
        answers: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        server_side: asyncio.StreamWriter,
    ) -> bool:
        """One request and its answer; False when the connection is to be closed."""
        head = await _head(client)
        if head is None:
            return False
        first, headers = _parse(head)
        method, path, _ = first.split(" ", 2)
        request = Request(method=method, path=path, headers=headers)
        spoil = self._verdict(request)
        if isinstance(spoil, Reset):
            return False
        if isinstance(spoil, Hold):
            await asyncio.to_thread(spoil.release.wait, 60)
        passed_on = spoil is None or isinstance(spoil, LoseReply | CutBody | Hold)
        if passed_on:
            server_side.write(head)
        if headers.get("expect", "").lower() == "100-continue":
            answers.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await _copy_body(client, server_side if passed_on else None, int(headers.get("content-length", 0)))
        if isinstance(spoil, Hang):
            await client.read()  # Until the client gives up.
            return False
        if isinstance(spoil, Answer):
            body = f"<Error><Code>{spoil.code}</Code><Message>{spoil.message}</Message></Error>".encode()
            body = b"" if method == "HEAD" else body
            reply = f"HTTP/1.1 {spoil.status} Injected\r\ncontent-type: application/xml\r\n"
            answers.write(f"{reply}content-length: {len(body)}\r\n\r\n".encode() + body)
            await answers.drain()
            return True
        return await self._pass_answer(request, spoil, answers, server)

    async def _pass_answer(
        self,
        request: Request,
        spoil: Spoil | None,
        answers: asyncio.StreamWriter,
        server: asyncio.StreamReader,
    ) -> bool:
        head = await _head(server)
        if head is None:
            return False
        first, headers = _parse(head)
        status = int(first.split(" ", 2)[1])
        bodyless = request.method == "HEAD" or status in (204, 304) or status < 200
        size_bytes = 0 if bodyless else int(headers.get("content-length", 0))
        lost = isinstance(spoil, LoseReply)
        if not lost:
            answers.write(head)
        if isinstance(spoil, CutBody):
            await _copy_body(server, answers, min(spoil.after_bytes, size_bytes))
            return False
        if not bodyless and headers.get("transfer-encoding", "").lower() == "chunked":
            await _copy_chunks(server, None if lost else answers)
        else:
            await _copy_body(server, None if lost else answers, size_bytes)
        return not lost


@contextlib.contextmanager
def s3_proxy(upstream: str) -> Iterator[S3Proxy]:
    """Run a proxy to `upstream` (http://host:port) on a free loopback port, on a thread of its own."""
    proxy = S3Proxy(upstream)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
        proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        connections = list(proxy.connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def on_thread() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=on_thread, name="s3-proxy")
    thread.start()
    try:
        assert started.wait(60)
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


async def _head(reader: asyncio.StreamReader) -> bytes | None:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return first, headers


async def _copy_body(
    source: asyncio.StreamReader, target: asyncio.StreamWriter | None, size_bytes: int
) -> None:
    while size_bytes:
        data = await source.read(min(size_bytes, _READ_BYTES))
        if not data:
            raise OSError("the other side went away")
        size_bytes -= len(data)
        if target is not None:
            target.write(data)
            await target.drain()
    if target is not None:
        await target.drain()


async def _copy_chunks(source: asyncio.StreamReader, target: asyncio.StreamWriter | None) -> None:
    while True:
        line = await source.readuntil(b"\r\n")
        if target is not None:
            target.write(line)
        size_bytes = int(line.partition(b";")[0], 16)
        await _copy_body(source, target, size_bytes + 2)
        if size_bytes == 0:
            return
