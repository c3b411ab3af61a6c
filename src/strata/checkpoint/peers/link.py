"""A worker's end: what it reports of its snapshots, and where it finds copies of those that a lost machine had.

Nothing here keeps training waiting: reports are answered by this machine's agent, over a Unix socket, and an agent that does not
answer within a moment is left alone. Without an agent of ours there are no copies, and that is said once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from strata.checkpoint.catalog.manifest import CheckpointId, Manifest, decode
from strata.checkpoint.peers import wire
from strata.checkpoint.peers.memory import SOCKET_VARIABLE
from strata.checkpoint.peers.wire import Message, PeerError
from strata.core.jobs.peers import PEER, Peer
from strata.sockets import connect_to_path
from strata.stores.protocol import NotFound, Unavailable

log = logging.getLogger("strata.peers")

REPORT_S = 1.0
FIND_S = 30.0
READERS = 2
"""Connections that one restore reads with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """A copy of one part of a snapshot, in the memory of an agent."""

    run: str
    slot: str
    checkpoint_id: CheckpointId
    generation: int
    sequence: int
    size_bytes: int
    is_complete: bool
    """It was verified when it arrived; else it is arriving."""
    agent: str
    machine: str
    host: str
    rack: str
    path: str = ""
    """The image, where it is in this machine's memory."""
    step: int = 0
    lineage: str = ""
    parent: CheckpointId | None = None
    durable_parent: CheckpointId | None = None
    part: str = ""
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Message) -> HeldCopy:
        known = {each.name for each in fields(cls)}
        facts: dict[str, Any] = {name: value for name, value in found.items() if name in known}
        return cls(**{**facts, "parts": tuple(facts.get("parts", ()))})

    @property
    def address(self) -> str:
        """What it is called among the sources of a restore."""
        return self.path or f"peer://{self.machine}/{self.slot}"


class PeerLink:
    """To this machine's agent. May be used from several threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None

    @classmethod
    def open(cls, path: str | None = None) -> Self | None:
        """None where no agent that keeps copies has started this process."""
        named = path or os.environ.get(SOCKET_VARIABLE)
        return cls(named) if named else None

    def want(self, machine: str) -> bool:
        """A job of this process wants copies: whether there can be any. Raises `PeerError`."""
        return bool(self._ask({"op": "want", "machine": machine}, FIND_S).get("is_open"))

    def saved(
        self,
        *,
        slot: str,
        folder: Path,
        checkpoint_id: CheckpointId,
        holders: tuple[str, ...],
        copies: int,
        rate_bytes: int,
    ) -> int:
        """There is a new snapshot in this folder. Returns the newest step of the slot that another machine has by now; -1 where none has
        any. Raises `PeerError`."""
        message = {"op": "saved", "slot": slot, "folder": str(folder), "checkpoint_id": checkpoint_id}
        answer = self._ask(
            {**message, "holders": holders, "copies": copies, "rate_bytes": rate_bytes}, REPORT_S
        )
        return int(answer["copied_step"])

    def pending(self) -> frozenset[CheckpointId]:
        """Snapshots of this machine whose copies are on their way. None where the agent does not answer."""
        with contextlib.suppress(PeerError):
            return frozenset(map(CheckpointId, self._ask({"op": "pending"}, REPORT_S)["pending"]))
        return frozenset()

    def copies(self, run: str = "", *, generation: int = 0) -> list[HeldCopy]:
        """Every copy of a run, or of any, that an agent of the roster has, complete or not. A process that is about to restore it says as
        which generation: earlier ones change nothing from then on. Raises `PeerError`."""
        found = self._ask({"op": "find", "run": run, "generation": generation}, FIND_S)
        for silent in found["silent"]:
            log.warning("%s does not answer: it is unknown whether it has copies", silent)
        return [HeldCopy.of(each) for each in found["copies"]]

    def own_copies(self, run: str = "", *, generation: int = 0) -> list[HeldCopy]:
        """Those that this machine's agent has. Raises `PeerError`."""
        found = self._ask({"op": "list", "run": run, "generation": generation}, FIND_S)
        return [HeldCopy.of(each) for each in found["copies"]]

    def roster(self) -> list[Peer]:
        """The machines that keep copies, this one first. Raises `PeerError`."""
        return [Peer(**each) for each in self._ask({"op": "peers"}, FIND_S)["peers"]]

    def pull(self, copy: HeldCopy) -> Path:
        """Fetch a copy from another machine into this one's memory, verified: where its image is. Raises `PeerError`."""
        if copy.path:
            return Path(copy.path)
        return Path(str(self._ask({"op": "pull", **_key(copy), "machine": copy.machine}, None)["path"]))

    def reader(self, copy: HeldCopy) -> PeerReader:
        """Read a copy from another machine as it arrives. Raises `PeerError`."""
        ticket = self._ask({"op": "ticket", "machine": copy.machine}, FIND_S)
        return PeerReader(str(ticket["address"]), str(ticket["secret"]), copy)

    def fence(self, run: str, generation: int) -> None:
        """From now on nothing that earlier generations send is kept here."""
        self._tell({"op": "fence", "run": run, "generation": generation})

    def settle(self, run: str, generation: int) -> None:
        """This generation has a complete snapshot of its own: copies of earlier ones may go."""
        self._tell({"op": "settle", "run": run, "generation": generation})

    def forget(self, run: str, generation: int) -> None:
        """The run has ended with this generation, and no process will restore it from memory."""
        self._tell({"op": "forget", "run": run, "generation": generation})

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _tell(self, message: Message) -> None:
        try:
            self._ask(message, REPORT_S)
        except PeerError as error:
            log.warning("this machine's agent did not accept a message about copies: %s", error.message)

    def _ask(self, message: Message, timeout_s: float | None) -> Message:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = connect_to_path(self._path)
                self._connection.settimeout(timeout_s)
                return wire.ask(self._connection, message)
            except (OSError, PeerError) as error:
                if isinstance(error, PeerError) and not error.is_lost:
                    raise
                if self._connection is not None:
                    self._connection.close()  # An answer that is late must not be taken for the next one's.
                    self._connection = None
                if isinstance(error, PeerError):
                    raise
                raise PeerError(f"This machine's agent does not answer: {error}.") from error


