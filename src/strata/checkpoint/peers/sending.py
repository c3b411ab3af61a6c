"""Sending this machine's images to other machines' agents: in the background, at a limited rate, and never in the way of training.

The newest image of each slot is sent; one that waits makes way for a newer one. No image is held for it: where training saves over
one that is being sent, its mark is removed, and the receiver finds chunks that are not what their digests say; the copy is
given up, and the next one is sent. A machine that does not answer is left out for a while, longer each time, and the next of the roster
asked; also one that was found silent when copies were looked for: it may be lost, with nothing left to end its connections.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strata.checkpoint.catalog.manifest import CheckpointId, Manifest
from strata.checkpoint.copying.staging import MARK_NAME, read_snapshot
from strata.checkpoint.image.layout import FILE_NAME
from strata.checkpoint.peers import wire
from strata.checkpoint.peers.roster import Roster
from strata.checkpoint.peers.wire import PeerError
from strata.core.jobs.peers import Peer, targets
from strata.core.pauses import Pace, pause_after_s

log = logging.getLogger("strata.peers")

LEAVE_OUT_S, LONGEST_LEAVE_OUT_S = 10.0, 600.0
"""A machine that did not answer is not asked for so long, and twice as long each time: asking may take seconds."""
SEND_S = 60.0
"""A copy that takes longer is given up."""
PATIENCE_S = 20.0
"""So long a snapshot counts as being sent: afterwards it is not waited for."""
PIECE_BYTES = 4 << 20
BURST_S = 0.1
"""So many seconds' worth of the rate are sent at once."""
OVERTAKEN = 3
"""So many snapshots in a row that were not sent in time are worth a word."""


class Overtaken(Exception):
    """Training has saved over the image meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that a worker of this machine has marked."""

    slot: str
    folder: Path
    checkpoint_id: CheckpointId
    holders: tuple[str, ...]
    """The machines that have made the same."""
    copies: int
    rate_bytes: int
    """A second; 0 for no limit."""


