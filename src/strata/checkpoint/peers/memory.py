"""The part of an agent that keeps copies of other machines' images in this machine's memory, and sends this machine's to others.

Nothing listens before a job of this machine, or of one that is met in the same rendezvous, asks for copies. Then the agent has two
sockets: a Unix socket for this machine's workers, and a port for other agents and for workers that restore, which has to be opened with
the run's secret (`wire`). All copies together stay within a budget. They live below the memory root in a folder that belongs to this
process: it is removed when the agent ends, and by the next agent where this one was killed.

A copy is written to a place that no complete copy uses; its mark is written when all of it was verified. Its reader
verifies it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from strata import locks
from strata.checkpoint.catalog.manifest import IMAGE, CheckpointId, Manifest, decode
from strata.checkpoint.copying.staging import MARK_NAME, read_snapshot
from strata.checkpoint.errors import CheckpointError
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.peers import wire
from strata.checkpoint.peers.roster import Roster, SharedValue
from strata.checkpoint.peers.sending import Image, Sender
from strata.checkpoint.peers.wire import Message, PeerError
from strata.core.jobs.peers import Copy, CopyTable, Peer, Refused
from strata.files import write_file
from strata.processes import machine_token, this_process
from strata.shared_memory import make_private, memory_root, own_rack, peers_folder, remove_empty
from strata.sockets import is_own_peer, listen_privately

log = logging.getLogger("strata.peers")

SOCKET_VARIABLE = "STRATA_PEERS"
"""To a worker: the path of its agent's socket for copies."""
BUDGET_VARIABLE = "STRATA_PEER_BUDGET"
MOST_CONNECTIONS = 256
FREE_SHARE = 0.5
"""Of what is free in the memory root: the budget where none is given."""
MAKE_WAY_S = 5.0


@runtime_checkable
class Meeting(Protocol):
    """Where the agents of a run meet."""

    def shared_value(self, name: str) -> SharedValue: ...

    def own_address(self) -> tuple[str, str]:
        """What others reach this machine by, and where to listen for them."""
        ...


@dataclass(slots=True)
class _Arriving:
    """A connection that writes to a slot."""

    connection: socket.socket
    is_over: threading.Event


