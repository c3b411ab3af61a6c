"""What an agent and its workers say to each other while workers recover without a restart: lines of JSON on a Unix socket.

The agent listens in a private folder of its own; a worker connects when it comes to a recoverable function. Both ends have a thread
that reads, so a worker that is stuck in a collective learns that its generation is over, and an agent that waits for other
machines still answers.

| from a worker | |
|---|---|
| `arrived` | it is at a recoverable function: who, and with which limits |
| `left` | it has left its generation, or is about to: the error, if any, and whether that is its own |
| `finished` | the function has returned |
| `withdrew` | the process is about to end, as it was asked to |
| `stepped` | the first step of its generation |
| `attached` | a job has started: whether its state is sharded |
| `may_rescue` | it has a complete state: should it save it? Answered by `rescue` |

| from the agent | |
|---|---|
| `leave` | the generation is over: the reason |
| `enter` | the next one: what torch's variables are in it; for a spare also the files that its output goes to |
| `end` | end with the error that was reported |
| `release` | the function has returned everywhere |

A process that connects must belong to this user or root. Needs no torch.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from strata.sockets import connect_to_path, is_own_peer, listen_privately

log = logging.getLogger("strata.rendezvous")

AGENT_VARIABLE = "STRATA_AGENT"
"""To a worker: the path of its agent's socket."""
SLOT_VARIABLE = "STRATA_SLOT"
"""To a worker: which of its agent's workers it is, whatever its rank. To a spare: a number beyond theirs."""
ENTRANCE_VARIABLE = "STRATA_ENTRANCE"
"""To a worker: `wait` for a replacement, which enters when it is let in; `spare` for one that does not know yet in whose place."""
KEEPS_IMAGES_VARIABLE = "STRATA_KEEPS_IMAGES"
"""To a worker that has entered again: `1` for the first of its machine, `0` for the others."""

Message = dict[str, Any]
DROPPED = "dropped"
"""What the agent's end says of a worker whose connection has ended."""
LONGEST_LINE = 1 << 20


class AgentChannel:
    """The agent's end. `handle` is called with each message, in a thread of its own, and may return an answer."""

    def __init__(self, path: Path, handle: Callable[[int, Message], Message | None]) -> None:
        """Raises `OSError` where the socket cannot be made."""
        self.path = path
        self._handle = handle
        self._lock = threading.Lock()
        self._workers: dict[int, socket.socket] = {}
        self._unread: dict[socket.socket, bytes] = {}
        self._slots: dict[socket.socket, int] = {}
        path.unlink(missing_ok=True)  # Of a dead process that had this number.
        self._listener = listen_privately(path)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._read, name="strata-channel", daemon=True)
        self._thread.start()

    @property
    def news(self) -> int:
        """A descriptor that can be read from when something was received since `taken`."""
        return self._woken

    def taken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def send(self, slot: int, message: Message) -> None:
        """To one worker; one that is lost receives nothing, and its end is noticed otherwise."""
        with self._lock:
            connection = self._workers.get(slot)
        if connection is not None:
            with suppress(OSError):
                connection.sendall(_line(message))

    def close(self) -> None:
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        for connection in [*self._unread, self._listener]:
            connection.close()
        os.close(self._woken)
        os.close(self._closing)
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._closing, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj == self._closing:
                        return
                    if key.fileobj is self._listener:
                        self._accept(ready)
                    elif not self._receive(key.fileobj):  # type: ignore[arg-type]
                        ready.unregister(key.fileobj)
                        self._forget(key.fileobj)  # type: ignore[arg-type]

    def _accept(self, ready: selectors.BaseSelector) -> None:
        connection, _ = self._listener.accept()
        if not is_own_peer(connection):
            connection.close()
            return
        self._unread[connection] = b""
        ready.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> bool:
        """Whether there may be more."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            return False
        *lines, rest = (self._unread[connection] + data).split(b"\n")
        self._unread[connection] = rest
        for line in lines:
            self._take(connection, json.loads(line))
        return bool(data) and len(rest) <= LONGEST_LINE

    def _take(self, connection: socket.socket, message: Message) -> None:
        if message["kind"] == "arrived":
            self._slots[connection] = int(message["slot"])
            with self._lock:
                self._workers[self._slots[connection]] = connection
        slot = self._slots.get(connection)
        if slot is None or self._workers.get(slot) is not connection:
            return  # Another process has its place.
        answer = self._handle(slot, message)
        if answer is not None:
            with suppress(OSError):
                connection.sendall(_line(answer))
        os.eventfd_write(self._woken, 1)

    def _forget(self, connection: socket.socket) -> None:
        slot = self._slots.pop(connection, None)
        with self._lock:
            dropped = slot if slot is not None and self._workers.get(slot) is connection else None
            if dropped is not None:
                del self._workers[dropped]
        del self._unread[connection]
        connection.close()
        if dropped is not None:
            self._handle(dropped, {"kind": DROPPED})
            os.eventfd_write(self._woken, 1)


class WorkerChannel:
    """A worker's end. `observe` is called with each message in the thread that reads, while the worker may be stuck; with `ended` where
    the agent is lost."""

    def __init__(self, path: str, slot: int, *, observe: Callable[[Message], None]) -> None:
        """Raises `OSError` where no agent listens."""
        self.slot = slot
        self._observe = observe
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_closing = False
        self._connection = connect_to_path(path)
        self._thread = threading.Thread(target=self._read, name="strata-agent", daemon=True)
        self._thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Without an agent, this process ends with it."""
        with suppress(OSError):
            self._connection.sendall(_line({"kind": kind, **fields}))

    def wait(self, *kinds: str) -> Message:
        """The next of these messages."""
        while True:
            message = self._messages.get()
            if message["kind"] in kinds:
                return message
            if message["kind"] == "ended":
                raise ConnectionError("the agent has ended")

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                message: Message = json.loads(line)
                self._observe(message)
                self._messages.put(message)
        if not self._is_closing:
            self._observe({"kind": "ended"})
        self._messages.put({"kind": "ended"})


def worker_channel(*, observe: Callable[[Message], None]) -> WorkerChannel | None:
    """To the agent that has started this process; None where it was not started by one."""
    path, slot = os.environ.get(AGENT_VARIABLE), os.environ.get(SLOT_VARIABLE)
    if not path or slot is None:
        return None
    try:
        return WorkerChannel(path, int(slot), observe=observe)
    except OSError as error:
        log.warning("in-process recovery is off: the agent does not answer at %s (%s)", path, error)
        return None


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
