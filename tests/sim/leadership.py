"""Several coordinators over one store, with the real `core.leadership` and the real `Cluster`: who leads, and what is acknowledged.

The store is linearizable and has leases, as etcd has. Between it and each coordinator requests and answers are delayed, lost,
repeated and reordered, and each direction may be cut by itself; coordinators are killed, paused and have clocks of their own, which
run unequally; the store loses its majority for a while. Clients swap values, read them and meet at barriers, and ask another
coordinator when they get no answer.

After every write and every answer: no record of another term than the leader's lands, positions have no gaps and terms never
decrease, what is acknowledged is in the log, a barrier ends once, an answer is never older than what was acknowledged before it was
asked for, and whoever begins to lead has the state that the whole log leads to. When the faults are over, every client gets on.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from strata.coordinator.journal import codec
from strata.core.cluster import Cluster, Limits
from strata.core.leadership import (
    Appender,
    Campaign,
    Gap,
    Leader,
    Leadership,
    Record,
    Refusal,
    Renew,
    StepDown,
    Tail,
)
from strata.core.messages import (
    SOFT_EVENTS,
    ArriveAtBarrier,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    ClockResumed,
    Command,
    Event,
    Instant,
    Refused,
    Registered,
    RegisterWorker,
    Swapped,
    SwapValue,
    Tick,
    ValueSwapped,
)
from tests.core.builders import arrival, limits, worker_spec
from tests.sim.oracle import must
from tests.sim.scenario import SimulationFailed
from tests.sim.world import World

LEASE_S = 2.0
EXPIRY_LATE_S = 0.5
"""The store looks for leases that are over now and then, as etcd does."""
CLOCK_ERROR = 0.02
FAULTS_END_S = 15.0
LIMIT_S = 120.0
OPERATIONS = 8
"""That each client must get done after the faults."""
PART_BYTES = 300
SNAPSHOT_CHANCE = 0.1
ENDLESS = limits(heartbeat_timeout_s=1e9, disconnect_grace_s=1e9, barrier_timeout_s=1e9)
Reply = Callable[[Any], None]


def encode_events(events: list[Event]) -> bytes:
    return msgspec.msgpack.encode([(codec.kind_of(event), codec.encode(event)) for event in events])


@functools.lru_cache(maxsize=256)
def decode_events(body: bytes) -> tuple[Event, ...]:
    """Read by every coordinator, and the same for each."""
    return tuple(
        codec.decode(kind, event)
        for kind, event in msgspec.msgpack.decode(body, type=list[tuple[str, bytes]])
    )


@dataclass(frozen=True)
class NotLeading:
    """A standby's answer."""

    leader: str


@dataclass(frozen=True)
class Snapshot:
    position: int
    events: list[Event]


