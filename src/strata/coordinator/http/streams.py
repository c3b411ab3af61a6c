"""Streams that have no end: how many there may be, altogether and of one client, and when they end after all.

A place is taken before the answer begins, so that one too many is refused like any other call, and is free again when the
answer has ended, however it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from strata.coordinator.auth.gatekeeper import Connection, Gatekeeper
from strata.coordinator.auth.principals import Principal
from strata.core.messages import Overloaded


class StreamSlots:
    def __init__(self, what: str, *, most: int, most_per_client: int, instead: str) -> None:
        """`instead`: what to do without such a stream."""
        self._what = what
        self._most = most
        self._most_per_client = most_per_client
        self._instead = instead
        self._taken: Counter[str] = Counter()

    def respond(
        self,
        chunks: AsyncGenerator[bytes],
        request: Request,
        gatekeeper: Gatekeeper,
        principal: Principal,
    ) -> StreamingResponse:
        """An event stream of `chunks`, until the credential it was opened with ends. Raises `Overloaded`."""
        connection: Connection = request.state.connection
        # Behind a proxy all have one address, and a shared token one name.
        client = f"{connection.client} {principal.name}"
        if self._taken[client] >= self._most_per_client:
            raise self._refusal(f"This client has {self._most_per_client:,} readers of {self._what} already")
        if self._taken.total() >= self._most:
            raise self._refusal(f"There are {self._most:,} readers of {self._what} already")
        return _Held(_while_allowed(chunks, gatekeeper, principal), self._taken, client)

    def _refusal(self, fact: str) -> Overloaded:
        return Overloaded(f"{fact}, which is the limit.", hint=f"Close one, or {self._instead}.")


class _Held(StreamingResponse):
    def __init__(self, chunks: AsyncIterator[bytes], taken: Counter[str], client: str) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._taken = taken
        self._client = client
        taken[client] += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._taken[self._client] -= 1
            if not self._taken[self._client]:
                del self._taken[self._client]


async def _while_allowed(
    chunks: AsyncGenerator[bytes], gatekeeper: Gatekeeper, principal: Principal
) -> AsyncIterator[bytes]:
    async with aclosing(chunks):
        async for chunk in chunks:
            if not gatekeeper.still_counts(principal):
                return
            yield chunk
