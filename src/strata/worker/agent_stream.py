"""A worker's session by way of its machine's agent: the same messages as on a stream of its own, over a private Unix socket.

Where there is no agent, or it does not speak for this coordinator, `open` says so and the worker opens a stream of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Any

import grpc.aio

from strata.rpc import coordinator_pb2 as pb
from strata.rpc.frames import frame, json_frame, read_frame, read_json
from strata.rpc.tls import VARIABLES as TLS_VARIABLES
from strata.sockets import connect_to_path
from strata.worker.errors import CoordinatorUnavailable

log = logging.getLogger("strata.worker.session")

OPEN_S = 60.0
"""How long an agent may take to reach a coordinator; a worker that has waited so long tries it itself."""


class AgentStream:
    """As much of a gRPC stream as a session uses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(
        cls,
        path: str,
        *,
        address: str,
        token: str,
        secure: bool,
        several: bool,
        worker_id: str,
        incarnation: int,
    ) -> AgentStream | None:
        """None where the worker is to speak for itself. Raises `CoordinatorUnavailable` where no coordinator answers at the address."""
        try:
            connection = connect_to_path(path)
        except OSError as error:
            log.debug("no agent at %s: %s", path, error)
            return None
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            writer.write(
                json_frame(
                    {
                        "address": address,
                        "token": token,
                        "secure": secure,
                        "several": several,
                        "tls": [os.environ.get(name, "") for name in TLS_VARIABLES],
                        "worker_id": worker_id,
                        "incarnation": incarnation,
                    }
                )
            )
            async with asyncio.timeout(OPEN_S):
                answer = await read_json(reader)
        except (OSError, TimeoutError) as error:
            log.debug("the agent at %s does not speak for this worker: %r", path, error)
            writer.transport.abort()
            return None
        except BaseException:
            writer.transport.abort()
            raise
        if answer.get("open"):
            return cls(reader, writer)
        writer.transport.abort()
        why = str(answer.get("why", ""))
        if answer.get("direct"):
            log.debug("this worker opens its own session: %s", why)
            return None
        away = CoordinatorUnavailable(address, why)
        away.leader = str(answer.get("leader", ""))
        raise away

    async def write(self, message: pb.WorkerMessage) -> None:
        self._writer.write(frame(message.SerializeToString()))
        try:
            await self._writer.drain()
        except OSError:
            raise asyncio.InvalidStateError("the agent has ended this session") from None

    async def read(self) -> Any:
        with suppress(OSError):
            message = await read_frame(self._reader)
            if message is not None:
                return pb.CoordinatorMessage.FromString(message)
        return grpc.aio.EOF  # type: ignore[attr-defined]

    def cancel(self) -> None:
        self._writer.transport.abort()