class Store:
    """What etcd is: one step at a time, and leases by its own clock."""

    def __init__(self, world: World, oracle: Oracle) -> None:
        self.world, self.oracle = world, oracle
        self.is_up = True
        self.revision = 1
        self.leader: Leader | None = None
        self._lease = 0
        self._expires_s: dict[int, float] = {}
        self.log: dict[int, Record] = {}
        self.snapshot: Snapshot | None = None
        self.watchers: list[Callable[[Record | None, Leader | None, int], None]] = []

    def campaign(self, me: Leader, lease: int) -> tuple[Leader | None, int, int]:
        """Who leads, with which lease, and the revision."""
        if self.leader is None:
            self.revision += 1
            self.leader, self._lease = replace(me, term=self.revision), lease
            self._expires_s[lease] = self.world.now_s + LEASE_S
            self.world.tell(f"{me.name} is elected, term {self.revision}")
            self._watch_expiry(lease)
            self._changed(None)
        return self.leader, self._lease, self.revision

    def renew(self, lease: int) -> bool:
        if lease in self._expires_s:
            self._expires_s[lease] = self.world.now_s + LEASE_S
        return lease in self._expires_s

    def revoke(self, lease: int) -> None:
        if self._lease == lease:
            self._remove_leader()

    def look(self) -> tuple[Leader | None, int]:
        return self.leader, self.revision

    def append(self, record: Record) -> Refusal | None:
        term = self.leader.term if self.leader is not None else 0
        found = self.found(record.position)
        if self.is_led(record.term) and found is None:
            self.revision += 1
            snapshot = self.snapshot.position if self.snapshot is not None else 0
            self.oracle.lands(record, term, snapshot=snapshot)
            self.log[record.position] = record
            self._changed(record)
            return None
        return Refusal(term=term, found=found)

    def is_led(self, term: int) -> bool:
        return self.leader is not None and self.leader.term == term

    def found(self, position: int) -> Record | None:
        return self.log.get(position)

    def take_snapshot(self, term: int, snapshot: Snapshot, *, before: int) -> bool:
        """`before`: where the one is that this takes the place of. One that is late takes no place any more."""
        if not self.may_snapshot(term, before):
            return False
        known = self.snapshot.position if self.snapshot is not None else 0
        must(self.is_led(term), f"a snapshot of term {term} counts in another")
        must(
            snapshot.position >= known,
            f"the snapshot at {snapshot.position} takes the place of the one at {known}",
        )
        self.snapshot = snapshot
        self.log = {position: record for position, record in self.log.items() if position > before}
        return True

    def may_snapshot(self, term: int, before: int) -> bool:
        return self.is_led(term) and before == (self.snapshot.position if self.snapshot is not None else 0)

    def read(self, after: int) -> tuple[Snapshot | None, list[Record], int]:
        """What follows a position, with the snapshot where that is not all there any more."""
        snapshot = self.snapshot
        known = snapshot is None or after >= snapshot.position or (after > 0 and after + 1 in self.log)
        start = after if known or snapshot is None else snapshot.position
        records = [record for position, record in sorted(self.log.items()) if position > start]
        return None if known else snapshot, records, self.revision

    def lose_majority(self, seconds_s: float) -> None:
        self.world.tell(f"the store has no majority for {seconds_s:.1f} s")
        self.is_up = False

        def back() -> None:
            self.is_up = True
            for lease in self._expires_s:  # Whoever leads etcd anew gives every lease its whole length.
                self._expires_s[lease] = max(self._expires_s[lease], self.world.now_s + LEASE_S)
                self._watch_expiry(lease)

        self.world.after(seconds_s, back)

    def _watch_expiry(self, lease: int) -> None:
        def look() -> None:
            expires_s = self._expires_s.get(lease)
            if expires_s is None or not self.is_up:
                return
            if self.world.now_s < expires_s:
                late_s = self.world.between(0, EXPIRY_LATE_S) if self.world.chance(0.7) else 0.0
                self.world.after(expires_s - self.world.now_s + late_s + 1e-6, look)
            elif self._lease == lease:
                self._remove_leader()

        look()

    def _remove_leader(self) -> None:
        if self.leader is not None:
            self.world.tell(f"nobody leads: the key of {self.leader.name} is gone")
            self.revision += 1
            self.leader = None
            self._expires_s.pop(self._lease, None)
            self._lease = 0
            self._changed(None)

    def _changed(self, record: Record | None) -> None:
        for watcher in self.watchers:
            watcher(record, self.leader, self.revision)


class Links:
    """Between the store and each coordinator, and between clients and coordinators."""

    def __init__(self, world: World, store: Store) -> None:
        self.world, self.store = world, store
        self.loss = self.doubling = 0.0
        self.cut_to: set[str] = set()
        self.cut_from: set[str] = set()

    def ask(self, name: str, request: Callable[[], Any], answer: Reply) -> None:
        for _ in range(2 if self.world.chance(self.doubling) else 1):
            self._deliver(name, self.cut_to, partial(self._arrive, name, request, answer))

    def _arrive(self, name: str, request: Callable[[], Any], answer: Reply) -> None:
        if self.store.is_up:
            self.say(name, partial(answer, request()))

    def say(self, name: str, deliver: Callable[[], None]) -> None:
        self._deliver(name, self.cut_from, deliver)

    def _deliver(self, name: str, cut: set[str], deliver: Callable[[], None]) -> None:
        if self.world.chance(self.loss):
            return
        delay_s = self.world.between(0.3, 4.0) if self.world.chance(0.02) else self.world.between(0.001, 0.01)
        self.world.after(delay_s, lambda: deliver() if name not in cut else None)


