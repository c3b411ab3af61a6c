"""etcd through its v3 API: one request at a time over a kept connection, several endpoints, TLS, and a user's password.

Speaks to the JSON gateway that every member since etcd 3.4 serves on its client port, with the standard library alone. A
silent endpoint is passed over, and so is one that has lost its cluster: a request may therefore reach etcd twice, and a caller
that changes something sends its request such that the second time changes nothing.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

DEFAULT_PORT = 2379
DEFAULT_TIMEOUT_S = 2.0
FAILURES = (OSError, http.client.HTTPException, ValueError)  # ValueError: the answer was no JSON
STREAM_IDLE_S, STREAM_PROBE_S, STREAM_PROBES = 2, 1, 3
"""A stream on which nothing comes is probed by the kernel, and ends when the other machine does not answer that."""

UNAUTHENTICATED = 16
NO_SPACE = 8
OUT_OF_RANGE = 11
_ELSEWHERE = frozenset({1, 4, 13, 14})
"""Statuses of gRPC that another member, or the same one later, may not answer with: it has no leader, or is stopping."""


class EtcdRefused(ConnectionError):
    """etcd has answered, and the answer is no. Asking another member would not help."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class LeaseLost(Exception):
    """The lease ran out, or was revoked. No problem of the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where a cluster is, and as whom it is called."""

    endpoints: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints
        )


class EtcdClient:
    """Safe to use from several threads, which then wait for each other."""

    def __init__(self, address: EtcdAddress, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._endpoints = list(address.endpoints)
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._streams: set[http.client.HTTPConnection] = set()
        self._closed = False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask over the kept connection, if there is one, then each endpoint anew. Raises `EtcdRefused`, `LeaseLost`, and
        `ConnectionError` where no endpoint answers."""
        text = json.dumps(body)
        with self._lock:
            try:
                return self._try_endpoints(path, text)
            except EtcdRefused as refusal:
                if refusal.code != UNAUTHENTICATED or not self.address.user or not self._token:
                    raise
                self._token = ""  # It expired, or a member does not know it.
                return self._try_endpoints(path, text)

    def metrics(self) -> str:
        """What the member that is asked says about itself, as Prometheus reads it. Raises as `post`, and where it is served elsewhere."""
        with self._lock:
            connection = self._connect(*self._endpoints[0])
            try:
                connection.request("GET", "/metrics")
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
            finally:
                connection.close()
        if response.status != 200:
            raise ConnectionError(f"HTTP {response.status}")
        return text

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Every message of an answer that does not end by itself, from a connection of its own. Ends with an exception of
        `FAILURES`, at the latest when the client is closed."""
        with self._lock:
            connection, token = self._open_stream()
        try:
            response = self._send(connection, path, json.dumps(body), token)
            _probe_when_idle(connection.sock)
            connection.sock.settimeout(None)
            while True:
                line = response.readline()
                if not line:
                    raise ConnectionError("the stream has ended")
                message = json.loads(line)
                if "error" in message:
                    raise ConnectionError(str(message["error"])[:200])
                yield message["result"]
        finally:
            self._streams.discard(connection)
            connection.close()

    def try_another_endpoint(self) -> None:
        """The next request goes to the next endpoint."""
        with self._lock:
            self._disconnect()
            self._rotate()

    def end_streams(self) -> None:
        for connection in list(self._streams):
            _shut(connection)

    def abort(self) -> None:
        """Whatever waits for an answer fails now, and so does whatever is asked from now on."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            _shut(connection)

    def close(self) -> None:
        self.abort()
        self.end_streams()
        with self._lock:
            self._disconnect()

    def _try_endpoints(self, path: str, text: str) -> dict[str, Any]:
        if self._connection is not None:
            try:
                return self._ask(self._connection, path, text)
            except EtcdRefused:
                raise
            except FAILURES:
                self._disconnect()  # The server may have closed it while idle, which shows only in use.
        problems = []
        for _ in self._endpoints:
            if self._closed:
                raise ConnectionError("the client is closed")
            host, port = self._endpoints[0]
            try:
                self._connection = self._connect(host, port)
                return self._ask(self._connection, path, text)
            except EtcdRefused:
                raise
            except FAILURES as error:
                problems.append(f"{host}:{port}: {str(error) or type(error).__name__}")
                self._disconnect()
                self._rotate()
        raise ConnectionError("; ".join(problems))

    def _rotate(self) -> None:
        self._endpoints = [*self._endpoints[1:], self._endpoints[0]]

    def _open_stream(self) -> tuple[http.client.HTTPConnection, str]:
        if self._closed:
            raise ConnectionError("the client is closed")
        connection = self._connect(*self._endpoints[0])
        try:
            connection.connect()
            token = self._authenticated(connection)
        except BaseException:
            connection.close()
            self._rotate()
            raise
        self._streams.add(connection)
        return connection, token

    def _connect(self, host: str, port: int) -> http.client.HTTPConnection:
        if self.address.tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self.address.tls)

    def _ask(self, connection: http.client.HTTPConnection, path: str, body: str) -> dict[str, Any]:
        data = self._send(connection, path, body, self._authenticated(connection)).read()
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _authenticated(self, connection: http.client.HTTPConnection) -> str:
        if self.address.user and not self._token:
            body = json.dumps({"name": self.address.user, "password": self.address.password})
            answer = json.loads(self._send(connection, "auth/authenticate", body, "").read())
            self._token = str(answer["token"])
        return self._token

    @staticmethod
    def _send(
        connection: http.client.HTTPConnection, path: str, body: str, token: str
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        connection.request("POST", f"/v3/{path}", body, headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        text = response.read().decode(errors="replace").strip()
        code = 0
        with suppress(ValueError, AttributeError):
            found = json.loads(text)
            code, text = int(found.get("code", 0)), str(found.get("error") or found.get("message") or text)
        if "lease not found" in text:
            raise LeaseLost
        if response.status == 404:
            raise ConnectionError("this server has no etcd v3 JSON gateway (etcd 3.4 or later is needed)")
        if "invalid auth token" in text:
            raise EtcdRefused(UNAUTHENTICATED, text[:200])
        if code and code not in _ELSEWHERE:
            raise EtcdRefused(code, text[:200])
        raise ConnectionError(f"HTTP {response.status} {text[:200]}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _shut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):  # Not connected yet, or any more.
        connection.sock.shutdown(socket.SHUT_RDWR)


def encode(key: str | bytes) -> str:
    """Keys and values as the gateway writes them."""
    return b64encode(key.encode() if isinstance(key, str) else key).decode()


def decode(text: str) -> bytes:
    return b64decode(text)


def tls_context(ca: str | None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Raises `OSError` for files that cannot be used."""
    context = ssl.create_default_context(cafile=ca)
    if cert:
        context.load_cert_chain(cert, key)
    return context


def _probe_when_idle(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", STREAM_IDLE_S),
        ("TCP_KEEPINTVL", STREAM_PROBE_S),
        ("TCP_KEEPCNT", STREAM_PROBES),
    ):
        option = getattr(socket, name, None)  # Not on every system.
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
