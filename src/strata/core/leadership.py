"""Which of several coordinators leads, what it may append, and when it must stop: one history, written by one leader at a time.

The history is a log of numbered records in a store that all coordinators share (etcd). A **term** is the revision at which a
coordinator created the leader's key; the key hangs on a lease, so that it goes away with a leader that does not renew it. Every record
is written on two conditions, checked by the store in one step with the write: the leader's key is still the one of this term, and
nothing is at this position yet. Hence:

* a leader that was paused, cut off or deposed appends nothing any more, whatever it believes;
* a record that was sent twice, or whose answer was lost, is there once;
* positions have no gaps, and the terms along them never decrease.

A batch of events is one record, or several parts where it is large; it exists when all of its parts do. Parts that were
never completed are followed by a record of another batch, and count for nothing.

What is answered without an append (reading, refusals) rests on the lease: it counts by this coordinator's own clock from when
the renewal was *sent*, less a margin for clocks that run unequally. Beyond it a leader waits for a renewal (**suspended**), and
after a while steps down. The clock must not stop while the machine sleeps. Pure: time arrives as `now_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["standby", "leader", "deposed"]

CLOCK_MARGIN = 0.05
"""By so much of its length a lease counts as over before it is: clocks do not run equally fast."""
PATIENCE_LEASES = 2.0
"""So many lengths of its lease a leader waits suspended before it steps down: while the store elects a leader of its own
no coordinator can renew, and none can take over."""
RENEWALS_PER_LEASE = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """What the leader's key says."""

    name: str
    term: int
    grpc: str = ""
    """HOST:PORT where workers reach it."""
    http: str = ""
    """URL of its API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    position: int
    term: int
    batch: int
    """Counted by its leader, from 0 in each term."""
    part: int
    parts: int
    body: bytes

    def is_same(self, other: Record | None) -> bool:
        """Whether it is this one that was written, and not another one."""
        return other is not None and self.identity == other.identity

    @property
    def identity(self) -> tuple[int, int, int, int]:
        return (self.position, self.term, self.batch, self.part)


class Gap(Exception):
    """A record is missing before this one: the log must be read again from the position after the last."""

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(f"after {expected - 1} comes {found}")
        self.expected = expected


class Tail:
    """The end of the log as one reader has seen it. Records arrive from a watch and from reading, in part twice; batches come out once,
    in order."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        """Of the last record that was taken."""
        self.term = 0
        self._parts: list[Record] = []

    def take(self, record: Record) -> bytes | None:
        """The batch that this record completes, if it does. Raises `Gap`, and `ValueError` for what no leader writes."""
        if record.position <= self.position:
            return None  # Read already; a watch that is opened again repeats some.
        if record.position != self.position + 1:
            raise Gap(self.position + 1, record.position)
        if record.term < self.term:
            raise ValueError(f"record {record.position} is of term {record.term}, after term {self.term}")
        self.position, self.term = record.position, record.term
        if self._parts and not _continues(self._parts[-1], record):
            self._parts = []  # They were never completed.
        if record.part != len(self._parts):
            raise ValueError(
                f"record {record.position} is part {record.part} of a batch that has no beginning"
            )
        self._parts.append(record)
        if len(self._parts) < record.parts:
            return None
        batch = b"".join(part.body for part in self._parts)
        self._parts = []
        return batch


def _continues(last: Record, record: Record) -> bool:
    return (record.term, record.batch, record.part) == (last.term, last.batch, last.part + 1)


Fate = Literal["landed", "again", "deposed", "foreign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The store's answer to an append whose conditions did not hold."""

    term: int
    """Of the leader's key now; 0: there is none."""
    found: Record | None
    """What is at the position."""