class Oracle:
    def __init__(self, world: World, limits: Limits = ENDLESS) -> None:
        self.world, self.limits = world, limits
        self.committed: list[Event] = []
        self._tail = Tail()
        self._landed: dict[int, Record] = {}
        self._versions: dict[str, int] = {}
        """By key: the newest that was acknowledged, or answered."""
        self._durable: set[tuple[str, int]] = set()
        self._ended: Counter[tuple[str, str, int, int]] = Counter()
        self._outcomes: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def lands(self, record: Record, term: int, *, snapshot: int) -> None:
        must(record.term == term, f"a record of term {record.term} lands in term {term}")
        if record.position <= snapshot:
            # Sent twice, and the second was on its way until the first was summed up: nobody reads it, and it says the same.
            must(self._landed.get(record.position) == record, f"position {record.position} is written anew")
            self.counts["late"] += 1
            return
        self._landed[record.position] = record
        must(
            record.position == self._tail.position + 1,
            f"position {record.position} lands after {self._tail.position}",
        )
        must(record.term >= self._tail.term, "appends of two leaders interleave")
        body = self._tail.take(record)
        self.counts["parts" if record.parts > 1 else "records"] += 1
        if body is not None:
            self.completed(record, decode_events(body))

    def completed(self, record: Record, events: Sequence[Event]) -> None:
        """A batch is in the log."""
        for event in events:
            self.committed.append(event)
            if isinstance(event, ValueSwapped):
                self._durable.add((event.key, event.version))
            if isinstance(event, BarrierReleased | BarrierBroken):
                key = (str(event.job_id), event.barrier_id, event.step, event.round)
                self._ended[key] += 1
                must(self._ended[key] == 1, f"barrier {key} ends twice")

    def newest(self, key: str) -> int:
        return self._versions.get(key, 0)

    def answered(self, key: str, version: int, *, asked_at: int, made: bool) -> None:
        if made:
            must(
                (key, version) in self._durable, f"{key} version {version} is acknowledged and not in the log"
            )
            self.counts["swaps"] += 1
        else:
            self.counts["reads"] += 1
        must(version >= asked_at, f"{key}: version {asked_at} was known, and then {version} is answered")
        self._versions[key] = max(self.newest(key), version)

    def met(self, call_id: str, outcome: BarrierReleased | BarrierBroken) -> None:
        key = (str(outcome.job_id), outcome.barrier_id, outcome.step, outcome.round)
        must(self._ended[key] == 1, f"{call_id} hears of an end of {key} that is not in the log")
        said = self._outcomes.setdefault(call_id, type(outcome).__name__)
        must(said == type(outcome).__name__, f"{call_id} hears of two ends")
        self.counts["meetings"] += 1

    def replayed(self) -> Cluster:
        cluster = self.new_cluster()
        for event in self.committed:
            cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        return cluster

    def new_cluster(self) -> Cluster:
        return Cluster(self.limits)

    def leads(self, cluster: Cluster) -> None:
        self.counts["terms"] += 1
        must(
            cluster.compact() == self.replayed().compact(),
            "a leader begins with another state than the log's",
        )