class Sender:
    """One thread for all images of this machine."""

    def __init__(self, me: Peer, roster: Roster, secret: str) -> None:
        self.me = me
        self._roster = roster
        self._secret = secret
        self._changed = threading.Condition()
        self._waiting: dict[str, Image] = {}
        """By slot, oldest first."""
        self._under_way: Image | None = None
        self._since_s: dict[str, float] = {}
        """When the oldest image of a slot that is not sent was submitted."""
        self._newest: dict[str, Path] = {}
        self._copied: dict[str, int] = {}
        """The newest step of a slot that another machine has."""
        self._connections: dict[str, socket.socket] = {}
        self._left_out: dict[str, tuple[float, int]] = {}
        """Until when a machine is not asked, and how often in a row it has not answered."""
        self._said: dict[str, str] = {}
        self._closing = threading.Event()
        self.sent: deque[tuple[Image, Peer, int, float]] = deque(maxlen=64)
        """What was sent lately: to whom, how many bytes, how long it took."""
        threading.Thread(target=self._run, name="strata-peer-sender", daemon=True).start()

    def submit(self, image: Image) -> None:
        with self._changed:
            self._waiting.pop(image.slot, None)
            self._waiting[image.slot] = image
            self._newest.pop(image.slot, None)
            self._newest[image.slot] = image.folder
            self._since_s.setdefault(image.slot, time.monotonic())
            self._changed.notify()

    def pending(self) -> list[str]:
        """The snapshots whose copies are on their way, and worth waiting for."""
        now_s = time.monotonic()
        with self._changed:
            images = [*self._waiting.values(), *([self._under_way] if self._under_way is not None else [])]
            return [i.checkpoint_id for i in images if now_s - self._since_s.get(i.slot, now_s) < PATIENCE_S]

    def copied(self, slot: str) -> int:
        """The newest step of a slot that another machine has; -1 where none has any."""
        with self._changed:
            return self._copied.get(slot, -1)

    def images(self) -> list[Path]:
        with self._changed:
            return list(self._newest.values())

    def leave_out(self, peer: Peer, why: str) -> None:
        """It does not answer. Who waits for it does not wait any longer."""
        with self._changed:
            failures = self._left_out.get(peer.agent, (0.0, 0))[1] + 1
            pause_s = pause_after_s(failures, first_s=LEAVE_OUT_S, longest_s=LONGEST_LEAVE_OUT_S)
            self._left_out[peer.agent] = (time.monotonic() + pause_s, failures)
            connection = self._connections.get(peer.agent)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # Closed by the thread that uses it.
        self._say(peer.agent, f"{peer.host} ({peer.address}) does not accept copies: {why}")

    def forget(self) -> None:
        """The run has ended."""
        with self._changed:
            self._waiting.clear()
            self._newest.clear()
            self._copied.clear()

    def close(self) -> None:
        self._closing.set()
        with self._changed:
            self._changed.notify()
            connections = list(self._connections.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        wire.yield_to_training()
        overtaken = 0
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
                if self._closing.is_set():
                    break
                image = self._under_way = self._waiting.pop(next(iter(self._waiting)))
            try:
                self._send_all(image)
                overtaken = 0
            except Overtaken:
                overtaken += 1
                log.info("snapshot %s was overwritten or abandoned while it was sent", image.checkpoint_id)
                if overtaken == OVERTAKEN:
                    log.warning(
                        "%d snapshots were overwritten before they were sent: raise peer_rate or snapshot_every",
                        overtaken,
                    )
            except Exception:  # The thread must continue, or nothing would ever be sent again.
                log.exception("sending a copy to another machine failed unexpectedly")
            finally:
                with self._changed:
                    self._under_way = None
                    if image.slot not in self._waiting:
                        self._since_s.pop(image.slot, None)
        for connection in self._connections.values():
            connection.close()

    def _send_all(self, image: Image) -> None:
        found = read_snapshot(image.folder)
        if found is None or found.manifest.checkpoint_id != image.checkpoint_id:
            raise Overtaken
        deadline_s = time.monotonic() + SEND_S
        refusing: set[str] = set()
        done: set[str] = set()
        while time.monotonic() < deadline_s and not self._closing.is_set():
            chosen = self._chosen(image, refusing)
            if chosen is None:
                return
            todo = [peer for peer in chosen if peer.agent not in done]
            if not todo:
                if len(done) < image.copies and not image.holders:
                    self._say("few", self._too_few(len(done), image))
                return
            for peer in todo:
                try:
                    self._send(image, found.manifest, peer, deadline_s)
                    done.add(peer.agent)
                    with self._changed:
                        self._copied[image.slot] = found.manifest.step
                        self._left_out.pop(peer.agent, None)
                    self._said.pop(peer.agent, None)
                except PeerError as error:
                    if error.is_lost:
                        self._give_up(peer, error.message)
                        continue
                    if error.is_stale:  # Superseded: others would not want it either.
                        log.info("%s declined step %d: %s", peer.host, found.manifest.step, error.message)
                        return
                    refusing.add(peer.agent)
                    self._say(
                        peer.agent, f"{peer.host} ({peer.address}) did not keep a copy: {error.message}"
                    )
                except OSError as error:
                    self._give_up(peer, str(error) or type(error).__name__)

    def _chosen(self, image: Image, refusing: set[str]) -> list[Peer] | None:
        try:
            roster = self._roster.peers()
        except (ConnectionError, ValueError) as error:
            self._say("roster", f"no copy was sent, because the other machines are unknown: {error}")
            return None
        there = [
            peer
            for peer in roster
            if peer.agent == self.me.agent or not (self._is_left_out(peer) or peer.agent in refusing)
        ]
        chosen = targets(self.me.machine, image.holders, there, copies=image.copies)
        if not chosen and len(image.holders) <= image.copies:
            self._say("few", self._too_few(0, image))
        return chosen

    def _too_few(self, found: int, image: Image) -> str:
        return f"{found} of {image.copies} copies of this machine's snapshots are on other machines: no other machine accepts one"

    def _give_up(self, peer: Peer, why: str) -> None:
        self._forget_connection(peer)
        if not self._is_left_out(peer):
            self.leave_out(peer, why)

    def _is_left_out(self, peer: Peer) -> bool:
        with self._changed:
            return time.monotonic() < self._left_out.get(peer.agent, (0.0, 0))[0]

    def _connection(self, peer: Peer) -> socket.socket:
        known = self._connections.get(peer.agent)
        if known is None:
            known = wire.connect(peer.address, self._secret)
            with self._changed:
                self._connections[peer.agent] = known
        return known

    def _forget_connection(self, peer: Peer) -> None:
        with self._changed:
            connection = self._connections.pop(peer.agent, None)
        if connection is not None:
            connection.close()

    def _send(self, image: Image, manifest: Manifest, peer: Peer, deadline_s: float) -> None:
        began_s = time.monotonic()
        with _missing_is_overtaken():
            raw = (image.folder / MARK_NAME).read_bytes()
        message = {"op": "put", "slot": image.slot, "length": len(raw)}
        connection = self._connection(peer)
        try:
            answer = wire.ask(connection, message, raw)
        except (OSError, PeerError) as error:
            if self._is_left_out(peer) or (isinstance(error, PeerError) and not error.is_lost):
                raise
            # It may have been closed while it was idle.
            self._forget_connection(peer)
            connection = self._connection(peer)
            answer = wire.ask(connection, message, raw)
        need = [int(number) for number in answer["need"]]
        if answer.get("is_there"):
            return
        sent_bytes = 0
        try:
            sent_bytes = self._send_chunks(connection, image, manifest, need, deadline_s)
            wire.checked(wire.receive(connection))
        except PeerError:
            self._forget_connection(peer)
            self._check(image)
            raise
        except BaseException:
            self._forget_connection(peer)  # The receiver gives up what it has.
            raise
        took_s = time.monotonic() - began_s
        self.sent.append((image, peer, sent_bytes, took_s))
        log.info(
            "step %d was copied to %s: %.1f of %.1f MB sent in %.3f s",
            *(manifest.step, peer.host, sent_bytes / 1e6, manifest.parts[0].size_bytes / 1e6, took_s),
        )

    def _send_chunks(
        self,
        connection: socket.socket,
        image: Image,
        manifest: Manifest,
        need: list[int],
        deadline_s: float,
    ) -> int:
        part, sent_bytes, pace = manifest.parts[0], 0, Pace(BURST_S)
        with _missing_is_overtaken():
            opened = (image.folder / FILE_NAME).open("rb", buffering=0)
        with opened as file:
            for number in need:
                start = number * part.digest.chunk_bytes
                end = min(start + part.digest.chunk_bytes, part.size_bytes)
                self._check(image)
                while start < end:
                    if time.monotonic() > deadline_s:
                        raise PeerError(f"Sending exceeded {SEND_S:g} s.")
                    count = min(PIECE_BYTES, end - start)
                    if wire.send_file(connection, file.fileno(), start, count) != count:
                        raise Overtaken  # The file has become shorter.
                    start += count
                    sent_bytes += count
                    if image.rate_bytes:
                        self._closing.wait(pace.take(count / image.rate_bytes, time.monotonic()))
        return sent_bytes

    def _check(self, image: Image) -> None:
        found = read_mark_id(image.folder)
        if found != image.checkpoint_id:
            raise Overtaken

    def _say(self, about: str, what: str) -> None:
        """Once, until it is something else."""
        if self._said.get(about) != what:
            self._said[about] = what
            log.warning("%s", what)


@contextlib.contextmanager
def _missing_is_overtaken() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Overtaken from error


def read_mark_id(folder: Path) -> CheckpointId | None:
    """Whose image this is now, without reading all of its mark again and again."""
    path = folder / MARK_NAME
    try:
        found = path.stat()
    except OSError:
        return None
    key = (str(path), found.st_ino, found.st_mtime_ns)
    if key not in _known_marks:
        snapshot = read_snapshot(folder)
        if len(_known_marks) > 256:
            _known_marks.clear()
        _known_marks[key] = snapshot.manifest.checkpoint_id if snapshot is not None else None
    return _known_marks[key]


_known_marks: dict[tuple[str, int, int], CheckpointId | None] = {}
