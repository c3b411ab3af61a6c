"""The history in etcd: shared by several coordinators, written by the one that leads.

`core.leadership` says what is written and when; here it becomes requests. Below one prefix there are

    leader              who leads, on a lease; created once in each term
    coordinators/NAME   where each coordinator is reached that has not been stopped
    ends/TASK/ATTEMPT   an attempt that ended on a standby's machine, until the leader has recorded it
    attending/PLACE     a standby that looks after what it has started on its machine, on a lease
    log/POSITION        a record: a batch of events, or a part of one
    snapshot            which snapshot counts, and up to which position it goes
    snapshots/ID/N      its pieces
    format              what these look like

`append` returns when a majority of etcd's members has the events on disk. An answer that is lost is found out by sending the same
record again, which cannot be written twice. A snapshot exists from the moment `snapshot` names it; then the one before it goes, and
with it the records that it summed up, which are also cleared from etcd's own history. What is left of a snapshot that was
never finished goes with the next.

Needs etcd 3.4 or later. Records and pieces are at most 1 MiB, below what a member takes by default.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import strata
from strata.backoff import Backoff
from strata.coordinator.journal import codec
from strata.coordinator.journal.protocol import Deposed, JournalError, JournalFull, JournalSizes
from strata.coordinator.journal.space import Space, megabytes
from strata.core.leadership import Appender, Gap, Leader, Record, Refusal, Tail
from strata.core.messages import Event
from strata.etcd import (
    DEFAULT_PORT,
    FAILURES,
    NO_SPACE,
    OUT_OF_RANGE,
    EtcdAddress,
    EtcdClient,
    EtcdRefused,
    LeaseLost,
    decode,
    encode,
    tls_context,
)

Answer = TypeVar("Answer")

log = logging.getLogger("strata.coordinator.journal")

FORMAT = str(codec.FORMAT)
SCHEMES = ("etcd", "etcds")
ENDPOINT = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^\[\]:]+))(?::(?P<port>\d{1,5}))?", re.ASCII)
DEFAULT_PREFIX = "/strata"
PART_BYTES = 1 << 20
RECORDS_AT_ONCE = 64
PIECES_AT_ONCE = 8
SNAPSHOT_EVENTS = 5_000
FRAME_BYTES = 4
LOAD_ATTEMPTS = 20
HELD_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdLocation:
    """Where a journal is: a cluster, and a prefix in it."""

    address: EtcdAddress
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        scheme = "etcds" if self.address.tls is not None else "etcd"
        return f"{scheme}://{self.address}{self.prefix}"


def is_etcd(journal: str) -> bool:
    return journal.partition("://")[0] in SCHEMES and "://" in journal


def parse_location(
    journal: str,
    *,
    user: str = "",
    password: str = "",
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> EtcdLocation:
    """`etcd://HOST:PORT,HOST:PORT/PREFIX`; `etcds` for TLS, which an authority or a certificate asks for as well. Raises `ValueError`
    and, for files that cannot be used, `OSError`."""
    scheme, _, rest = journal.partition("://")
    hosts, _, prefix = rest.partition("/")  # Not `urlsplit`, which refuses a list of hosts with brackets.
    if scheme not in SCHEMES or not hosts or "?" in rest or "#" in rest:
        raise ValueError(
            f"'{journal}' is not a journal in etcd; write etcd://host1:2379,host2:2379,host3:2379"
        )
    if "@" in hosts:
        raise ValueError("an address must not contain a password; set etcd_user and etcd_password")
    endpoints = []
    for part in hosts.split(","):
        found = ENDPOINT.fullmatch(part)
        port = int(found["port"] or DEFAULT_PORT) if found else 0
        if found is None or not 0 < port < 65536:
            raise ValueError(f"'{part}' is not an etcd address; write host:2379 or [::1]:2379")
        endpoints.append((found["ipv6"] or found["host"], port))
    secure = scheme == "etcds" or ca is not None or cert is not None
    files = [str(file) if file is not None else None for file in (ca, cert, key)]
    address = EtcdAddress(
        endpoints=tuple(endpoints),
        tls=tls_context(*files) if secure else None,
        user=user,
        password=password,
    )
    prefix = f"/{prefix}".rstrip("/") or DEFAULT_PREFIX
    return EtcdLocation(address=address, prefix=prefix)


class Compacted(Exception):
    """etcd no longer has what was at this revision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """Which snapshot counts."""

    snapshot: str
    position: int
    pieces: int
    digest: str
    size_bytes: int = 0
    """0: it was not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a look at the cluster found: who leads, how far the log goes, and at which revision that was."""

    leader: Leader | None
    position: int
    revision: int
    pointer: Pointer | None = None
    """Which snapshot counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChange:
    """One thing that a watch reported."""

    revision: int
    record: Record | None = None
    leader: Leader | None = None
    """Who leads now, where `record` is none; no coordinator, where this is none too."""


class EtcdLog:
    """The requests, one method for each. Raises `ConnectionError` where etcd does not answer: then it is unknown what has happened."""

    def __init__(self, location: EtcdLocation, *, timeout_s: float) -> None:
        self.location = location
        self.client = EtcdClient(location.address, timeout_s=timeout_s)

    def close(self) -> None:
        self.client.close()

    def key(self, name: str) -> str:
        return encode(f"{self.location.prefix}/{name}")

    # --- the leader's key -----------------------------------------------------------------------------------

    def campaign(self, leader: Leader, *, lease_s: float) -> tuple[Leader | None, str, int]:
        """Who leads now, this one's lease where it is this one, and the revision."""
        lease = self.grant(lease_s)
        key = self.key("leader")
        body = msgspec.json.encode({"name": leader.name, "grpc": leader.grpc, "http": leader.http})
        answer = self.client.post(
            "kv/txn",
            {
                "compare": [_is_absent(key)],
                "success": [{"request_put": {"key": key, "value": encode(body), "lease": lease}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        revision = int(answer["header"]["revision"])
        if answer.get("succeeded"):
            return replace(leader, term=revision), lease, revision
        there = answer["responses"][0]["response_range"]
        found = _leader(there)
        if found is not None and found.name == leader.name:
            its_lease = str(there["kvs"][0].get("lease", "0"))
            if its_lease == lease:
                return (
                    found,
                    lease,
                    revision,
                )  # The request has reached etcd before: its first answer was lost.
            self.revoke(its_lease)  # An earlier campaign of this process, which knows nothing of it.
            found = None
        self.revoke(lease)
        return found, "", revision

    def grant(self, lease_s: float) -> str:
        return str(self.client.post("lease/grant", {"TTL": str(max(1, round(lease_s)))})["ID"])

    def renew(self, lease: str) -> bool:
        """Whether the lease lives on."""
        answer = self.client.post("lease/keepalive", {"ID": lease})
        return int(answer.get("result", {}).get("TTL", "0")) > 0

    def revoke(self, lease: str) -> None:
        with suppress(LeaseLost):
            self.client.post("lease/revoke", {"ID": lease})

    def look(self) -> Seen:
        """By a majority: nothing that was acknowledged before is missing."""
        first, last = self.key("log/"), self.key("log0")
        answer = self.client.post(
            "kv/txn",
            {
                "success": [
                    {"request_range": {"key": self.key("leader")}},
                    {
                        "request_range": {
                            "key": first,
                            "range_end": last,
                            "sort_order": "DESCEND",
                            "sort_target": "KEY",
                            "limit": "1",
                            "keys_only": True,
                        }
                    },
                    {"request_range": {"key": self.key("snapshot")}},
                ]
            },
        )
        leader, logged, pointed = (each.get("response_range", {}) for each in answer["responses"])
        pointer = next((_pointer(kv) for kv in pointed.get("kvs", ())), None)
        newest = next((_position(kv) for kv in logged.get("kvs", ())), 0)
        return Seen(
            leader=_leader(leader),
            position=max(newest, pointer.position if pointer is not None else 0),
            revision=int(answer["header"]["revision"]),
            pointer=pointer,
        )

    # --- the log --------------------------------------------------------------------------------------------

    def append(self, record: Record) -> Refusal | None:
        """None: it is written, now."""
        key = self.key(_log_name(record.position))
        answer = self.client.post(
            "kv/txn",
            {
                "compare": [self._is_led(record.term), _is_absent(key)],
                "success": [{"request_put": {"key": key, "value": encode(_encode_record(record))}}],
                "failure": [
                    {"request_range": {"key": self.key("leader")}},
                    {"request_range": {"key": key}},
                ],
            },
        )
        if answer.get("succeeded"):
            return None
        leads, there = (each.get("response_range", {}) for each in answer["responses"])
        found = next((_record(kv) for kv in there.get("kvs", ())), None)
        leader = _leader(leads)
        return Refusal(term=leader.term if leader is not None else 0, found=found)

    def records(self, after: int, *, revision: int = 0, serializable: bool = False) -> Iterator[Record]:
        """What follows a position; as of one revision, where it is given."""
        while True:
            body = {
                "key": self.key(_log_name(after + 1)),
                "range_end": self.key("log0"),
                "limit": str(RECORDS_AT_ONCE),
            }
            found = self._range(body, revision=revision, serializable=serializable).get("kvs", ())
            for kv in found:
                record = _record(kv)
                after = record.position
                yield record
            if len(found) < RECORDS_AT_ONCE:
                return

    def watch(self, revision: int) -> Iterator[list[LogChange]]:
        """Every change of the log and of who leads, from this revision on. Raises `Compacted`."""
        create = {
            "key": self.key("l"),  # `leader` and `log/`, and nothing else
            "range_end": self.key("m"),
            "start_revision": str(revision),
        }
        for message in self.client.stream("watch", {"create_request": create}):
            if int(message.get("compact_revision", "0")):
                raise Compacted
            if message.get("canceled"):
                raise ConnectionError(f"etcd has ended the watch: {message.get('cancel_reason', '')}")
            yield [
                change for event in message.get("events", ()) if (change := self._change(event)) is not None
            ]

    def _change(self, event: dict[str, Any]) -> LogChange | None:
        kv = event["kv"]
        revision, is_put = int(kv["mod_revision"]), event.get("type", "PUT") == "PUT"
        if kv["key"] == self.key("leader"):
            return LogChange(revision=revision, leader=_leader({"kvs": [kv]}) if is_put else None)
        return LogChange(revision=revision, record=_record(kv)) if is_put else None

    # --- snapshots ------------------------------------------------------------------------------------------

    def pointer(self, *, serializable: bool = False) -> tuple[Pointer | None, int]:
        """Which snapshot counts, and the revision of that."""
        answer = self._range({"key": self.key("snapshot")}, serializable=serializable)
        found = next((_pointer(kv) for kv in answer.get("kvs", ())), None)
        return found, int(answer["header"]["revision"])

    def pointed_at(self) -> int:
        """The revision at which the snapshot that counts was named; 0: there is none."""
        answer = self._range({"key": self.key("snapshot")})
        return next((int(kv["mod_revision"]) for kv in answer.get("kvs", ())), 0)

    def point(self, term: int, pointer: Pointer, *, after: int) -> int | None:
        """Name the snapshot that counts from now on, in the place of the one that was named at the revision `after`: the revision of that.
        None: another leads. A request that arrives late, when a further one counts already, changes nothing."""
        key = self.key("snapshot")
        answer = self.client.post(
            "kv/txn",
            {
                "compare": [self._is_led(term), _was_changed_at(key, after)],
                "success": [self.put("snapshot", msgspec.json.encode(pointer))],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return int(answer["header"]["revision"])
        there = answer["responses"][0].get("response_range", {}).get("kvs", ())
        return next((int(kv["mod_revision"]) for kv in there if _pointer(kv) == pointer), None)

    def pieces(self, pointer: Pointer, *, revision: int, serializable: bool = False) -> bytes:
        body = b""
        for first in range(0, pointer.pieces, PIECES_AT_ONCE):
            after = min(first + PIECES_AT_ONCE, pointer.pieces)
            answer = self._range(
                {
                    "key": self.key(_piece_name(pointer.snapshot, first)),
                    "range_end": self.key(_piece_name(pointer.snapshot, after)),
                },
                revision=revision,
                serializable=serializable,
            )
            body += b"".join(decode(kv.get("value", "")) for kv in answer.get("kvs", ()))
        return body

    def change(self, term: int, operations: list[dict[str, Any]]) -> bool:
        """Several changes at once, if this term still leads. Made again, at any time, they do no harm."""
        answer = self.client.post("kv/txn", {"compare": [self._is_led(term)], "success": operations})
        return bool(answer.get("succeeded"))

    def put(self, name: str, value: bytes) -> dict[str, Any]:
        return {"request_put": {"key": self.key(name), "value": encode(value)}}

    def delete(self, first: str, after: str) -> dict[str, Any]:
        return {"request_delete_range": {"key": self.key(first), "range_end": self.key(after)}}

    def usage(self) -> tuple[int, bool]:
        """Of the member that is asked: what counts against its quota; and whether etcd has raised the alarm, after which it refuses
        whatever needs space."""
        answer = self.client.post("maintenance/status", {})
        return int(answer.get("dbSize", "0")), any("NOSPACE" in each for each in answer.get("errors", ()))

    def quota_bytes(self) -> int:
        """0 where it is not known: metrics are served elsewhere, or not to everybody."""
        with suppress(*FAILURES):
            found = re.search(r"^etcd_server_quota_backend_bytes (\S+)$", self.client.metrics(), re.M)
            return int(float(found[1])) if found else 0
        return 0

    def compact(self, revision: int) -> None:
        with suppress(EtcdRefused):  # Another coordinator has, further.
            self.client.post("kv/compaction", {"revision": str(revision)})

    # --- further --------------------------------------------------------------------------------------------

    def agree(self, name: str, value: bytes) -> bytes:
        """What is kept under a name: this value, where there was none."""
        key = self.key(name)
        answer = self.client.post(
            "kv/txn",
            {
                "compare": [_is_absent(key)],
                "success": [{"request_put": {"key": key, "value": encode(value)}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return value
        return decode(answer["responses"][0]["response_range"]["kvs"][0].get("value", ""))

    def under(self, name: str) -> list[tuple[str, bytes]]:
        """Everything that is kept below a name."""
        body = {"key": self.key(f"{name}/"), "range_end": self.key(f"{name}0")}
        start = len(f"{self.location.prefix}/{name}/")
        found = self._range(body).get("kvs", ())
        return [(decode(kv["key"]).decode()[start:], decode(kv.get("value", ""))) for kv in found]

    def mark_of(self, name: str) -> tuple[int, int]:
        """Differs whenever something below a name has been written or deleted: the latest change that is left, and how many
        there are."""
        body = {
            "key": self.key(f"{name}/"),
            "range_end": self.key(f"{name}0"),
            "limit": "1",
            "keys_only": True,
        }
        found = self._range({**body, "sort_order": "DESCEND", "sort_target": "MOD"})
        last = next((int(kv["mod_revision"]) for kv in found.get("kvs", ())), 0)
        return last, int(found.get("count", "0"))

    def keep(self, name: str, value: bytes, *, lease: str = "0") -> None:
        self.client.post("kv/put", {"key": self.key(name), "value": encode(value), "lease": lease})

    def forget(self, name: str) -> None:
        self.client.post("kv/deleterange", {"key": self.key(name)})

    def find(self, name: str, *, serializable: bool = False) -> bytes | None:
        answer = self._range({"key": self.key(name)}, serializable=serializable)
        return next((decode(kv.get("value", "")) for kv in answer.get("kvs", ())), None)

    def _range(
        self, body: dict[str, Any], *, revision: int = 0, serializable: bool = False
    ) -> dict[str, Any]:
        full = {**body, **({"revision": str(revision)} if revision else {}), "serializable": serializable}
        try:
            return self.client.post("kv/range", full)
        except EtcdRefused as refusal:
            if refusal.code == OUT_OF_RANGE:
                raise Compacted from refusal
            raise

    def _is_led(self, term: int) -> dict[str, Any]:
        return {
            "key": self.key("leader"),
            "result": "EQUAL",
            "target": "CREATE",
            "create_revision": str(term),
        }


class EtcdJournal:
    """See `Journal`. One that does not lead can be loaded and followed; `lead` makes it one to append to."""

    def __init__(self, location: EtcdLocation, space: Space, *, timeout_s: float = 2.0) -> None:
        self.location = location
        self.log = EtcdLog(location, timeout_s=timeout_s)
        self.space = EtcdSpace(space, self.log)
        self.tail = Tail()
        """How far this coordinator has read."""
        self.revision = 0
        """Of etcd, when it was loaded: a watch continues after it."""
        self.is_led: Callable[[], bool] = lambda: False
        """Whether there is still hope that an append is not refused."""
        self._appender: Appender | None = None
        self._snapshot_position = 0
        self._snapshot_revision = 0
        self._before = (0, 0)
        self._snapshots = 0
        """Begun in this term."""
        self._since_snapshot: deque[tuple[int, int]] = deque()
        """Position and size of each record after the snapshot that counts."""
        self._log_bytes = self._snapshot_bytes = 0
        self._counting = threading.Lock()

    def __str__(self) -> str:
        return str(self.location)

    @property
    def position(self) -> int:
        """Of the last record that is known here."""
        return self._appender.position if self._appender is not None else self.tail.position

    # --- reading --------------------------------------------------------------------------------------------

    def load(self) -> Iterator[Event]:
        """By a majority of the members; without one, what a member has: a true history, perhaps not all of it."""
        try:
            yield from self._load(serializable=False)
        except ConnectionError as error:
            if isinstance(error, EtcdRefused):
                raise self.unreachable(error) from error
            try:
                yield from self._load(serializable=True)
            except ConnectionError:
                raise self.unreachable(error) from error
            log.warning(
                "etcd at %s has no majority (%s): showing the state of one member, read-only",
                self.location.address,
                error,
            )

    def _load(self, *, serializable: bool) -> list[Event]:
        # All of it before the first event is out: a second attempt starts from nothing.
        for _ in range(LOAD_ATTEMPTS):
            try:
                return self._load_at_one_revision(serializable=serializable)
            except Compacted:
                time.sleep(
                    FIRST_PAUSE_S
                )  # A snapshot was taken meanwhile, or another member does not have this revision yet.
        raise ConnectionError("etcd compacted its history faster than it could be read")

    def _load_at_one_revision(self, *, serializable: bool) -> list[Event]:
        self._check_format(serializable=serializable)
        pointer, revision = self.log.pointer(serializable=serializable)
        events: list[Event] = []
        self.tail = Tail(pointer.position if pointer is not None else 0)
        self._since_snapshot.clear()
        self._log_bytes = self._snapshot_bytes = 0
        if pointer is not None:
            body = self.log.pieces(pointer, revision=revision, serializable=serializable)
            if hashlib.sha256(body).hexdigest() != pointer.digest:
                raise self._damaged(f"has a damaged snapshot ({pointer.snapshot})")
            for batch in self._frames(body):
                events += self._decode(batch)
            self._snapshot_position = pointer.position
            self._snapshot_bytes = len(body)
        for record in self.log.records(self.tail.position, revision=revision, serializable=serializable):
            events += self.take(record)
        self.revision = revision
        return events

    def take(self, record: Record) -> list[Event]:
        """The events that a record completes. Raises `Gap` for one that is too far ahead of what was read."""
        is_new = record.position > self.tail.position
        try:
            body = self.tail.take(record)
        except Gap as gap:
            raise self._damaged(f"has lost events: {gap}") from gap
        except ValueError as error:
            raise self._damaged(f"is inconsistent: {error}") from error
        if is_new:
            self._count(record)
        return self._decode(body) if body is not None else []

    def _count(self, record: Record) -> None:
        with self._counting:
            self._since_snapshot.append((record.position, len(record.body)))
            self._log_bytes += len(record.body)

    def pointed(self, pointer: Pointer) -> None:
        """A snapshot counts that some coordinator has written: what it sums up is no longer needed."""
        with self._counting:
            while self._since_snapshot and self._since_snapshot[0][0] <= pointer.position:
                self._log_bytes -= self._since_snapshot.popleft()[1]
        self._snapshot_bytes = pointer.size_bytes or self._snapshot_bytes

    def _frames(self, body: bytes) -> Iterator[bytes]:
        start = 0
        while start < len(body):
            end = start + FRAME_BYTES + int.from_bytes(body[start : start + FRAME_BYTES], "big")
            if end > len(body):
                raise self._damaged("has an incomplete snapshot")
            yield body[start + FRAME_BYTES : end]
            start = end

    def _decode(self, body: bytes) -> list[Event]:
        try:
            return _decode_events(body)
        except (KeyError, ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise JournalError(
                f"The journal {self} holds events that this version cannot read: {error}.",
                hint="Use the version of Strata that wrote it.",
            ) from error

    # --- writing --------------------------------------------------------------------------------------------

    def lead(self, term: int) -> None:
        """From now on records of this term are appended; all that earlier leaders appended must have been read."""
        self._appender = Appender(term, position=self.tail.position)
        self._change([self.log.put("format", FORMAT.encode())])
        self._snapshot_revision = self._until_known(self.log.pointed_at)

    def append(self, events: Sequence[Event]) -> None:
        appender = self._leading()
        for record in appender.records(_encode_events(events), part_bytes=PART_BYTES):
            fate = "again"
            while fate == "again":
                fate = appender.fate(
                    record, self._until_known(partial(self.log.append, record), patient=True)
                )
            if fate == "deposed":
                raise self._deposed("another coordinator leads")
            if fate == "foreign":
                raise self._damaged(f"has an impossible record at position {record.position}")
            self._count(record)

    def snapshot(self, events: Iterable[Event]) -> None:
        snapshot = self.begin_snapshot()
        every = iter(events)
        while piece := list(islice(every, SNAPSHOT_EVENTS)):
            snapshot.add(piece)
        snapshot.commit()
        while snapshot.clean():
            pass

    def begin_snapshot(self) -> EtcdSnapshot:
        """One that is written beside appends: the history that it is given leads to the state of now."""
        self._snapshots += 1
        return EtcdSnapshot(self, self._leading(), self._snapshots)

    def sizes(self) -> JournalSizes:
        """Of what a coordinator that starts has to read. How much space etcd takes for it, its own metrics say."""
        return JournalSizes(
            file_bytes=self._log_bytes + self._snapshot_bytes,
            story_bytes=self._log_bytes,
            snapshot_bytes=self._snapshot_bytes,
            records=len(self._since_snapshot),
        )

    def put_piece(self, name: str, body: bytes) -> None:
        self._change([self.log.put(name, body)])

    def count_snapshot(self, pointer: Pointer) -> None:
        """From now on this one counts."""
        revision = self._until_known(
            partial(self.log.point, self._leading().term, pointer, after=self._snapshot_revision)
        )
        if revision is None:
            raise self._deposed("another coordinator leads")
        self._before = (self._snapshot_position, self._snapshot_revision)
        self._snapshot_position, self._snapshot_revision = pointer.position, revision
        self.pointed(pointer)

    def clear_before(self, name: str) -> None:
        """What the snapshot that counts has made superfluous."""
        position, revision = self._before
        # Earlier ones alone, so that a request that arrives late takes nothing of a later one. A reader of the one before reads it as
        # of its revision, and a standby that is a little behind finds its records.
        self._change(
            [
                self.log.delete("snapshots/", f"snapshots/{name}/"),
                self.log.delete("log/", _log_name(position + 1)),
            ]
        )
        if revision:  # What was before the one before.
            with suppress(ConnectionError):  # The next one does.
                self.log.compact(revision)

    def _change(self, operations: list[dict[str, Any]]) -> None:
        term = self._leading().term
        if not self._until_known(partial(self.log.change, term, operations)):
            raise self._deposed("another coordinator leads")

    def _until_known(self, request: Callable[[], Answer], *, patient: bool = False) -> Answer:
        """The answer to a request that may be made more than once; raises `Deposed` when there is no hope left, and `JournalFull`
        where etcd has no space, unless it is waited for: what was decided cannot be taken back."""
        pauses = Backoff(first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        try:
            while True:
                try:
                    return request()
                except EtcdRefused as refusal:
                    if refusal.code != NO_SPACE:
                        raise self._deposed(f"etcd refuses to write: {refusal}") from refusal
                    self.space.was_refused(waits=patient)
                    if not patient:
                        message, hint = self.space.explain()
                        raise JournalFull(message, hint=hint) from refusal
                    problem: Exception = refusal
                except ConnectionError as error:
                    problem = error
                if not self.is_led():
                    raise self._deposed(f"etcd cannot be reached: {problem}") from problem
                time.sleep(pauses.pause_s() or 0.0)
        finally:
            self.space.is_blocked = False

    def _leading(self) -> Appender:
        if self._appender is None:
            raise self._deposed("it does not lead")
        return self._appender

    def close(self) -> None:
        self.log.close()

    # --- further --------------------------------------------------------------------------------------------

    def agree(self, name: str, value: bytes) -> bytes:
        """What all coordinators of this journal use under a name: this value, where there was none. Where etcd does not answer, this
        one's: an earlier agreement, if there was one."""
        try:
            return self.log.agree(name, value)
        except FAILURES as error:
            log.warning("cannot check whether other coordinators use the same %s: %s", name, error)
            return value

    # --- errors ---------------------------------------------------------------------------------------------

    def _check_format(self, *, serializable: bool) -> None:
        found = self.log.find("format", serializable=serializable)
        if found is not None and (not found.isdigit() or int(found) > int(FORMAT)):
            raise JournalError(
                f"The journal {self} has format {found.decode(errors='replace')}, written by a newer Strata; this is Strata "
                f"{strata.__version__}, which reads formats up to {FORMAT}.",
                hint="Use the version of Strata that wrote it, or another prefix.",
            )

    def _deposed(self, why: str) -> Deposed:
        return Deposed(f"This coordinator no longer leads: {why}.", hint="It restarts as a standby.")

    def _damaged(self, what: str) -> JournalError:
        return JournalError(
            f"The journal {self} {what}.",
            hint="Restore etcd from a copy, or start with another prefix: etcd://HOSTS/PREFIX.",
        )

    def unreachable(self, error: Exception) -> JournalError:
        return JournalError(
            f"The journal {self} cannot be reached: {error}.",
            hint="Check that etcd is running and that these are its client addresses: etcdctl --endpoints "
            f"{self.location.address} endpoint health",
        )


class EtcdSnapshot:
    """See `Snapshot`. Each `add` is a frame; frames are cut into pieces that etcd takes."""

    def __init__(self, journal: EtcdJournal, appender: Appender, number: int) -> None:
        self._journal = journal
        self._position = appender.position
        # Of its own, and after all earlier ones: no piece of one that counts is ever written over.
        self._name = f"{appender.term:016x}-{number:08x}"
        self._rest = b""
        self._pieces = 0
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._counts = False

    def add(self, events: Sequence[Event]) -> int:
        batch = _encode_events(events)
        self._rest += len(batch).to_bytes(FRAME_BYTES, "big") + batch
        while len(self._rest) >= PART_BYTES:
            self._put(self._rest[:PART_BYTES])
            self._rest = self._rest[PART_BYTES:]
        return len(batch)

    def commit(self) -> None:
        if self._rest:
            self._put(self._rest)
        self._journal.count_snapshot(
            Pointer(
                snapshot=self._name,
                position=self._position,
                pieces=self._pieces,
                digest=self._digest.hexdigest(),
                size_bytes=self._bytes,
            )
        )
        self._counts = True

    def clean(self) -> bool:
        """In one go: etcd deletes ranges. What is left of one that was given up goes with the next."""
        if self._counts:
            self._journal.clear_before(self._name)
        return False

    def _put(self, piece: bytes) -> None:
        self._journal.put_piece(_piece_name(self._name, self._pieces), piece)
        self._digest.update(piece)
        self._bytes += len(piece)
        self._pieces += 1


@contextmanager
def hold(journal: EtcdJournal, *, name: str, lease_s: float = HELD_S) -> Iterator[EtcdJournal]:
    """A journal for one tool alone: loaded, and led. Raises `JournalError` where a coordinator leads with it."""
    try:
        leader, lease, _ = journal.log.campaign(
            Leader(name=f"{name} {secrets.token_hex(4)}", term=0), lease_s=lease_s
        )
    except (*FAILURES, LeaseLost) as error:
        raise journal.unreachable(error) from error
    if not lease or leader is None:
        where = leader.grpc or leader.name if leader is not None else "another"
        raise JournalError(
            f"The journal {journal} is in use: {where} leads.",
            hint="Stop every coordinator that uses it first.",
        )
    try:
        list(journal.load())
        journal.lead(leader.term)
        yield journal
    finally:
        with suppress(*FAILURES):  # It runs out by itself.
            journal.log.revoke(lease)


class EtcdSpace:
    """How much of etcd's quota is left, where its members say so; and the disk beside it, which is never too full for the journal.

    Full is what has less left than the mark; closed what raised etcd's alarm, after which it takes nothing until an operator disarms it.
    """

    def __init__(self, beside: Space, log: EtcdLog) -> None:
        self.beside = beside
        self.is_full = self.is_closed = self.is_blocked = False
        self._log = log
        self._size_bytes = 0
        self._quota_bytes = 0
        """0: not known."""
        self._is_quota_asked_for = False

    @property
    def folder(self) -> Path | str:
        return f"etcd at {self._log.location.address}" if self.is_full else self.beside.folder

    @property
    def free_bytes(self) -> int:
        return max(0, self._quota_bytes - self._size_bytes) if self.is_full else self.beside.free_bytes

    @property
    def total_bytes(self) -> int:
        return self._quota_bytes if self.is_full else self.beside.total_bytes

    @property
    def low_bytes(self) -> int:
        own_bytes = self.beside.low_bytes
        return min(own_bytes, self._quota_bytes // 4) if self._quota_bytes else own_bytes

    def explain(self) -> tuple[str, str]:
        used = (
            f": {megabytes(self._size_bytes)} of its quota of {megabytes(self._quota_bytes)} are used"
            if self._quota_bytes
            else ""
        )
        disarm = " and `etcdctl alarm disarm`" if self.is_closed else ""
        return (
            f"etcd at {self._log.location.address} has no space left{used}.",
            f"Compact it and run `etcdctl defrag --cluster`{disarm}, or raise --quota-backend-bytes; changes are "
            "accepted again automatically. Reading, heartbeats and running training continue.",
        )

    def look(self) -> None:
        self.beside.look()
        try:
            self._size_bytes, is_closed = self._log.usage()
        except FAILURES:
            return  # What was known last counts.
        if self.is_full or not self._is_quota_asked_for:  # An operator may raise it.
            self._is_quota_asked_for = True
            self._quota_bytes = self._log.quota_bytes() or self._quota_bytes
        free_bytes = self._quota_bytes - self._size_bytes
        # A little more than it takes to become full, or the state would flutter.
        enough_bytes = self.low_bytes + self.low_bytes // 2 if self.is_full else self.low_bytes
        self._become(
            full=is_closed or bool(self._quota_bytes and free_bytes < enough_bytes), closed=is_closed
        )

    def was_refused(self, *, waits: bool) -> None:
        self._become(full=True, closed=True)
        self.is_blocked = waits

    def _become(self, *, full: bool, closed: bool) -> None:
        was_full, self.is_full, self.is_closed = self.is_full, full, closed
        if full and not was_full:
            log.error("%s %s", *self.explain())
        elif was_full and not full:
            log.warning(
                "etcd at %s has space again: changes are accepted",
                self._log.location.address,
            )


# --- bytes --------------------------------------------------------------------------------------------------


def _encode_events(events: Iterable[Event]) -> bytes:
    return msgspec.msgpack.encode([(codec.kind_of(event), codec.encode(event)) for event in events])


def _decode_events(body: bytes) -> list[Event]:
    return [codec.decode(kind, event) for kind, event in _EVENTS.decode(body)]


_EVENTS = msgspec.msgpack.Decoder(list[tuple[str, bytes]])
_RECORD = msgspec.msgpack.Decoder(tuple[int, int, int, int, bytes])


def _encode_record(record: Record) -> bytes:
    return msgspec.msgpack.encode((record.term, record.batch, record.part, record.parts, record.body))


def _record(kv: dict[str, Any]) -> Record:
    try:
        term, batch, part, parts, body = _RECORD.decode(decode(kv.get("value", "")))
        return Record(position=_position(kv), term=term, batch=batch, part=part, parts=parts, body=body)
    except (ValueError, msgspec.MsgspecError) as error:
        raise JournalError(
            f"{decode(kv['key']).decode(errors='replace')} in etcd is not a record of a journal: {error}.",
            hint="Restore etcd from a copy, or start with another prefix: etcd://HOSTS/PREFIX.",
        ) from error


def _log_name(position: int) -> str:
    return f"log/{position:016x}"


def _piece_name(snapshot: str, number: int) -> str:
    return f"snapshots/{snapshot}/{number:08x}"


def _position(kv: dict[str, Any]) -> int:
    return int(decode(kv["key"]).rpartition(b"/")[2], 16)


def _pointer(kv: dict[str, Any]) -> Pointer:
    return msgspec.json.decode(decode(kv["value"]), type=Pointer)


def _leader(answer: dict[str, Any]) -> Leader | None:
    for kv in answer.get("kvs", ()):
        facts = msgspec.json.decode(decode(kv.get("value", "")), type=dict[str, str])
        return Leader(
            name=facts.get("name", ""),
            grpc=facts.get("grpc", ""),
            http=facts.get("http", ""),
            term=int(kv["create_revision"]),
        )
    return None


def _was_changed_at(key: str, revision: int) -> dict[str, Any]:
    return {"key": key, "result": "EQUAL", "target": "MOD", "mod_revision": str(revision)}


def _is_absent(key: str) -> dict[str, Any]:
    return {"key": key, "result": "EQUAL", "target": "CREATE", "create_revision": "0"}