class Appender:
    """What the leader of one term appends: one record at a time, each until its fate is known."""

    def __init__(self, term: int, *, position: int) -> None:
        """`position`: of the last record, read after the term began, when no earlier leader could append any more."""
        self.term = term
        self.position = position
        self._batch = 0

    def records(self, body: bytes, *, part_bytes: int) -> list[Record]:
        """A batch as records, to be appended in this order, each after the one before has landed."""
        pieces = [body[start : start + part_bytes] for start in range(0, len(body), part_bytes)] or [b""]
        batch, self._batch = self._batch, self._batch + 1
        return [
            Record(
                position=self.position + 1 + number,
                term=self.term,
                batch=batch,
                part=number,
                parts=len(pieces),
                body=piece,
            )
            for number, piece in enumerate(pieces)
        ]

    def fate(self, record: Record, refusal: Refusal | None) -> Fate:
        """What became of a record, by the store's answer: none for one that was written now. Where no answer came, the same record is
        sent again: it cannot be written twice, and one that is still on its way is this one."""
        if refusal is None:
            self.position = record.position
            return "landed"
        if record.is_same(refusal.found):
            self.position = record.position
            return "landed"  # An earlier attempt, whose answer was lost.
        if refusal.term != self.term:
            return "deposed"
        return "foreign" if refusal.found is not None else "again"


# --- who leads ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Campaign:
    """Ask for a lease and create the leader's key with it, if it is absent."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the store to renew the lease."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """Answer nothing more, and start again as a standby."""

    reason: str


Instruction = Campaign | Renew | StepDown


class Leadership:
    """One coordinator's view of who leads. `deposed` is final: one that was leads again only after starting anew, from the log."""

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self.role: Role = "standby"
        self.term = 0
        self.leader: Leader | None = None
        """As last seen; a leader sees itself."""
        self._seen_revision = 0
        self._seen_s = 0.0
        self._renewed_s = 0.0
        """When the last renewal that was granted had been sent."""
        self._next_renewal_s = 0.0
        self._is_campaigning = False

    # What the store says

    def leader_seen(self, leader: Leader | None, *, revision: int, now_s: float) -> None:
        """What was at the leader's key at a revision; what is older than what is known says nothing."""
        if revision < self._seen_revision:
            return
        self._seen_revision, self._seen_s = revision, now_s
        if self.role == "standby":
            self.leader = leader

    def won(self, leader: Leader, *, sent_s: float) -> None:
        """The key is this coordinator's; the lease was asked for at `sent_s`."""
        self._is_campaigning = False
        if self.role != "standby":
            return
        self.role, self.term, self.leader = "leader", leader.term, leader
        self._seen_revision = max(self._seen_revision, leader.term)
        self._renewed_s = sent_s
        self._next_renewal_s = sent_s + self.lease_s / RENEWALS_PER_LEASE

    def not_won(self, leader: Leader | None, *, revision: int, now_s: float) -> None:
        """Another coordinator was faster, or the store did not answer."""
        self._is_campaigning = False
        if revision:
            self.leader_seen(leader, revision=revision, now_s=now_s)

    def renewed(self, *, sent_s: float) -> None:
        if self.role == "leader":
            self._renewed_s = max(self._renewed_s, sent_s)

    def resign(self) -> None:
        """The lease is over, or an append was refused: another one may lead. Or a standby has missed what cannot be read any more."""
        self.role, self.leader = "deposed", None

    # What follows

    @property
    def patience_s(self) -> float:
        """After so long without an answer of the store a leader steps down, and a standby no longer knows of one."""
        return self.lease_s * (1 + PATIENCE_LEASES)

    def may_answer(self, now_s: float) -> bool:
        """Whether no other coordinator can have led up to now: what is read here is the newest there is."""
        return self.role == "leader" and now_s < self._renewed_s + self.lease_s * (1 - CLOCK_MARGIN)

    def tick(self, now_s: float) -> list[Instruction]:
        """What is to be done now. Called several times in a lease."""
        match self.role:
            case "standby":
                if now_s - self._seen_s >= self.patience_s:
                    self.leader = None  # It is not known whether it still leads: the store does not answer.
                if self.leader is None and not self._is_campaigning:
                    self._is_campaigning = True
                    return [Campaign()]
                return []
            case "leader":
                silent_s = now_s - self._renewed_s
                if silent_s >= self.patience_s:
                    self.resign()
                    return [StepDown(f"its lease could not be renewed for {silent_s:.1f} s")]
                if now_s >= self._next_renewal_s:
                    self._next_renewal_s = now_s + self.lease_s / RENEWALS_PER_LEASE
                    return [Renew()]
                return []
            case "deposed":
                return []


def standby_text(leader: Leader | None) -> str:
    """Why a coordinator that does not lead refuses, and who would not."""
    if leader is None:
        return "this coordinator is a standby; no coordinator leads right now"
    return f"this coordinator is a standby; {leader.grpc or leader.name} leads"