class PeerReader:
    """A copy on another machine, as the part of a store that images are loaded from (`strata.checkpoint.image.in_place`)."""

    tier = PEER

    def __init__(self, address: str, secret: str, copy: HeldCopy) -> None:
        self._address, self._secret, self._copy = address, secret, copy
        self.url = f"peer://{copy.host}/{copy.checkpoint_id}"

    def manifest(self) -> Manifest:
        """Raises `Damaged` and the store's errors."""
        with self._connected() as connection:
            length = int(wire.ask(connection, {"op": "manifest", **_key(self._copy)})["length"])
            raw = bytes(wire.receive_bytes(connection, length))
        return decode(raw, path=self.url, keys=None)

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        wanted = self._copy.size_bytes - offset if length is None else length
        with self._connected() as connection:
            self._begin(connection, offset, wanted)
            return bytes(wire.receive_bytes(connection, wanted))

    def read_parts(
        self, key: str, take: Callable[[int, memoryview], None], *, size_bytes: int, part_bytes: int
    ) -> None:
        """Every reader takes its share of the copy, front to back."""
        parts = -(-size_bytes // part_bytes)
        bounds = [parts * n // READERS * part_bytes for n in range(READERS)] + [size_bytes]
        failures: list[BaseException] = []

        def work(start: int, end: int) -> None:
            try:
                with self._connected() as connection:
                    self._begin(connection, start, end - start)
                    buffer = memoryview(bytearray(part_bytes))
                    while start < end and not failures:
                        part = buffer[: min(part_bytes, end - start)]
                        wire.receive_into(connection, part)
                        take(start, part)
                        start += len(part)
            except BaseException as error:
                failures.append(error)

        spans = [(start, end) for start, end in itertools.pairwise(bounds) if start < end]
        threads = [threading.Thread(target=work, args=span, daemon=True) for span in spans[1:]]
        for thread in threads:
            thread.start()
        if spans:
            work(*spans[0])
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _begin(self, connection: socket.socket, offset: int, length: int) -> None:
        wire.ask(connection, {"op": "read", **_key(self._copy), "offset": offset, "length": length})

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """What fails is an error of a store."""
        try:
            with contextlib.closing(wire.connect(self._address, self._secret)) as connection:
                yield connection
        except PeerError as error:
            kind = Unavailable if error.is_lost else NotFound
            raise kind(error.message, tier=PEER, key=self._copy.slot) from error
        except OSError as error:
            raise Unavailable(f"{self.url}: {error}", tier=PEER, key=self._copy.slot) from error


def _key(copy: HeldCopy) -> Message:
    return {"slot": copy.slot, "checkpoint_id": copy.checkpoint_id}