class SimLeader:
    """One coordinator. `life` counts its starts: what was under way in an earlier one is void."""

    def __init__(self, name: str, world: World, store: Store, links: Links, oracle: Oracle) -> None:
        self.name, self.world, self.store, self.links, self.oracle = name, world, store, links, oracle
        self._rate = 1 + world.between(-CLOCK_ERROR, CLOCK_ERROR)
        self._offset_s = world.between(0, 1e6)
        self.wall_jump_s = 0.0
        self.life = 0
        self.paused = False
        self.paused_s = 0.0
        self._paused_at_s = 0.0
        self._deferred: list[Callable[[], None]] = []
        self.is_running = False
        store.watchers.append(self._watched)
        self.start()

    # --- time, life, pauses ---------------------------------------------------------------------------------

    def now_s(self) -> float:
        return self._offset_s + self.world.now_s * self._rate

    def _mine(self, action: Callable[..., None]) -> Callable[..., None]:
        """An action of this life; while the process is paused it waits."""
        life = self.life

        def act(*arguments: Any) -> None:
            if self.life != life or not self.is_running:
                return
            if self.paused:
                self._deferred.append(partial(act, *arguments))
            else:
                action(*arguments)

        return act

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.after(delay_s, self._mine(action))

    def start(self) -> None:
        if self.is_running:
            return
        self.life += 1
        self.is_running = True
        self.leadership = Leadership(lease_s=LEASE_S)
        self.cluster = self.oracle.new_cluster()
        self.tail = Tail()
        self._me = Leader(name=f"{self.name}.{self.life}", term=0)
        self._appender: Appender | None = None
        self._lease = 0
        self._campaigned_s = 0.0
        self.serves = self._ticks = False
        self._is_reading = False
        self._in_flight: list[Record] = []
        self._events: list[Event] = []
        self._answers: list[Callable[[], None]] = []
        self._queue: list[tuple[Any, Reply]] = []
        self._waiting: dict[tuple[str, int, int], list[Reply]] = {}
        self._snapshot_position = 0
        self._load()

    def crash(self) -> None:
        self.world.tell(f"{self.name} is killed")
        self.is_running = False
        self.paused = False
        self._deferred.clear()

    def pause(self) -> None:
        if self.is_running and not self.paused:
            self.world.tell(f"{self.name} is paused")
            self.paused, self._paused_at_s = True, self.world.now_s

    def wake(self) -> None:
        if self.paused:
            self.world.tell(f"{self.name} wakes")
            self.paused = False
            self.paused_s += self.world.now_s - self._paused_at_s
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                action()

    def restart(self, why: str) -> None:
        self.world.tell(f"{self.name} starts again: {why}")
        self.is_running = False
        self.world.after(self.world.between(0.05, 0.5), self.start)

    # --- following ------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """From nothing, until it is answered."""
        if not self._ticks:
            self._read(self._loaded)
            self._after(0.5, self._load)

    def _loaded(self) -> None:
        if not self._ticks:
            self._ticks = True
            self._tick()
            self._look()

    def _read(self, then: Callable[[], None]) -> None:
        self._is_reading = True

        def read(found: tuple[Snapshot | None, list[Record], int]) -> None:
            if self.serves:
                return  # The answer to a repetition.
            self._is_reading = False
            snapshot, records, _ = found
            if snapshot is not None and self.tail.position < snapshot.position:
                if self.tail.position:
                    self.restart("what it has not seen is not there any more")
                    return
                for event in snapshot.events:
                    self.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
                self.tail = Tail(snapshot.position)
            try:
                for record in records:
                    self._take(record)
            except Gap:
                self.restart("what it has not seen is not there any more")
                return
            then()

        after = self.tail.position
        self.links.ask(self.name, lambda: self.store.read(after), self._mine(read))

    def _take(self, record: Record) -> None:
        body = self.tail.take(record)
        for event in decode_events(body) if body is not None else ():
            self.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))

    def _watched(self, record: Record | None, leader: Leader | None, revision: int) -> None:
        for _ in range(2 if self.world.chance(0.05) else 1):
            self.links.say(self.name, self._mine(partial(self._news, record, leader, revision)))

    def _news(self, record: Record | None, leader: Leader | None, revision: int) -> None:
        if self.leadership.role != "standby" or not self._ticks:
            return
        if record is None:
            if leader is None or leader.name != self._me.name:
                self.leadership.leader_seen(leader, revision=revision, now_s=self.now_s())
            return
        try:
            self._take(record)
        except Gap:
            if not self._is_reading:
                self._read(lambda: None)
                self._after(0.5, self._read_failed)

    def _read_failed(self) -> None:
        self._is_reading = False

    # --- leading --------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        for instruction in self.leadership.tick(self.now_s()):
            match instruction:
                case Campaign():
                    self._campaign()
                case Renew():
                    self._renew()
                case StepDown(reason=reason):
                    self.restart(reason)
                    return
        self._after(LEASE_S / 8, self._tick)

    def _look(self) -> None:
        def seen(found: tuple[Leader | None, int]) -> None:
            leader, revision = found
            if leader is None or leader.name != self._me.name:
                self.leadership.leader_seen(leader, revision=revision, now_s=self.now_s())

        if self.leadership.role == "standby":
            self.links.ask(self.name, self.store.look, self._mine(seen))
            self._after(0.5, self._look)

    def _campaign(self) -> None:
        lease = self.world.random.getrandbits(40)
        sent_s = self.now_s()
        self._campaigned_s = sent_s

        def answered(found: tuple[Leader | None, int, int]) -> None:
            leader, its_lease, revision = found
            won = its_lease == lease
            if self._campaigned_s != sent_s:
                if won and lease != self._lease:
                    self.links.ask(self.name, lambda: self.store.revoke(lease), lambda _: None)
                return
            self._campaigned_s = 0.0
            if leader is not None and leader.name == self._me.name and not won:
                # An earlier campaign, whose answer was lost.
                self.links.ask(self.name, lambda: self.store.revoke(its_lease), lambda _: None)
                self.leadership.not_won(None, revision=0, now_s=self.now_s())
            elif won and leader is not None:
                self._lease = lease
                self.leadership.won(leader, sent_s=sent_s)
                self._take_over()
            else:
                self.leadership.not_won(leader, revision=revision, now_s=self.now_s())

        def unanswered() -> None:
            if self._campaigned_s == sent_s:
                self._campaigned_s = 0.0
                self.leadership.not_won(None, revision=0, now_s=self.now_s())

        self.links.ask(self.name, lambda: self.store.campaign(self._me, lease), self._mine(answered))
        self._after(1.0, unanswered)

    def _renew(self) -> None:
        sent_s, lease = self.now_s(), self._lease

        def answered(lives: bool) -> None:
            if lives:
                self.leadership.renewed(sent_s=sent_s)
            elif self.leadership.role == "leader":
                self.leadership.resign()
                self.restart("its lease has run out")

        self.links.ask(self.name, lambda: self.store.renew(lease), self._mine(answered))

    def _take_over(self) -> None:
        """Read what earlier leaders have appended; until it is answered."""
        if self.leadership.role == "leader" and not self.serves:
            self._read(self._lead)
            self._after(0.4, self._take_over)

    def _lead(self) -> None:
        if self.serves:
            return
        self._appender = Appender(self.leadership.term, position=self.tail.position)
        self._snapshot_position = self.store.snapshot.position if self.store.snapshot is not None else 0
        if self.store.is_led(
            self.leadership.term
        ):  # If not, it leads nobody any more, and every append shows it.
            self.oracle.leads(self.cluster)
        self.cluster.observe(ClockResumed(), self._instant())
        self.serves = True
        self.world.tell(f"{self.name} leads from position {self.tail.position}")

    def _instant(self) -> Instant:
        return Instant(mono_s=self.now_s(), wall_s=1.7e9 + self.world.now_s + self.wall_jump_s)

    def leads(self) -> bool:
        return self.serves and self.leadership.role == "leader"

    def may_answer(self) -> bool:
        return self.leads() and self.leadership.may_answer(self.now_s())

    # --- commands -------------------------------------------------------------------------------------------

    def receive(self, what: Any, reply: Reply) -> None:
        """A command, or a question to the cluster."""
        self._mine(self._accept)(what, reply)

    def _accept(self, what: Any, reply: Reply) -> None:
        if not self.leads():
            self._refuse(reply)
            return
        self._queue.append((what, reply))
        self._after(self.world.between(0, 0.002), self._process)

    def _refuse(self, reply: Reply) -> None:
        leader = self.leadership.leader
        reply(NotLeading(leader.name.partition(".")[0] if leader is not None else ""))

    def _process(self) -> None:
        if self._in_flight or not self._queue or not self.leads():
            return
        batch, self._queue = self._queue, []
        now = self._instant()
        events: list[Event] = list(self.cluster.handle(Tick(), now).events)
        answers: list[Callable[[], None]] = []
        refusals: list[Callable[[], None]] = []
        for what, reply in batch:
            refusals.append(partial(self._refuse, reply))
            if callable(what):
                answers.append(partial(reply, what(self.cluster)))
                continue
            try:
                decision = self.cluster.handle(cast(Command, what), now)
            except Refused as refusal:
                answers.append(partial(reply, refusal))
                continue
            events += decision.events
            if isinstance(decision.reply, BarrierTicket):
                answers.append(partial(self._wait, decision.reply, reply))
            else:
                answers.append(partial(reply, decision.reply))
        answers += [partial(self._end, e) for e in events if isinstance(e, BarrierReleased | BarrierBroken)]
        hard: list[Event] = [event for event in events if not isinstance(event, SOFT_EVENTS)]
        if hard:
            assert self._appender is not None
            self._events, self._answers = hard, answers
            self._in_flight = self._appender.records(encode_events(hard), part_bytes=PART_BYTES)
            self._send(self._in_flight[0])
            return
        # Between deciding and answering anything may happen to this process.
        self._after(self.world.between(0, 0.01), partial(self._answer_unwritten, answers, refusals))

    def _answer_unwritten(
        self, answers: list[Callable[[], None]], refusals: list[Callable[[], None]]
    ) -> None:
        confirmed = self.is_confirmed()
        if confirmed and self.store.is_up:
            must(
                self.store.is_led(self.leadership.term),
                f"{self.name} answers without writing, and does not lead",
            )
        for action in answers if confirmed else refusals:
            action()
        if self._queue:
            self._process()

    def is_confirmed(self) -> bool:
        return self.may_answer()

    def _send(self, record: Record) -> None:
        """Until its fate is known."""
        if not self._in_flight or self._in_flight[0] != record:
            return

        def answered(refusal: Refusal | None) -> None:
            assert self._appender is not None
            if not self._in_flight or self._in_flight[0] != record:
                return  # The answer to a repetition.
            fate = self._appender.fate(record, refusal)
            if fate == "landed":
                self._in_flight.pop(0)
                self._landed()
            elif fate == "deposed":
                self.leadership.resign()
                self.restart("an append was refused")
            elif fate == "foreign":
                must(False, f"somebody else's record is at {record.position}")

        self.links.ask(self.name, lambda: self.store.append(record), self._mine(answered))
        self._after(0.5, partial(self._resend, record))

    def _resend(self, record: Record) -> None:
        self._send(record)

    def _landed(self) -> None:
        if self._in_flight:
            self._send(self._in_flight[0])
            return
        assert self._appender is not None
        self.tail.position = self._appender.position
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()
        if self.world.chance(SNAPSHOT_CHANCE):
            self._take_snapshot()
        if self._queue:
            self._after(0.0, self._process)

    def _take_snapshot(self) -> None:
        assert self._appender is not None
        snapshot = Snapshot(self._appender.position, self.cluster.compact())
        term, before = self._appender.term, self._snapshot_position

        def taken(_: bool) -> None:
            self._snapshot_position = max(self._snapshot_position, snapshot.position)

        self.links.ask(
            self.name,
            lambda: self.store.take_snapshot(term, snapshot, before=before),
            self._mine(taken),
        )

    def _wait(self, ticket: BarrierTicket, reply: Reply) -> None:
        if ticket.outcome is not None:
            reply(ticket.outcome)
        else:
            self._waiting.setdefault((ticket.barrier_id, ticket.step, ticket.round), []).append(reply)

    def _end(self, event: BarrierReleased | BarrierBroken) -> None:
        for reply in self._waiting.pop((event.barrier_id, event.step, event.round), []):
            reply(event)


