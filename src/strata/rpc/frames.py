"""What a worker and its machine's agent say to each other on a private Unix socket: frames of four bytes of length, and the message.

The first frame of each side is JSON: the worker says whose session this is and which coordinator it is for, the agent whether
it speaks for it. After that they are the messages of the coordinator's `Session` stream.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

SESSIONS_VARIABLE = "STRATA_SESSIONS"
"""To a worker: the path of its agent's socket for sessions."""
FRAME_LIMIT_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


def frame(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def json_frame(message: dict[str, Any]) -> bytes:
    return frame(json.dumps(message).encode())


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """None at the end. Raises `ConnectionError` where it is torn or too long."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > FRAME_LIMIT_BYTES:
            raise ConnectionError(f"a frame of {length:,} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as torn:
        if torn.partial:
            raise ConnectionError("the connection ended within a message") from None
        return None


async def read_json(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises `ConnectionError` where there is none."""
    raw = await read_frame(reader)
    try:
        found = json.loads(raw or b"")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConnectionError("the other end did not identify itself")
    return found
