"""Many gRPC clients in one process, cheap enough to share two cores with what they measure.

Speaks just enough HTTP/2 over asyncio: requests out, gRPC messages in, flow control kept in both directions,
pings answered. A stock gRPC client costs as much per message as the coordinator itself, so two cores would
measure the client; this one costs a few microseconds. It reads no response headers: a call that ended without
an answer has failed, and why is for a real client to find out.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Callable

SERVICE = "/strata.v1.Coordinator/"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 4
_LARGEST_WINDOW = 2**31 - 1
_FRAME_LIMIT = 16_384
_LEGIBLE = re.compile(rb"[ -~]{5,}")


class CallFailed(Exception):
    """A call or its connection ended without the answer that was waited for."""


def framed(message: bytes) -> bytes:
    """A message as gRPC puts it on a stream."""
    return struct.pack(">BI", 0, len(message)) + message


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: bytes) -> bytes:
    assert len(value) < 127, "longer texts need another encoding"
    return bytes([len(value)]) + value


def _request_headers(path: str) -> bytes:
    """HPACK without compression: indices of the static table, and literals that enter no other table."""
    return (
        b"\x83\x86"  # :method POST, :scheme http
        + (b"\x04" + _text(path.encode()) + b"\x01" + _text(b"localhost"))
        + (b"\x0f\x10" + _text(b"application/grpc"))
        + (b"\x00" + _text(b"te") + _text(b"trailers"))
    )


class Stream:
    """One call. `on_message` is called with every message, `on_end` when there will be no more."""

    __slots__ = (
        "_connection",
        "_inbox",
        "_unsent",
        "ended_with",
        "ends",
        "id",
        "on_end",
        "on_message",
        "window_bytes",
    )

    def __init__(self, connection: Connection, stream_id: int, window_bytes: int) -> None:
        self.id = stream_id
        self.window_bytes = window_bytes
        self.on_message: Callable[[bytes], None] = lambda message: None
        self.on_end: Callable[[], None] = lambda: None
        self.ends = False
        self.ended_with = ""
        """What can be read of the other side's last words."""
        self._connection = connection
        self._inbox = b""
        self._unsent = b""

    def send(self, messages: bytes, *, end: bool = False) -> None:
        """Framed messages, sent as far as the other side's window allows, the rest when it opens."""
        self.ends = end
        self._unsent += messages
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            credit_bytes = min(self.window_bytes, self._connection.window_bytes, _FRAME_LIMIT)
            if credit_bytes <= 0:
                self._connection.blocked[self.id] = self
                return
            piece, self._unsent = self._unsent[:credit_bytes], self._unsent[credit_bytes:]
            self.window_bytes -= len(piece)
            self._connection.window_bytes -= len(piece)
            flags = _END_STREAM if self.ends and not self._unsent else 0
            self._connection.write(_frame(_DATA, flags, self.id, piece))

    def received(self, data: bytes) -> None:
        data = self._inbox + data if self._inbox else data
        at = 0
        while len(data) - at >= 5:
            (length,) = struct.unpack_from(">I", data, at + 1)
            if len(data) - at < 5 + length:
                break
            self.on_message(data[at + 5 : at + 5 + length])
            at += 5 + length
        self._inbox = data[at:]


class Connection(asyncio.Protocol):
    """One HTTP/2 connection with any number of calls on it."""

    def __init__(self) -> None:
        self.window_bytes = 65_535
        self.blocked: dict[int, Stream] = {}
        self.closed = ""
        self._stream_window_bytes = 65_535
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._inbox = b""
        self._outbox: list[bytes] = []

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def call(self, method: str) -> Stream:
        if self.closed:
            raise CallFailed(self.closed)
        stream = Stream(self, self._next_id, self._stream_window_bytes)
        self._next_id += 2
        self._streams[stream.id] = stream
        self.write(_frame(_HEADERS, _END_HEADERS, stream.id, _request_headers(SERVICE + method)))
        return stream

    async def unary(self, method: str, request: bytes) -> bytes:
        stream = self.call(method)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        messages: list[bytes] = []

        def end() -> None:
            if answer.done():
                return
            if messages:
                answer.set_result(messages[0])
            else:
                said = stream.ended_with or self.closed
                answer.set_exception(CallFailed(f"{method} was refused: {said}"))

        stream.on_message, stream.on_end = messages.append, end
        stream.send(framed(request), end=True)
        return await answer

    def write(self, data: bytes) -> None:
        """What is written in one turn of the event loop leaves in one system call."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(data)

    def close(self) -> None:
        self._transport.close()

    def abort(self) -> None:
        """As when its process is killed: nothing more is sent, and nothing said."""
        self._transport.abort()

    # --- asyncio.Protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        largest = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        self.write(_PREFACE + _frame(_SETTINGS, 0, 0, largest))
        self.write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - 65_535)))

    def data_received(self, data: bytes) -> None:
        data = self._inbox + data if self._inbox else data
        at = 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at < 9 + length:
                break
            kind, flags, stream = struct.unpack_from(">BBI", data, at + 3)
            self._take(kind, flags, stream, data[at + 9 : at + 9 + length])
            at += 9 + length
        self._inbox = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = f"The connection was lost: {error or 'closed'}."
        for stream in list(self._streams.values()):
            self._end(stream)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._outbox))
        self._outbox.clear()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self._streams.get(stream_id)
        if kind == _DATA and stream is not None:
            stream.received(payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
            self.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream is not None:
                stream.window_bytes += more
            elif stream_id == 0:
                self.window_bytes += more
            self._unblock()
        elif kind == _GOAWAY:
            self.closed = f"The server closed the connection: {payload[8:].decode(errors='replace')}."
        ended = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        if ended and stream is not None:
            if kind == _RST_STREAM:
                stream.ended_with = f"reset with {int.from_bytes(payload, 'big')}"
            elif kind == _HEADERS:  # Not decoded: names and short values are legible as they are.
                stream.ended_with = " ".join(text.decode() for text in _LEGIBLE.findall(payload))
            self._end(stream)

    def _take_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.window_bytes += value - self._stream_window_bytes
                self._stream_window_bytes = value
        self._unblock()

    def _unblock(self) -> None:
        blocked, self.blocked = self.blocked, {}
        for stream in blocked.values():
            stream.flush()

    def _end(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self.blocked.pop(stream.id, None)
        stream.on_end()