class Client:
    """Does one thing after another; asks the next coordinator when it gets no answer, or a standby's."""

    timeout_s = 1.0

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.scenario, self.world, self.oracle, self.name = scenario, scenario.world, scenario.oracle, name
        self.done = 0
        self._target = self.world.random.choice(list(scenario.coordinators))
        self._call = 0

    def next(self) -> None:
        raise NotImplementedError

    def ask(self, what: Any, then: Reply) -> None:
        self._call += 1
        call = self._call
        coordinator = self.scenario.coordinators[self._target]

        def answered(answer: Any) -> None:
            if call != self._call:
                return
            self._call += 1
            if isinstance(answer, NotLeading):
                self._turn(answer.leader)
                self.world.after(self.world.between(0.02, 0.2), lambda: self.ask(what, then))
            else:
                then(answer)

        def unanswered() -> None:
            if call == self._call:
                self._turn("")
                self.ask(what, then)

        self._travel(lambda: coordinator.receive(what, lambda answer: self._travel(lambda: answered(answer))))
        self.world.after(self.timeout_s, unanswered)

    def _travel(self, deliver: Callable[[], None]) -> None:
        if not self.world.chance(self.scenario.links.loss):
            slow = self.world.chance(0.02)
            self.world.after(
                self.world.between(0.2, 2.0) if slow else self.world.between(0.001, 0.01), deliver
            )

    def _turn(self, leader: str) -> None:
        names = list(self.scenario.coordinators)
        self._target = leader or names[(names.index(self._target) + 1) % len(names)]

    def again(self) -> None:
        self.done += 1
        self.world.after(self.world.between(0.0, 0.3), self.next)