class PeerMemory:
    """Made by the agent before it starts workers. Threads are daemons, each with a deadline on whatever it waits for."""

    def __init__(
        self, meeting: Meeting | None, *, run: str, name: str = "", root: Path | None = None
    ) -> None:
        """Without a meeting there is one machine, and no other to keep anything for. Raises `OSError`."""
        self.agent = name or this_process().token
        self._root = memory_root(root)
        self.machine = f"{machine_token()}:{self._root}"
        self._meeting = meeting
        self._roster: Roster | None = None
        self._lock = threading.RLock()
        self._copy_table = CopyTable(0)
        self._places: dict[Copy, Path] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        """Of places: faulting their pages in for every copy would take as long as the copy."""
        self._writing: dict[str, _Arriving] = {}
        self._listener: socket.socket | None = None
        self._secret = ""
        self._sender: Sender | None = None
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._is_open = False
        _sweep(peers_folder(self._root))
        self.folder = (
            peers_folder(self._root) / f"{self.agent}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
        )
        make_private(self.folder, inside=self.folder.parent)
        self._held = locks.create(self.folder)
        self._local = listen_privately(self.folder / "socket")
        self.socket_path = self.folder / "socket"
        self._start(lambda: self._serve(self._local, is_local=True), "strata-peers")

    # --- opening and closing ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Copies are kept and sent."""
        return self._is_open

    def open(self, *, machine: str = "") -> None:
        """A job wants copies: be there for other machines, from now on. Raises `OSError` and `ConnectionError`."""
        with self._lock:
            if self._is_open or self._meeting is None:
                return
            self.machine = machine or self.machine
            self._copy_table.budget_bytes = _budget_bytes(self._root)
            address, bind = self._meeting.own_address()
            listener = _listen(bind)
            try:
                roster = Roster(self._meeting.shared_value("peers"))
                self._secret = roster.secret()
                port = listener.getsockname()[1]
                me = Peer(
                    machine=self.machine,
                    agent=self.agent,
                    host=socket.gethostname(),
                    rack=own_rack(),
                    address=f"{address}:{port}",
                )
                self._listener = listener
                self._start(lambda: self._serve(listener, is_local=False), "strata-peers-port")
                roster.enter(me)
            except BaseException:
                listener.close()
                self._listener = None
                raise
            self._roster = roster
            self._sender = Sender(me, roster, self._secret)
            self._is_open = True
        log.info(
            "this machine keeps copies of other machines' snapshots, at %s, up to %.1f GB",
            *(me.address, self._copy_table.budget_bytes / 1e9),
        )

    def is_wanted(self) -> bool:
        """Whether an agent of this run keeps copies. Raises `ConnectionError`."""
        return self._meeting is not None and self._meeting.shared_value("peers").get() is not None

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            sockets = [each for each in (self._local, self._listener) if each is not None]
            connections = list(self._connections)
        if self._sender is not None:
            self._sender.close()
        if self._roster is not None:
            with contextlib.suppress(ConnectionError):
                self._roster.leave(self.agent)
        for each in (*sockets, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        remove_empty(self.folder)
        self._held.release()

    # --- what others may ask ----------------------------------------------------------------------------------

    def images(self) -> list[Path]:
        """The folders of the newest images that workers of this machine have reported, newest last."""
        return self._sender.images() if self._sender is not None else []

    def _start(self, work: Callable[[], None], name: str) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    def _serve(self, listener: socket.socket, *, is_local: bool) -> None:
        while not self._is_closed:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                if len(self._connections) >= MOST_CONNECTIONS or (is_local and not is_own_peer(connection)):
                    connection.close()
                    continue
                self._connections.add(connection)
            self._start(lambda c=connection: self._converse(c, is_local=is_local), "strata-peer")  # type: ignore[misc]

    def _converse(self, connection: socket.socket, *, is_local: bool) -> None:
        try:
            if is_local:
                connection.settimeout(
                    None
                )  # A worker says something at each snapshot, however rare those are.
            elif not wire.accept(connection, self._secret):
                log.warning("refused a connection without the secret of this run")
                return
            while True:
                message = wire.receive(connection)
                try:
                    self._answer(connection, message, is_local=is_local)
                except PeerError as error:
                    wire.send(connection, {"ok": False, "reason": error.message, "is_stale": error.is_stale})
                    if error.is_lost:
                        return
        except (OSError, PeerError, KeyError, TypeError, ValueError) as error:
            log.debug("a connection for copies has ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, message: Message, *, is_local: bool) -> None:
        kind = str(message.get("op"))
        if kind == "put":
            self._take(connection, message)
        elif kind == "list":
            wire.send(connection, {"ok": True, "copies": self._listed(message)})
        elif kind == "manifest":
            data = (self._place_of(message) / MARK_NAME).read_bytes()
            wire.send(connection, {"ok": True, "length": len(data)}, data)
        elif kind == "read":
            self._give(connection, message)
        elif is_local and kind in _LOCAL:
            wire.send(connection, {"ok": True, **_LOCAL[kind](self, message)})
        else:
            raise PeerError(f"'{kind[:40]}' is not a known request.", is_lost=False)

    # --- copies that arrive -----------------------------------------------------------------------------------

    def _take(self, connection: socket.socket, message: Message) -> None:
        wire.yield_to_training()  # This thread; others, which answer processes that restore, do not.
        length = int(message["length"])
        if not 0 < length <= wire.LONGEST_MANIFEST:
            raise PeerError("The manifest is too long.")
        raw = bytes(wire.receive_bytes(connection, length))
        slot = str(message["slot"])[:200]
        try:
            manifest = decode(raw, path=slot, keys=None)
        except CheckpointError as error:
            raise PeerError(error.message, is_lost=False) from error
        if manifest.format != IMAGE or not manifest.run:
            raise PeerError("It is not an image of a run.", is_lost=False)
        copy = _copy_of(manifest, slot)
        with self._arriving(copy, connection) as place:
            if place is None:
                wire.send(connection, {"ok": True, "is_there": True, "need": []})
                return
            self._fill(connection, copy, manifest, raw, place)

    @contextlib.contextmanager
    def _arriving(self, copy: Copy, connection: socket.socket) -> Iterator[Path | None]:
        """The place for a copy, for as long as it arrives; None where it is complete already."""
        self._end_writer(copy.slot)
        mine = _Arriving(connection, threading.Event())
        with self._lock:
            if not self._is_open or self._is_closed:
                raise PeerError("No copies are kept here.", is_lost=False)
            if copy.slot in self._writing:
                raise PeerError("Another copy of the same part is arriving.", is_lost=False)
            accepted = self._copy_table.begin(copy)
            if isinstance(accepted, Refused):
                raise PeerError(accepted.reason, is_lost=False, is_stale=accepted.is_stale)
            place = None
            if not accepted.is_there:
                for dropped in accepted.dropped:
                    self._unmark(dropped)
                place = self._free_place(copy.slot)
                self._writing[copy.slot] = mine
        if place is None:
            yield None
            return
        try:
            yield place
        finally:
            with self._lock:
                self._copy_table.abandon(copy)  # Nothing, where it is complete.
                del self._writing[copy.slot]
                if copy not in self._places:
                    self._tidy(copy.slot)
            mine.is_over.set()

    def _end_writer(self, slot: str) -> None:
        """Its sender has started over: who still writes to the slot is cut off."""
        with self._lock:
            before = self._writing.get(slot)
        if before is not None:
            with contextlib.suppress(OSError):
                before.connection.shutdown(socket.SHUT_RDWR)
            before.is_over.wait(MAKE_WAY_S)

    def _free_place(self, slot: str) -> Path:
        used = {place for copy, place in self._places.items() if copy.slot == slot}
        folder = self.folder / hashlib.sha256(slot.encode()).hexdigest()[:24]
        return next(place for place in (folder / "0", folder / "1") if place not in used)

    def _fill(
        self, connection: socket.socket, copy: Copy, manifest: Manifest, raw: bytes, place: Path
    ) -> None:
        part = manifest.parts[0]
        digest, size_bytes = part.digest, part.size_bytes
        with memoryview(self._mapped(place, size_bytes)) as view:
            need = self._copy_unchanged(copy, manifest, view)
            wire.send(connection, {"ok": True, "need": need})
            for number in need:
                start = number * digest.chunk_bytes
                hasher = digest.hasher()
                with view[start : min(start + digest.chunk_bytes, size_bytes)] as chunk:
                    wire.receive_into(connection, chunk, hasher.update)
                if hasher.hexdigest() != digest.chunks[number]:
                    raise PeerError(f"Chunk {number} does not match its digest.")
        self._complete(copy, raw, place)
        wire.send(connection, {"ok": True, "received": len(need)})

    def _complete(self, copy: Copy, raw: bytes, place: Path) -> None:
        """All of it was verified: from now on it counts."""
        with self._lock:
            refused = self._copy_table.finish(copy)
            if refused is not None:
                raise PeerError(refused.reason, is_lost=False, is_stale=refused.is_stale)
            self._places[copy] = place
            try:
                write_file(place / MARK_NAME, raw, durable=False)
            except OSError as error:
                self._drop(copy)
                raise PeerError(f"No space for its mark: {error.strerror}.", is_lost=False) from error

    def _copy_unchanged(self, copy: Copy, manifest: Manifest, view: memoryview) -> list[int]:
        """Take over what is as in the newest copy of the slot; the numbers of the other chunks."""
        part = manifest.parts[0]
        digest = part.digest
        with self._lock:
            newest = next(iter(self._copy_table.complete.get(copy.slot, [])), None)
            place = self._places.get(newest) if newest is not None else None
        found = read_snapshot(place) if place is not None else None
        everything = list(range(len(digest.chunks)))
        if found is None:
            return everything
        before = found.manifest.parts[0]
        if (before.size_bytes, before.digest.chunk_bytes, before.digest.algorithm) != (
            part.size_bytes,
            digest.chunk_bytes,
            digest.algorithm,
        ):
            return everything
        same = [n for n in everything if digest.chunks[n] == before.digest.chunks[n]]
        taken = set()
        if same:
            with found.path.open("rb", buffering=0) as file:
                for number in same:
                    start = number * digest.chunk_bytes
                    with view[start : min(start + digest.chunk_bytes, part.size_bytes)] as chunk:
                        count = os.preadv(file.fileno(), [chunk], start)
                        if count == len(chunk) and digest.fits(number, chunk):
                            taken.add(number)
        return [number for number in everything if number not in taken]

    # --- copies that are there --------------------------------------------------------------------------------

    def _mapped(self, place: Path, size_bytes: int) -> mmap.mmap:
        """The bytes of a place, with space for so many, and no mark."""
        with self._lock:
            known = self._maps.pop(place, None)
        try:
            (place / MARK_NAME).unlink(missing_ok=True)
            if known is None or len(known) != size_bytes or not (place / FILE_NAME).exists():
                known = _map_place(place, size_bytes)
        except OSError as error:
            self._clear(place)
            raise PeerError(f"No space for it: {error.strerror}.", is_lost=False) from error
        with self._lock:
            self._maps[place] = known
        return known

    def _clear(self, place: Path) -> None:
        """Give the memory of a place back."""
        with self._lock:
            self._maps.pop(place, None)  # Closed when nothing refers to it any more.
        shutil.rmtree(place, ignore_errors=True)

    def _unmark(self, copy: Copy) -> None:
        place = self._places.pop(copy, None)
        if place is not None:
            (place / MARK_NAME).unlink(missing_ok=True)

    def _drop(self, copy: Copy) -> None:
        place = self._places.get(copy)
        self._copy_table.discard(copy)
        self._unmark(copy)
        if place is not None:
            self._clear(place)

    def _tidy(self, slot: str) -> None:
        """Memory of copies that never became complete is given back at once."""
        folder = self.folder / hashlib.sha256(slot.encode()).hexdigest()[:24]
        used = {place for copy, place in self._places.items() if copy.slot == slot}
        for place in (folder / "0", folder / "1"):
            if place not in used:
                self._clear(place)

    def _listed(self, message: Message) -> list[Message]:
        """A process that is about to restore a run says as which generation: what it learns of stays as it is, whatever earlier ones
        still send."""
        run = str(message.get("run", ""))
        with self._lock:
            self._copy_table.fence(run, int(message.get("generation", 0)))
            complete = [copy for copies in self._copy_table.complete.values() for copy in copies]
            arriving = list(self._copy_table.arriving.values())
            places = dict(self._places)
        found = []
        for copy in complete:
            snapshot = read_snapshot(places[copy]) if copy in places else None
            if snapshot is not None and run in ("", copy.run):
                found.append(self._describe(copy, snapshot.manifest, str(snapshot.path)))
        unfinished = [copy for copy in arriving if run in ("", copy.run)]
        return found + [{**self._described(copy), "is_complete": False, "path": ""} for copy in unfinished]

    def _describe(self, copy: Copy, manifest: Manifest, path: str) -> Message:
        layout: Any = manifest.layout
        is_sharded = isinstance(layout, dict) and "part" in layout
        return {
            **self._described(copy),
            "is_complete": True,
            "path": path,
            "step": manifest.step,
            "lineage": manifest.lineage,
            "parent": manifest.parent,
            "durable_parent": manifest.durable_parent,
            "part": str(layout["part"]) if is_sharded else "",
            "parts": list(layout["parts"]) if is_sharded else [],
        }

    def _described(self, copy: Copy) -> Message:
        rack = own_rack()
        mine = {"agent": self.agent, "machine": self.machine, "host": socket.gethostname(), "rack": rack}
        return {**asdict(copy), **mine}

    def _place_of(self, message: Message) -> Path:
        slot, wanted = str(message["slot"]), CheckpointId(str(message["checkpoint_id"]))
        with self._lock:
            for copy, place in self._places.items():
                if (copy.slot, copy.checkpoint_id) == (slot, wanted):
                    return place
        raise PeerError("This copy no longer exists.", is_lost=False)

    def _give(self, connection: socket.socket, message: Message) -> None:
        offset, length = int(message["offset"]), int(message["length"])
        with (self._place_of(message) / FILE_NAME).open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if offset < 0 or length < 0 or offset + length > size_bytes:
                raise PeerError(f"There are {size_bytes:,} bytes.", is_lost=False)
            wire.send(connection, {"ok": True, "length": length})
            if length:
                wire.send_file(connection, file.fileno(), offset, length)

    # --- what this machine's workers say ----------------------------------------------------------------------

    def _want(self, message: Message) -> Message:
        try:
            self.open(machine=str(message.get("machine", "")))
        except (OSError, PeerError, ValueError) as error:
            raise PeerError(f"Copies cannot be kept: {error}.", is_lost=False) from error
        return {"is_open": self._is_open, "machine": self.machine}

    def _saved(self, message: Message) -> Message:
        slot = str(message["slot"])
        if self._sender is not None:
            self._sender.submit(
                Image(
                    slot=slot,
                    folder=Path(str(message["folder"])),
                    checkpoint_id=CheckpointId(str(message["checkpoint_id"])),
                    holders=tuple(map(str, message["holders"])),
                    copies=int(message["copies"]),
                    rate_bytes=int(message["rate_bytes"]),
                )
            )
        return {"copied_step": self._sender.copied(slot) if self._sender is not None else -1}

    def _pending(self, message: Message) -> Message:
        return {"pending": self._sender.pending() if self._sender is not None else []}

    def _find(self, message: Message) -> Message:
        """Copies of a run, here and on all other machines; and who did not answer."""
        wanted = {"op": "list", "run": message.get("run", ""), "generation": message.get("generation", 0)}
        found, silent = self._listed(wanted), []
        others = self.others()
        answers: dict[str, list[Message] | None] = {}

        def ask(peer: Peer) -> None:
            try:
                with wire.connect(peer.address, self._secret) as connection:
                    answers[peer.agent] = wire.ask(connection, wanted)["copies"]
            except (OSError, PeerError):
                answers[peer.agent] = None

        threads = [threading.Thread(target=ask, args=(peer,), daemon=True) for peer in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * wire.CONNECT_S)
        for peer in others:
            copies = answers.get(peer.agent)
            if copies is None:
                if self._sender is not None:
                    self._sender.leave_out(peer, "it did not answer the search for copies")
                silent.append(f"{peer.host} ({peer.address})")
            else:
                found += [{**copy, "path": ""} for copy in copies]
        return {"copies": found, "silent": silent}

    def others(self) -> list[Peer]:
        if self._roster is None:
            return []
        with contextlib.suppress(ConnectionError):
            return [peer for peer in self._roster.peers(fresh=True) if peer.agent != self.agent]
        return []

    def _peers(self, message: Message) -> Message:
        me = [self._sender.me] if self._sender is not None else []
        return {"peers": [asdict(peer) for peer in (*me, *self.others())]}

    def _ticket(self, message: Message) -> Message:
        """What a worker needs to read from another machine itself."""
        for peer in self.others():
            if peer.machine == str(message["machine"]):
                return {"address": peer.address, "secret": self._secret}
        raise PeerError("That machine is no longer part of the run.", is_lost=False)

    def _pull(self, message: Message) -> Message:
        """Fetch a copy from another machine, to be kept here too; where it is now."""
        ticket = self._ticket(message)
        key = {"slot": str(message["slot"]), "checkpoint_id": str(message["checkpoint_id"])}
        with contextlib.closing(wire.connect(ticket["address"], self._secret)) as theirs:
            length = int(wire.ask(theirs, {"op": "manifest", **key})["length"])
            raw = bytes(wire.receive_bytes(theirs, length))
            manifest = decode(raw, path=key["slot"], keys=None)
            copy = _copy_of(manifest, key["slot"])
            with self._arriving(copy, theirs) as place:
                if place is not None:
                    self._fetch(theirs, copy, manifest, raw, place, key)
        with self._lock:
            return {"path": str(self._places[copy] / FILE_NAME)}

    def _fetch(
        self,
        theirs: socket.socket,
        copy: Copy,
        manifest: Manifest,
        raw: bytes,
        place: Path,
        key: Message,
    ) -> None:
        part = manifest.parts[0]
        with memoryview(self._mapped(place, part.size_bytes)) as view:
            wire.ask(theirs, {"op": "read", **key, "offset": 0, "length": part.size_bytes})
            for number in range(len(part.digest.chunks)):
                start = number * part.digest.chunk_bytes
                hasher = part.digest.hasher()
                with view[start : min(start + part.digest.chunk_bytes, part.size_bytes)] as chunk:
                    wire.receive_into(theirs, chunk, hasher.update)
                if hasher.hexdigest() != part.digest.chunks[number]:
                    raise PeerError(f"Chunk {number} of the copy is damaged.", is_lost=False)
        self._complete(copy, raw, place)

    def _fence(self, message: Message) -> Message:
        with self._lock:
            self._copy_table.fence(str(message["run"]), int(message["generation"]))
        return {}

    def _settle(self, message: Message) -> Message:
        with self._lock:
            for copy in self._copy_table.settle(str(message["run"]), int(message["generation"])):
                self._drop(copy)
        return {}

    def _forget(self, message: Message) -> Message:
        run = str(message["run"])
        if self._sender is not None:
            self._sender.forget()
        with self._lock:
            for copy in self._copy_table.forget(run, int(message["generation"])):
                self._drop(copy)
        return {}


_LOCAL: dict[str, Callable[[PeerMemory, Message], Message]] = {
    "want": PeerMemory._want,
    "saved": PeerMemory._saved,
    "pending": PeerMemory._pending,
    "find": PeerMemory._find,
    "peers": PeerMemory._peers,
    "ticket": PeerMemory._ticket,
    "pull": PeerMemory._pull,
    "fence": PeerMemory._fence,
    "settle": PeerMemory._settle,
    "forget": PeerMemory._forget,
}


def _copy_of(manifest: Manifest, slot: str) -> Copy:
    return Copy(
        run=manifest.run,
        slot=slot,
        checkpoint_id=manifest.checkpoint_id,
        generation=manifest.generation,
        sequence=manifest.sequence,
        size_bytes=manifest.parts[0].size_bytes,
    )


def _map_place(place: Path, size_bytes: int) -> mmap.mmap:
    """The file of a place, with space for all of it. One of the same size is used again: its pages are there."""
    make_private(place, inside=place.parent.parent)
    path = place / FILE_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size != size_bytes:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def _budget_bytes(root: Path) -> int:
    """Raises `ValueError` for one that is no number of bytes."""
    if named := os.environ.get(BUDGET_VARIABLE, "").strip():
        return wire.parse_bytes(named)
    root.mkdir(parents=True, exist_ok=True)
    found = os.statvfs(root)
    return int(found.f_bavail * found.f_frsize * FREE_SHARE)


def _listen(bind: str) -> socket.socket:
    if not bind:
        return socket.create_server(("", 0), backlog=128)
    family = socket.getaddrinfo(bind, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((bind, 0), family=family, backlog=128)


def _sweep(folder: Path) -> None:
    """Remove what agents left that were killed."""
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            lock = locks.take(each)
            if lock is not None:
                shutil.rmtree(each, ignore_errors=True)
                lock.release()
