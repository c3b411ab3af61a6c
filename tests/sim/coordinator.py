"""A coordinator around the real core: a queue, a journal with group commit, and crashes at any point.

It keeps the order of the real engine: decide and apply a batch, make its facts durable, and only then answer.
What is on disk are encoded events; a restart decodes them and replays. The disk may be full for a while: then the real
engine's rule says which commands are decided, wait or are refused, and a commit that fails is made with the reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

from strata.coordinator.engine import when_full
from strata.coordinator.journal import codec
from strata.core.cluster import Cluster, Limits
from strata.core.messages import (
    SOFT_EVENTS,
    ArriveAtBarrier,
    ArriveTogether,
    BarrierBroken,
    BarrierReleased,
    BarrierTicket,
    BarrierTickets,
    ClockResumed,
    Command,
    Event,
    Heartbeat,
    Instant,
    Observation,
    Rebalance,
    ReconcileCheckpoints,
    Reconciled,
    Refused,
    ReportRecovery,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
    WorkerId,
)
from tests.core.builders import NOTHING_TO_REPORT
from tests.sim.oracle import Oracle
from tests.sim.world import Network, World

TICK_S = 0.25
SNAPSHOT_CHANCE = 0.03
CRASH_WHILE_ANSWERING_CHANCE = 0.002

Outcome = BarrierReleased | BarrierBroken
Round = tuple[str, str, int, int]
Query = Callable[[Cluster], Any]


@dataclass(frozen=True)
class Request:
    worker: str
    what: Command | Query
    answer: Callable[[Any], None]
    each: Callable[[ArriveAtBarrier, Any], None] | None = None
    """Of arrivals that came together, on a stream that keeps its order: the answer to each, as soon as there is one."""


class Disk:
    """What survives: a snapshot and every event since, as bytes."""

    def __init__(self) -> None:
        self._snapshot: list[tuple[str, bytes]] = []
        self._tail: list[tuple[str, bytes]] = []

    def append(self, events: Iterable[Event]) -> None:
        self._tail += [(codec.kind_of(event), codec.encode(event)) for event in events]

    @property
    def position(self) -> int:
        """How many events came after the snapshot."""
        return len(self._tail)

    def snapshot(self, events: Iterable[Event], *, position: int) -> None:
        """In place of all that came up to then."""
        self._snapshot = [(codec.kind_of(event), codec.encode(event)) for event in events]
        self._tail = self._tail[position:]

    def load(self) -> list[Event]:
        return [codec.decode(kind, body) for kind, body in (*self._snapshot, *self._tail)]


class Reachable(Protocol):
    """What a client knows of whoever coordinates."""

    @property
    def listener(self) -> Oracle: ...

    def receive(self, request: Request) -> None: ...

    def beat(self, worker: WorkerId, incarnation: int, *, connects: bool) -> None: ...

    def dropped(self, worker: WorkerId, incarnation: int) -> None: ...


class Hosting(Reachable, Protocol):
    """What a stream needs of its other end."""

    @property
    def boot(self) -> int: ...

    @property
    def is_up(self) -> bool: ...

    def admit(self, worker: WorkerId, incarnation: int) -> None: ...


class Decisions:
    """One batch after another: decide and apply, make it durable, and only then answer."""

    world: World
    cluster: Cluster | None
    observer: Oracle
    """Who watches what is decided."""
    listener: Oracle
    """Who watches what is answered."""
    _queue: list[Request]
    _waiting: dict[Round, list[Request]]
    _for_space: list[Request]
    _is_full: bool

    @property
    def is_writing(self) -> bool:
        raise NotImplementedError

    def _now(self) -> Instant:
        raise NotImplementedError

    def _write(self, events: list[Event], answers: list[Callable[[], None]]) -> None:
        raise NotImplementedError

    def _answer(self, answers: list[Callable[[], None]]) -> None:
        """What was decided needs no writing."""
        raise NotImplementedError

    def _say(self, request: Request, answer: object) -> None:
        raise NotImplementedError

    # --- one batch ------------------------------------------------------------------------------------------

    def _process(self, *, tick: bool = False) -> None:
        if self.is_writing or self.cluster is None:
            return
        now, cluster = self._now(), self.cluster
        batch, self._queue = self._queue, []
        events: list[Event] = []
        answers: list[Callable[[], None]] = []
        for request in batch:
            if callable(request.what):
                answers.append(partial(self._answer_query, request))
                continue
            if self._is_full and (fate := when_full(request.what)) != "decide":
                self.listener.storage_refusals += 1
                if fate == "wait":
                    self._for_space.append(request)
                continue  # Refused, and asked again later.
            events += self._decide(request, request.what, now, answers)
        if tick:
            events += self._apply(cluster, Tick(), now)
        if cluster.plans_are_stale:
            events += self._apply(cluster, Rebalance(), now)
        answers += [partial(self._end, event) for event in events if isinstance(event, Outcome)]
        self.observer.settled(cluster, events)
        hard: list[Event] = [event for event in events if not isinstance(event, SOFT_EVENTS)]
        if not hard:
            self._answer(answers)
            return
        self._write(hard, answers)

    def _decide(
        self, request: Request, command: Command, now: Instant, answers: list[Callable[[], None]]
    ) -> list[Event]:
        assert self.cluster is not None
        try:
            decision = self.cluster.handle(command, now)
        except Refused as refusal:
            self.observer.refused(command, refusal)
            answers.append(partial(self._reply, request, refusal))
            return []
        reply = decision.reply
        if isinstance(command, ArriveTogether):
            assert isinstance(reply, BarrierTickets)
            answers += self._tickets(request, command, reply, decision.events)
            return list(decision.events)
        self.observer.decided(command, decision.events)
        if isinstance(command, ReconcileCheckpoints) and isinstance(reply, Reconciled) and reply.made:
            self.observer.reconciled(self.cluster, command)
        if isinstance(command, ReportRecovery):
            self.observer.recovered(self.cluster, command)
        if isinstance(reply, BarrierTicket):
            answers.append(partial(self._wait, request, reply))
        else:
            answers.append(partial(self._reply, request, reply))
        return list(decision.events)

    def _tickets(
        self, request: Request, command: ArriveTogether, reply: BarrierTickets, events: Sequence[Event]
    ) -> list[Callable[[], None]]:
        assert request.each is not None
        answers: list[Callable[[], None]] = []
        accepted = []
        for arrival, ticket in zip(command.arrivals, reply.tickets, strict=True):
            alone = Request(
                worker=request.worker, what=arrival, answer=partial(request.each, arrival), each=request.each
            )
            if isinstance(ticket, Refused):
                self.observer.refused(arrival, ticket)
                answers.append(partial(self._reply, alone, ticket))
            else:
                accepted.append(arrival)
                answers.append(partial(self._wait, alone, ticket))
        self.observer.decided_together(accepted, events)
        return answers

    def _apply(self, cluster: Cluster, command: Command, now: Instant) -> list[Event]:
        decision = cluster.handle(command, now)
        self.observer.decided(command, decision.events)
        return list(decision.events)

    # --- answers: only ever about what is durable -----------------------------------------------------------

    def _answer_query(self, request: Request) -> None:
        assert self.cluster is not None
        assert callable(request.what)
        try:
            self._reply(request, request.what(self.cluster))
        except Refused as refusal:
            self._reply(request, refusal)

    def _wait(self, request: Request, ticket: BarrierTicket) -> None:
        if ticket.outcome is not None:
            self._tell_outcome(request, ticket.outcome)
            return
        key = (str(ticket.job_id), ticket.barrier_id, ticket.step, ticket.round)
        self._waiting.setdefault(key, []).append(request)

    def _end(self, outcome: Outcome) -> None:
        key = (str(outcome.job_id), outcome.barrier_id, outcome.step, outcome.round)
        for request in self._waiting.pop(key, []):
            self._tell_outcome(request, outcome)

    def _tell_outcome(self, request: Request, outcome: Outcome) -> None:
        assert isinstance(request.what, ArriveAtBarrier)
        self.listener.told(request.what, outcome)
        self._reply(request, outcome)

    def _reply(self, request: Request, answer: object) -> None:
        if not isinstance(answer, Refused) and not callable(request.what):
            self.listener.acknowledged(request.what, answer)
        if request.each is not None:
            request.answer(answer)
            return
        self._say(request, answer)


class SimCoordinator(Decisions):
    def __init__(self, world: World, network: Network, limits: Limits, oracle: Oracle) -> None:
        self.world = world
        self.network = network
        self.oracle = self.observer = self.listener = oracle
        self.wall_s = 1_700_000_000.0
        self._limits = limits
        self._disk = Disk()
        self._boot = 0
        self._mono_offset_s = 0.0
        self.cluster = None
        self._queue: list[Request] = []
        self._waiting: dict[Round, list[Request]] = {}
        self._unwritten: list[Event] | None = None
        self._is_full = self._has_reserve = False
        self._for_space: list[Request] = []
        self._drawing: tuple[Iterator[Event], list[Event], int] | None = None
        """A snapshot under way: what is still to be drawn, what was, and after how many events it was begun."""
        self.start()

    # --- up and down ----------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.cluster is not None:
            return
        self._boot += 1
        self._mono_offset_s = self.world.between(0, 1e6)  # A new boot has a monotonic clock of its own.
        self.cluster = Cluster(self._limits)
        history = self._disk.load()
        for event in history:
            self.cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        self.cluster.observe(ClockResumed(), self._now())
        self.world.tell(f"coordinator starts (boot {self._boot}) and replays {len(history)} events")
        self.oracle.restarted(self.cluster)
        self._later(TICK_S, self._tick)

    def crash(self) -> None:
        if self.cluster is None:
            return
        written = self._unwritten is not None and self.world.chance(0.5)
        if self._unwritten is None:
            self.oracle.same(self._replayed(), self.cluster)
        elif written:
            self._disk.append(self._unwritten)
        fate = (
            ""
            if self._unwritten is None
            else f"; its last commit {'reached' if written else 'missed'} the disk"
        )
        self.world.tell(f"coordinator crashes{fate}")
        self.cluster, self._unwritten, self._drawing = None, None, None
        self._queue.clear()
        self._for_space.clear()
        self._waiting.clear()

    def fill_disk(self) -> None:
        self.world.tell("the disk is full")
        self._is_full = self._has_reserve = True

    def free_disk(self) -> None:
        if self._is_full:
            self.world.tell("there is space on the disk again")
        self._is_full = False
        waited, self._for_space = self._for_space, []
        for request in waited:
            self.receive(request)

    def _replayed(self) -> Cluster:
        cluster = Cluster(self._limits)
        for event in self._disk.load():
            cluster.apply(event, Instant(mono_s=0.0, wall_s=0.0))
        return cluster

    @property
    def boot(self) -> int:
        return self._boot

    @property
    def is_up(self) -> bool:
        return self.cluster is not None

    def admit(self, worker: WorkerId, incarnation: int) -> None:
        assert self.cluster is not None
        self.cluster.membership.admit(worker, incarnation=incarnation)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """An action of this boot: it dies with it."""
        boot = self._boot

        def act() -> None:
            if self.cluster is not None and self._boot == boot:
                action()

        self.world.after(delay_s, act)

    def _now(self) -> Instant:
        return Instant(mono_s=self.world.now_s + self._mono_offset_s, wall_s=self.wall_s + self.world.now_s)

    # --- what arrives ---------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:
        if self.cluster is not None:
            self._queue.append(request)
            if self._unwritten is None:
                self._later(self.world.between(0.0, 0.002), self._process)

    def beat(self, worker: WorkerId, incarnation: int, *, connects: bool) -> None:
        """A heartbeat over the worker's stream, or the stream itself coming back: soft, journaled nowhere."""
        if self.cluster is None:
            return
        observation: Observation
        if connects:
            observation = WorkerConnected(worker_id=worker, incarnation=incarnation)
        else:
            observation = Heartbeat(worker_id=worker, incarnation=incarnation, report=NOTHING_TO_REPORT)
        with suppress(Refused):
            self.cluster.observe(observation, self._now())

    def dropped(self, worker: WorkerId, incarnation: int) -> None:
        if self.cluster is not None:
            self.cluster.observe(WorkerDisconnected(worker_id=worker, incarnation=incarnation), self._now())

    def _tick(self) -> None:
        self._process(tick=True)
        self._later(TICK_S, self._tick)

    # --- what is durable ---------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        return self._unwritten is not None

    def _say(self, request: Request, answer: object) -> None:
        self.network.send(request.worker, lambda: request.answer(answer))

    def _write(self, events: list[Event], answers: list[Callable[[], None]]) -> None:
        self._unwritten = events
        self._later(self.world.between(0.0005, 0.02), lambda: self._committed(answers))

    def _committed(self, answers: list[Callable[[], None]]) -> None:
        assert self.cluster is not None
        assert self._unwritten is not None
        if self._is_full and self._has_reserve:
            self.world.tell("a commit fails for lack of space, and is made with the reserve")
            self._has_reserve = False
            self._commit_failed(answers)
            return
        self._disk.append(self._unwritten)
        for event in self._unwritten:
            self.world.tell(f"durable: {type(event).__name__} {_brief(event)}")
        self._compact(self.cluster)
        self._unwritten = None
        self._answer(answers)
        if self._queue:
            self._later(0.0, self._process)

    def _compact(self, cluster: Cluster) -> None:
        """A snapshot is of one moment, and drawn over several commits."""
        if self._drawing is None:
            if self._is_full or not self.world.chance(SNAPSHOT_CHANCE):
                return
            self._drawing = cluster.compaction(), [], self._disk.position
            self.world.tell("a snapshot is begun")
        drawing, drawn, position = self._drawing
        drawn += islice(drawing, self.world.random.randrange(1, 15))
        rest = next(drawing, None)
        if rest is not None:
            drawn.append(rest)
            return
        self._disk.snapshot(drawn, position=position)
        self._drawing = None
        self.world.tell("snapshot")

    def _commit_failed(self, answers: list[Callable[[], None]]) -> None:
        self._later(self.world.between(0.0005, 0.02), lambda: self._committed(answers))

    def _answer(self, answers: list[Callable[[], None]]) -> None:
        if answers and self.world.chance(CRASH_WHILE_ANSWERING_CHANCE):
            for answer in answers[: self.world.random.randrange(len(answers) + 1)]:
                answer()
            self.crash()
            self.world.after(self.world.between(0.1, 2.0), self.start)
            return
        for answer in answers:
            answer()


def _brief(event: Event) -> str:
    names = (
        "worker_id",
        "checkpoint_id",
        "barrier_id",
        "step",
        "round",
        "incarnation",
        "generation",
        "version",
    )
    facts = [f"{name}={getattr(event, name)}" for name in names if hasattr(event, name)]
    return " ".join(facts) + f": {event.reason}"