class Swapper(Client):
    """Swaps a value that others swap too."""

    def __init__(self, scenario: Scenario, name: str, keys: int) -> None:
        super().__init__(scenario, name)
        self._keys = keys
        self._versions: dict[str, int] = {}

    def next(self) -> None:
        key = f"k{self.world.random.randrange(self._keys)}"
        asked_at = self.oracle.newest(key)
        size = 900 if self.world.chance(0.2) else 20  # Some batches are several records.
        if self.world.chance(0.3):
            self.ask(lambda cluster: cluster.values.get(key), partial(self._read, key, asked_at))
            return
        command = SwapValue(
            key=key, body=self.name.encode() * size, expected_version=self._versions.get(key, 0), soft=False
        )
        self.ask(command, partial(self._swapped, key, asked_at))

    def _read(self, key: str, asked_at: int, value: Any) -> None:
        version = value.version if value is not None else 0
        self._versions[key] = version
        self.oracle.answered(key, version, asked_at=asked_at, made=False)
        self.again()

    def _swapped(self, key: str, asked_at: int, answer: Any) -> None:
        assert isinstance(answer, Swapped)
        self._versions[key] = answer.version
        self.oracle.answered(key, answer.version, asked_at=asked_at, made=answer.made)
        self.again()


class Meeter(Client):
    """Registers, then meets the others at one barrier after another. A call that is repeated is the same call."""

    timeout_s = 3.0

    def __init__(self, scenario: Scenario, name: str) -> None:
        super().__init__(scenario, name)
        self.incarnation = 0
        self.step = 0

    def next(self) -> None:
        if not self.incarnation:
            spec = worker_spec(self.name)
            self.ask(RegisterWorker(spec=spec, registration_id=f"r-{self.name}"), self._registered)
            return
        command: ArriveAtBarrier = arrival(
            self.name,
            step=self.step,
            incarnation=self.incarnation,
            expected=self.scenario.meeters,
            call_id=f"{self.name}-{self.step}",
        )
        self.ask(command, self._met)

    def _registered(self, answer: Any) -> None:
        assert isinstance(answer, Registered)
        self.incarnation = answer.incarnation
        self.again()

    def _met(self, answer: Any) -> None:
        if isinstance(answer, Refused):  # The others are not there yet.
            self.world.after(0.1, self.next)
            return
        self.oracle.met(f"{self.name}-{self.step}", answer)
        if isinstance(answer, BarrierReleased):
            self.step += 1
        self.again()


