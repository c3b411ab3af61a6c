"""One HTTP connection, with limits that hold before there is a request to refuse.

How many connections there may be, altogether and of one client, how long and how large a request's head may be; whatever is wrong with a
request that never reaches the application is answered like every other error: JSON with a code, a message and a
hint. Uvicorn's protocol does the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from strata.coordinator.auth.gatekeeper import Certificate, Connection
from strata.coordinator.auth.peers import Address, PeerOwners

HEAD_LIMIT_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 15.0


class HttpConnection(HttpToolsProtocol):
    owners: PeerOwners
    """Given by `serving`: who owns the other end of a loopback connection."""
    per_client: Counter[str]
    most_per_client: int

    @classmethod
    def serving(cls, owners: PeerOwners, *, most_per_client: int) -> type[HttpConnection]:
        """A protocol for one server."""
        about = {"owners": owners, "per_client": Counter(), "most_per_client": most_per_client}
        return type("HttpConnection", (cls,), about)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection: Connection | None = None
        self._client = ""
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._head_bytes = 0
        self._reading_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        self._connection = Connection(
            self.client, cast("Address | None", self.server), self.owners, _certificate(transport)
        )
        self._client = self._connection.client
        self.per_client[self._client] += 1
        if self.per_client[self._client] > self.most_per_client:
            self._refuse(
                503,
                "overloaded",
                f"This client has {self.most_per_client:,} connections already, which is the limit.",
                "Close some, or raise max_connections_per_client.",
            )
        elif self._most is not None and len(self.connections) > self._most:
            self._refuse(
                503,
                "overloaded",
                f"There are {self._most:,} connections already, which is the limit.",
                "Close some, try again later, or raise max_connections.",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._client:
            self.per_client[self._client] -= 1
            if not self.per_client[self._client]:
                del self.per_client[self._client]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._reading_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reading_head and self._head_bytes > HEAD_LIMIT_BYTES and not self._refused:
            self._refuse(
                431,
                "too_large",
                f"The request's head is larger than {HEAD_LIMIT_BYTES // 1024} KiB.",
                "Send a shorter address and fewer headers.",
            )

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()
        self.scope["strata.connection"] = self._connection  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "malformed", "This is not a valid HTTP/1.1 request.", "GET /docs lists every call.")

    def _begin_head(self) -> None:
        if not self._reading_head or self._head_timer is None:
            self._reading_head = True
            self._head_bytes = 0
            self._end_timer()
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _end_head(self) -> None:
        self._reading_head = False
        self._end_timer()

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._refuse(
            408,
            "too_slow",
            f"The request's head did not arrive within {HEAD_TIMEOUT_S:.0f} s.",
            "Send it in one piece.",
        )

    def _refuse(self, status: int, code: str, message: str, hint: str) -> None:
        self._refused = True
        self._end_timer()
        if self.transport.is_closing():
            return
        body = orjson.dumps({"code": code, "message": message, "hint": hint, "details": []})
        self.transport.write(
            b"%scontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (STATUS_LINE[status], len(body), body)
        )
        self.transport.close()


def _certificate(transport: asyncio.Transport) -> Certificate | None:
    """The client's, where TLS asked for one and verified it."""
    tls = transport.get_extra_info("ssl_object")
    found = tls.getpeercert() if tls is not None else None
    if not found:
        return None
    fields = [field for group in found.get("subject", ()) for field in group]
    common = next((value for key, value in fields if key == "commonName"), "")
    return Certificate(
        common_name=common, units=tuple(value for key, value in fields if key == "organizationalUnitName")
    )
