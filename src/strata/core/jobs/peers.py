"""Copies of snapshots in other machines' memory: who keeps them, and what an agent accepts.

Placing (`targets`). A snapshot's part is in the memory of the machines that made it, its holders; so many others get a copy of it
that there are `copies` beside the first. One failure domain never has all of them as long as there is another: a machine is one,
and so is a rack, where machines say in which they are. The same roster gives the same answer everywhere.

Keeping (`CopyTable`). An agent has, for each slot (one part of one run, by whom it is made), the newest complete copy, and one more:
the one before it, which makes way for the next that arrives. A copy is complete when it was verified, and not before. What is of an
earlier generation than the newest that has started, older than what is there, or larger than the budget is refused, with the
reason; a refusal changes nothing. No slot's copies make way for another's: those of a machine that is lost may be the only ones.
They go when a newer generation has a complete snapshot of its own (`settle`), and when the run has ended (`forget`).

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from strata.core.types import CheckpointId

PEER = "PEER"
"""The tier of copies in the memory of agents."""
MOST_COPIES = 8


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Peer:
    """A machine whose agent keeps copies for others."""

    machine: str
    """Agents with the same one share memory, and are lost together."""
    agent: str = ""
    host: str = ""
    """For people."""
    rack: str = ""
    """Empty where it is not known."""
    address: str = ""
    """HOST:PORT."""

    @property
    def domain(self) -> str:
        """What is lost together, as far as is known."""
        return self.rack or self.machine


def copies_wanted(text: str) -> int | None:
    """`peer` is one copy, `peer:2` are two; None for what is no name of this tier. Raises `ValueError`."""
    name, _, number = text.partition(":")
    if name != "peer" or number.startswith("/"):
        return None
    if not number and ":" not in text:
        return 1
    if not number.isascii() or not number.isdecimal() or not 1 <= int(number) <= MOST_COPIES:
        raise ValueError(
            f"'{text}': give the number of copies, 1 to {MOST_COPIES}, as in 'peer:2', or leave it out"
        )
    return int(number)


def targets(sender: str, holders: Collection[str], roster: Iterable[Peer], *, copies: int) -> list[Peer]:
    """Who gets a copy of what the machine `sender` has made. `holders` are all machines that have made the same, it among them.

    As few as there are, where the roster has no more; none where the holders are enough by themselves.
    """
    known = {
        peer.machine: peer for peer in sorted(roster, reverse=True)
    }  # Of a machine with two agents, the first.
    me = known.get(sender, Peer(machine=sender))
    held = {sender, *holders}
    domains = {known[machine].domain if machine in known else machine for machine in held}
    missing = copies + 1 - len(held)
    chosen: list[Peer] = []
    candidates = _around(me, [peer for peer in sorted(known.values()) if peer.machine not in held])
    while candidates and (missing > 0 or len(domains) == 1):
        fresh = [peer for peer in candidates if peer.domain not in domains]
        if not fresh and missing <= 0:
            break  # Another copy in the only domain there is would be of no use.
        peer = (fresh or candidates)[0]
        chosen.append(peer)
        candidates.remove(peer)
        domains.add(peer.domain)
        missing -= 1
    return chosen


def _around(me: Peer, others: Sequence[Peer]) -> list[Peer]:
    """In the order in which this machine asks them: those of other racks first, and not everybody the same one first."""
    elsewhere = [peer for peer in others if peer.domain != me.domain]
    near = [peer for peer in others if peer.domain == me.domain]
    if not me.rack:
        after = [peer for peer in elsewhere if peer.machine > me.machine]
        return [*after, *(peer for peer in elsewhere if peer not in after), *near]
    # The n-th machine of a rack asks the n-th of the next one.
    racks = sorted({peer.domain for peer in elsewhere})
    racks = [*(rack for rack in racks if rack > me.domain), *(rack for rack in racks if rack < me.domain)]
    position = len([peer for peer in near if peer.machine < me.machine])
    ordered: list[Peer] = []
    for rack in racks:
        there = [peer for peer in elsewhere if peer.domain == rack]
        turn = position % len(there)
        ordered += there[turn:] + there[:turn]
    return [*ordered, *near]


# --- what an agent has -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One copy of one part of a snapshot."""

    run: str
    slot: str
    """Which part of the run, by the machine and the process that make it."""
    checkpoint_id: CheckpointId
    generation: int
    sequence: int
    size_bytes: int

    @property
    def order(self) -> tuple[int, int]:
        return (self.generation, self.sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    is_there: bool = False
    """It is complete already: nothing is to be sent."""
    dropped: tuple[Copy, ...] = ()
    """These make way, now: their places may be used for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: str
    is_stale: bool = False
    """It is not wanted any more: its sender is superseded, or late."""


@dataclass(slots=True)
class CopyTable:
    """What one agent has, complete or arriving."""

    budget_bytes: int
    complete: dict[str, list[Copy]] = field(default_factory=dict)
    """By slot, newest first."""
    arriving: dict[str, Copy] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    """Of each run, the newest that has started."""

    @property
    def used_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._everything())

    def fence(self, run: str, generation: int) -> None:
        """A generation of a run has started: what earlier ones send from now on does not count."""
        self.generations[run] = max(generation, self.generations.get(run, 0))

    def begin(self, copy: Copy) -> Accepted | Refused:
        """A copy is about to be sent. What of its slot was arriving is given up: its sender has started over."""
        newest = self.generations.get(copy.run, 0)
        if copy.generation < newest:
            return Refused(
                reason=f"generation {copy.generation} of the run is superseded by {newest}", is_stale=True
            )
        there = self.complete.get(copy.slot, [])
        if any(each.checkpoint_id == copy.checkpoint_id for each in there):
            return Accepted(is_there=True)
        if there and there[0].order >= copy.order:
            return Refused(reason="a newer snapshot of the same part is there", is_stale=True)
        if copy.size_bytes > self.budget_bytes:
            return Refused(reason=f"it is larger than the budget of {self.budget_bytes:,} bytes")
        self.arriving.pop(copy.slot, None)
        older = there[1:]
        free_bytes = self.budget_bytes - self.used_bytes + sum(each.size_bytes for each in older)
        if free_bytes < copy.size_bytes:
            return Refused(
                reason=f"the budget of {self.budget_bytes:,} bytes is used up: {max(free_bytes, 0):,} are left"
            )
        for each in older:
            self._remove(each)
        self.generations[copy.run] = copy.generation
        self.arriving[copy.slot] = copy
        return Accepted(dropped=tuple(older))

    def finish(self, copy: Copy) -> Refused | None:
        """All of it is there and verified: whether it counts."""
        if self.arriving.get(copy.slot) != copy:
            return Refused(reason="it was abandoned meanwhile", is_stale=True)
        newest = self.generations.get(copy.run, 0)
        if copy.generation < newest:
            self.abandon(copy)
            return Refused(
                reason=f"generation {copy.generation} of the run is superseded by {newest}", is_stale=True
            )
        del self.arriving[copy.slot]
        self.complete.setdefault(copy.slot, []).insert(0, copy)
        return None

    def abandon(self, copy: Copy) -> None:
        """Its sender is lost, slow, or has sent something else. What was complete before stays."""
        if self.arriving.get(copy.slot) == copy:
            del self.arriving[copy.slot]

    def discard(self, copy: Copy) -> None:
        """A complete one turned out to be damaged."""
        self._remove(copy)

    def settle(self, run: str, generation: int) -> list[Copy]:
        """This generation has a complete snapshot of its own: what is left of earlier ones, which makes way. A superseded one
        has no say."""
        if generation < self.generations.get(run, 0):
            return []
        old = [
            copy
            for copies in self.complete.values()
            for copy in copies
            if copy.run == run and copy.generation < generation
        ]
        for copy in old:
            self._remove(copy)
        return old

    def forget(self, run: str, generation: int) -> list[Copy]:
        """The run has ended, with this generation: its copies will not be asked for."""
        if generation < self.generations.get(run, 0):
            return []
        removed = [copy for copy in self._everything() if copy.run == run]
        for copy in removed:
            self._remove(copy)
            self.abandon(copy)
        return removed

    def _everything(self) -> list[Copy]:
        return [*(copy for copies in self.complete.values() for copy in copies), *self.arriving.values()]

    def _remove(self, copy: Copy) -> None:
        copies = self.complete.get(copy.slot, [])
        if copy in copies:
            copies.remove(copy)
        if not copies:
            self.complete.pop(copy.slot, None)