@dataclass(frozen=True, kw_only=True)
class Result:
    seed: int
    ended_s: float
    counts: Counter[str]
    fingerprint: str


class Scenario:
    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.oracle = Oracle(world)
        self.store = Store(world, self.oracle)
        self.links = Links(world, self.store)
        names = "abc"[: world.random.randint(2, 3)]
        self.coordinators = {
            name: SimLeader(name, world, self.store, self.links, self.oracle) for name in names
        }
        self.meeters = world.random.randint(1, 3)
        keys = world.random.randint(1, 3)
        self.clients: list[Client] = [Swapper(self, f"s{n}", keys) for n in range(world.random.randint(2, 4))]
        self.clients += [Meeter(self, f"w{n}") for n in range(self.meeters)]
        self._needed: list[int] | None = None

    def run(self) -> Result:
        try:
            self._begin()
            ended = self.world.run(until=self._is_over, limit_s=LIMIT_S)
            must(ended, f"nobody gets on, though all faults ended at {FAULTS_END_S} s")
            self._check_end()
        except SimulationFailed:
            raise
        except Exception as error:  # A failure without its seed and story is worth nothing.
            raise SimulationFailed(self.world, error, kind="--leadership") from error
        story = "\n".join(self.world.story).encode()
        fingerprint = hashlib.sha256(story + repr(sorted(self.oracle.counts.items())).encode()).hexdigest()
        return Result(
            seed=self.world.seed,
            ended_s=self.world.now_s,
            counts=self.oracle.counts,
            fingerprint=fingerprint,
        )

    def _begin(self) -> None:
        world = self.world
        for client in self.clients:
            world.after(world.between(0.0, 0.5), client.next)
        world.after(0.3, self._faults_begin)
        world.after(FAULTS_END_S, self._faults_end)

    def _is_over(self) -> bool:
        if self._needed is None:
            return False
        return all(client.done >= needed for client, needed in zip(self.clients, self._needed, strict=True))

    def _faults_begin(self) -> None:
        world = self.world
        self.links.loss = world.random.choice([0.0, 0.0, 0.02, 0.1])
        self.links.doubling = world.random.choice([0.0, 0.05, 0.2])
        for _ in range(world.random.randint(1, 10)):
            world.after(world.between(0.2, FAULTS_END_S - 2.0), self._fault)

    def _fault(self) -> None:
        world = self.world
        leading = [each for each in self.coordinators.values() if each.leads()]
        anybody = world.random.choice(list(self.coordinators.values()))
        one = leading[0] if leading and world.chance(0.7) else anybody
        match world.random.choice(["pause", "pause", "pause", "kill", "cut", "cut", "majority", "clock"]):
            case "pause":
                one.pause()
                world.after(world.between(0.1, 7.0), one.wake)
            case "kill":
                one.crash()
                world.after(world.between(0.1, 4.0), one.start)
            case "cut":
                ways = world.random.choice(
                    [[self.links.cut_to], [self.links.cut_from], [self.links.cut_to, self.links.cut_from]]
                )
                world.tell(f"{one.name} is cut off from the store, {len(ways)} of two directions")
                for way in ways:
                    way.add(one.name)
                    world.after(world.between(0.3, 6.0), partial(way.discard, one.name))
            case "majority":
                self.store.lose_majority(world.between(0.3, 6.0))
            case _:
                one.wall_jump_s += world.random.choice([-3600.0, -1.0, 1.0, 3600.0])

    def _faults_end(self) -> None:
        self.world.tell("the faults end")
        self.links.loss = self.links.doubling = 0.0
        self.links.cut_to.clear()
        self.links.cut_from.clear()
        for coordinator in self.coordinators.values():
            coordinator.wake()
            coordinator.start()
        self._needed = [client.done + OPERATIONS for client in self.clients]

    def _check_end(self) -> None:
        """Whoever leads has the state of the log, apart from what only time and softness bring about."""
        replayed = {key: value.body for key, value in self.oracle.replayed().values.durable.items()}
        for coordinator in self.coordinators.values():
            if coordinator.may_answer() and not coordinator._in_flight:
                found = {key: value.body for key, value in coordinator.cluster.values.durable.items()}
                must(found == replayed, f"{coordinator.name} leads with other values than the log's")


def simulate(seed: int) -> Result:
    return Scenario(seed).run()
