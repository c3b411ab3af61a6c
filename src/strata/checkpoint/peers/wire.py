"""How agents and workers speak: messages of JSON with a length before them, and plain bytes between; nothing is unpickled.

Beyond this machine both ends prove that they know the run's secret, which agents find where they meet, before anything else is
said. Within it (a Unix socket) the kernel says whose process is at the other end. What is sent is neither encrypted nor signed, as what
ranks send each other is not: the network of a job is trusted with its contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from strata.errors import StrataError

Message = dict[str, Any]

PROTOCOL = "strata-peers/1"
LONGEST_MESSAGE = 16 << 20
LONGEST_MANIFEST = 256 << 20
CONNECT_S = 2.0
STILL_S = 10.0
"""A connection on which nothing moves for so long is given up."""
PIECE_BYTES = 1 << 20
NICE = 10
"""How far threads that send and take copies stand behind training."""
_LENGTH = struct.Struct(">I")
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


class PeerError(StrataError):
    """Another machine's agent could not do what was asked."""

    code = "peer_failed"

    def __init__(self, message: str, *, is_lost: bool = True, is_stale: bool = False) -> None:
        super().__init__(message)
        self.is_lost = is_lost
        """It did not answer; else it has, and refused."""
        self.is_stale = is_stale


def parse_bytes(text: str) -> int:
    """`2GB`, `512MiB`, `1.5e9`. Raises `ValueError`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"'{text}' is not a size: write it like 512MB, 2GB or 64GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def parse_rate(text: str) -> int:
    """`2GB/s`, in bytes a second. Raises `ValueError`."""
    number, slash, unit = text.partition("/")
    if slash and unit.strip() not in ("s", "sec", "second"):
        raise ValueError(f"'{text}' is not a rate: write it like 500MB/s or 2GB/s")
    return parse_bytes(number)


def send(connection: socket.socket, message: Message, payload: bytes = b"") -> None:
    data = json.dumps(message).encode()
    if len(data) > LONGEST_MESSAGE:
        raise PeerError(f"A message of {len(data):,} bytes is too long.", is_lost=False)
    connection.sendall(_LENGTH.pack(len(data)) + data)
    if payload:
        connection.sendall(payload)


def receive(connection: socket.socket) -> Message:
    """Raises `ConnectionError` where the other end was lost, and `PeerError` for what is no message."""
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    if length > LONGEST_MESSAGE:
        raise PeerError(f"A message of {length:,} bytes is too long.")
    try:
        found = json.loads(bytes(receive_bytes(connection, length)))
    except (ValueError, RecursionError) as error:
        raise PeerError("The received data is not a message.") from error
    if not isinstance(found, dict):
        raise PeerError("The received data is not a message.")
    return found


def receive_bytes(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    receive_into(connection, memoryview(data))
    return data


def receive_into(
    connection: socket.socket, view: memoryview, taken: Callable[[memoryview], None] | None = None
) -> None:
    """Fill `view`; `taken` gets each piece while it is still in the processor's cache."""
    done = 0
    while done < len(view):
        try:
            # All of a piece at once: who is woken for every packet takes the processor from others.
            count = connection.recv_into(view[done : done + PIECE_BYTES], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError(f"nothing arrived for {STILL_S:g} s") from None
        if not count:
            raise ConnectionError("the connection has ended")
        if taken is not None:
            taken(view[done : done + count])
        done += count


def connect(address: str, secret: str) -> socket.socket:
    """To another machine's agent. Raises `OSError` and `PeerError`."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    try:
        hello = receive(connection)
        if hello.get("protocol") != PROTOCOL:
            raise PeerError(f"{address} speaks another protocol: {str(hello.get('protocol'))[:80]}.")
        mine = secrets.token_hex(16)
        send(connection, {"nonce": mine, "proof": _proof(secret, "caller", hello.get("nonce"), mine)})
        answer = receive(connection)
        if not _is_equal(answer.get("proof"), _proof(secret, "agent", hello.get("nonce"), mine)):
            raise PeerError(f"{address} does not know the secret of this run.", is_lost=False)
        tune(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, secret: str) -> bool:
    """The agent's end: whether the caller knows the secret."""
    connection.settimeout(CONNECT_S)
    nonce = secrets.token_hex(16)
    send(connection, {"protocol": PROTOCOL, "nonce": nonce})
    answer = receive(connection)
    theirs = answer.get("nonce")
    if not isinstance(theirs, str) or not _is_equal(
        answer.get("proof"), _proof(secret, "caller", nonce, theirs)
    ):
        return False
    send(connection, {"proof": _proof(secret, "agent", nonce, theirs)})
    tune(connection)
    return True


def send_file(connection: socket.socket, file: int, offset: int, length: int) -> int:
    """Send a part of a file, without a copy of it; how many bytes, which are fewer where the file is shorter."""
    sent = 0
    while sent < length:
        try:
            count = os.sendfile(connection.fileno(), file, offset + sent, length - sent)
        except BlockingIOError:
            raise TimeoutError(f"nothing was accepted for {STILL_S:g} s") from None
        if not count:
            break
        sent += count
    return sent


def tune(connection: socket.socket) -> None:
    """The kernel keeps the time: a call that blocks is cheaper than one that is asked for again and again."""
    connection.settimeout(None)
    patience = struct.pack("ll", int(STILL_S), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def ask(connection: socket.socket, message: Message, payload: bytes = b"") -> Message:
    """One question and its answer. Raises `PeerError` for a refusal, `OSError` where no answer comes."""
    send(connection, message, payload)
    return checked(receive(connection))


def checked(answer: Message) -> Message:
    if not answer.get("ok"):
        reason = str(answer.get("reason", "it was refused without a reason"))[:500]
        raise PeerError(reason, is_lost=False, is_stale=bool(answer.get("is_stale")))
    return answer


def yield_to_training() -> None:
    """This thread takes the processor when nothing else wants it."""
    if NICE:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _proof(secret: str, end: str, *nonces: object) -> str:
    text = " ".join([PROTOCOL, end, *map(str, nonces)])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def _is_equal(found: object, wanted: str) -> bool:
    return isinstance(found, str) and hmac.compare_digest(found.encode(), wanted.encode())
