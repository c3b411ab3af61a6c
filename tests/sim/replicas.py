"""Several coordinators that workers and agents find by themselves: `leadership`'s coordinators with `coordinator`'s decisions.

A `Replica` leads or follows as in `leadership`, and decides what workers ask as in `coordinator`. What it decided counts from the
moment it is in the log: until then nothing is checked of it, and what never gets there has not happened. A client has several
addresses; a standby redirects it, silence makes it try the next. Every two parties are joined by two roads, and each may be cut by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from strata.core.cluster import Cluster, Limits
from strata.core.fleet.multiplexer import Up
from strata.core.leadership import Record
from strata.core.messages import (
    ArriveAtBarrier,
    CheckpointCompleted,
    Command,
    Event,
    Heartbeat,
    Instant,
    Observation,
    ReconcileCheckpoints,
    RecordsForgotten,
    Refused,
    ReportRecovery,
    WorkerConnected,
    WorkerDisconnected,
    WorkerFailed,
    WorkerId,
)
from tests.core.builders import NOTHING_TO_REPORT
from tests.sim.coordinator import TICK_S, Decisions, Hosting, Request
from tests.sim.leadership import NotLeading, SimLeader, encode_events
from tests.sim.leadership import Oracle as LogOracle
from tests.sim.machines import Agent, MachineStream, Way
from tests.sim.oracle import Oracle, Violation, must
from tests.sim.world import Action, Network, World

if TYPE_CHECKING:
    from tests.sim.whole import WholeScenario

SILENT_S = 1.8
"""A client that has heard nothing for so long tries another address."""
RETRIES_AT_ONCE = 16
"""Of one request: a network that doubles refusals must not double retries without end."""
PING_S = 0.7
PATIENCE_S = 2.3
"""Of a new leader, with whoever has not found it yet: the heartbeats' time-out, less what clocks may differ by."""


class Roads(Network):
    """Between every two parties, each direction by itself."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.cut: set[tuple[str, str]] = set()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut

    def travel(self, source: str, target: str, deliver: Action) -> None:
        world = self._world
        for _ in range(2 if self.doubling and world.chance(self.doubling) else 1):
            if not (self.loss and world.chance(self.loss)):
                slow = world.chance(0.02)
                delay_s = world.between(0.5, 4.0) if slow else world.between(0.001, 0.03)
                world.after(delay_s, lambda: None if self.is_cut(source, target) else deliver())


class Immediate(Network):
    """For a client that sends over roads of its own."""

    def send(self, worker: str, deliver: Action) -> None:
        deliver()


class Road(Way):
    """One direction of a stream: what is sent while the road is cut arrives when it is not, unless the stream is given up."""

    def __init__(self, roads: Roads, world: World, source: str, target: str) -> None:
        super().__init__(world)
        self._roads, self._source, self._target = roads, source, target
        self._held: list[Action] = []

    def send(self, deliver: Action) -> None:
        super().send(partial(self._arrive, deliver))

    def _arrive(self, deliver: Action) -> None:
        self._held.append(deliver)
        if not self._roads.is_cut(self._source, self._target):
            held, self._held = self._held, []
            for each in held:
                each()


class Log(LogOracle):
    """What is durable, and which coordinator wrote it."""

    def __init__(self, world: World, limits: Limits, fleet: Oracle) -> None:
        super().__init__(world, limits)
        self._fleet = fleet
        self.leaders: dict[int, Replica] = {}

    def completed(self, record: Record, events: Sequence[Event]) -> None:
        if any(isinstance(event, RecordsForgotten) and event.barriers for event in events):
            self._ended.clear()  # Their rounds are counted anew.
        super().completed(record, events)
        if self.world.tells:
            for event in events:
                self.world.tell(f"durable: {type(event).__name__} {event.reason}")
        leader = self.leaders[record.term]
        led_s = self.world.now_s - leader.began_s
        for event in events:
            if isinstance(event, WorkerFailed) and event.reason.startswith("no heartbeat"):
                must(
                    led_s > PATIENCE_S,
                    f"{event.worker_id} is taken for lost after {led_s:.2f} s under {leader.name}, which cannot know",
                )
            if isinstance(event, CheckpointCompleted) and event.job_id == "elastic":
                _must_know_the_newest(leader.cluster, event)
        leader.witness.flush()

    def leads(self, cluster: Cluster) -> None:
        super().leads(cluster)
        self._fleet.restarted(cluster)


def _must_know_the_newest(cluster: Cluster | None, event: CheckpointCompleted) -> None:
    """Within a generation of a run, steps only go up, whatever is reported last."""
    assert cluster is not None
    latest = cluster.checkpoints.latest(event.job_id, run_id=event.run_id)
    for record in cluster.checkpoints.records.values():
        if latest is not None and (record.run_id, record.generation) == (latest.run_id, latest.generation):
            is_usable = record.status == "completed" and not record.removed
            must(
                not is_usable or record.step <= latest.step,
                f"{latest.checkpoint_id} is taken for the newest, and there is {record.checkpoint_id}",
            )


class Witness(Oracle):
    """Keeps what a leader has decided until it is in the log."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle.existing)
        self._oracle = oracle
        self._seen: list[Callable[[], None]] = []

    def flush(self) -> None:
        seen, self._seen = self._seen, []
        for each in seen:
            each()

    def discard(self) -> None:
        self._seen.clear()

    def decided(self, command: Command, events: Sequence[Event]) -> None:
        self._seen.append(partial(self._oracle.decided, command, events))

    def decided_together(self, accepted: Sequence[ArriveAtBarrier], events: Sequence[Event]) -> None:
        self._seen.append(partial(self._oracle.decided_together, accepted, events))

    def refused(self, command: Command, refusal: Refused) -> None:
        self._seen.append(partial(self._oracle.refused, command, refusal))

    def reconciled(self, cluster: Cluster, command: ReconcileCheckpoints) -> None:
        self._look_now(partial(self._oracle.reconciled, cluster, command))

    def recovered(self, cluster: Cluster, command: ReportRecovery) -> None:
        self._look_now(partial(self._oracle.recovered, cluster, command))

    def _look_now(self, check: Callable[[], None]) -> None:
        """It is about the state between two commands of a batch; what is wrong counts when the batch does."""
        try:
            check()
        except Violation as violation:
            self._seen.append(partial(_fail, violation))

    def settled(self, cluster: Cluster, events: Iterable[Event]) -> None:
        self._seen.append(partial(self._oracle.settled, cluster, events))


def _fail(violation: Violation) -> None:
    raise violation


class Replica(Decisions, SimLeader):  # type: ignore[misc]
    """One coordinator of several."""

    def __init__(self, name: str, whole: WholeScenario) -> None:
        self.whole, self.roads = whole, whole.roads
        self.listener = whole.oracle
        self.observer = self.witness = Witness(whole.oracle)
        self.sessions: dict[WorkerId, tuple[int, int]] = {}
        self._for_space: list[Request] = []
        self._confirming = False
        self.began_s = 0.0
        super().__init__(name, whole.world, whole.store, whole.links, whole.log)

    # --- up and down ----------------------------------------------------------------------------------------

    @property
    def boot(self) -> int:
        return self.life

    @property
    def is_up(self) -> bool:
        return self.is_running

    @property
    def _is_full(self) -> bool:  # type: ignore[override]
        return self.whole.store_is_full

    def start(self) -> None:
        if not self.is_running:
            self.witness.discard()
            self.sessions.clear()
            self._for_space.clear()
            self._confirming = False
            super().start()

    def crash(self) -> None:
        super().crash()
        self.whole.fell(self)

    def restart(self, why: str) -> None:
        super().restart(why)
        self.whole.fell(self)

    def _lead(self) -> None:
        if self.serves:
            return
        self.began_s = self.world.now_s
        self.whole.log.leaders[self.leadership.term] = self
        super()._lead()
        self._after(TICK_S, self._tick_cluster)

    def _tick_cluster(self) -> None:
        self._process(tick=True)
        self._after(TICK_S, self._tick_cluster)

    def space_again(self) -> None:
        waited, self._for_space = self._for_space, []
        for request in waited:
            self.receive(request)

    # --- what arrives ---------------------------------------------------------------------------------------

    def receive(self, request: Request) -> None:  # type: ignore[override]
        self._mine(self._enqueue)(request)

    def _enqueue(self, request: Request) -> None:
        if not self.leads():
            if request.each is None:
                leader = self.leadership.leader
                self._say(request, NotLeading(leader.name.partition(".")[0] if leader is not None else ""))
            return
        self._queue.append(request)
        if not self.is_writing:
            self._after(self.world.between(0.0, 0.002), self._process)

    def hear(
        self, worker: WorkerId, incarnation: int, *, connects: bool, answer: Callable[[Any], None]
    ) -> None:
        """A session without an agent: a heartbeat that is answered, or the stream itself coming back."""

        def heard() -> None:
            if not self.leads():
                leader = self.leadership.leader
                answer(NotLeading(leader.name.partition(".")[0] if leader is not None else ""))
                return
            if connects:
                self.sessions.pop(worker, None)  # It replaces the one that its agent had.
            self.beat(worker, incarnation, connects=connects)
            answer(None)

        self._mine(heard)()

    def beat(self, worker: WorkerId, incarnation: int, *, connects: bool) -> None:
        observation: Observation
        if connects:
            observation = WorkerConnected(worker_id=worker, incarnation=incarnation)
        else:
            observation = Heartbeat(worker_id=worker, incarnation=incarnation, report=NOTHING_TO_REPORT)
        if self.leads() and self.cluster is not None:
            with suppress(Refused):
                self.cluster.observe(observation, self._now())

    def dropped(self, worker: WorkerId, incarnation: int) -> None:
        def drop() -> None:
            if self.leads() and self.cluster is not None:
                lost = WorkerDisconnected(worker_id=worker, incarnation=incarnation)
                self.cluster.observe(lost, self._now())

        self._mine(drop)()

    def admit(self, worker: WorkerId, incarnation: int) -> None:
        assert self.cluster is not None
        self.cluster.membership.admit(worker, incarnation=incarnation)

    # --- one batch ------------------------------------------------------------------------------------------

    @property
    def is_writing(self) -> bool:
        return bool(self._in_flight) or self._confirming

    def _now(self) -> Instant:
        return self._instant()

    def _process(self, *, tick: bool = False) -> None:
        if self.leads():
            super()._process(tick=tick)

    def _write(self, events: list[Event], answers: list[Callable[[], None]]) -> None:
        assert self._appender is not None
        self._events, self._answers = events, answers
        self._in_flight = self._appender.records(encode_events(events), part_bytes=self.whole.part_bytes)
        self._send(self._in_flight[0])

    def _answer(self, answers: list[Callable[[], None]]) -> None:
        """Nothing was written: it rests on the lease. Between deciding and answering anything may happen to this process."""
        if self.store.is_led(self.leadership.term):
            self.witness.flush()
        else:
            self.witness.discard()
        if answers:
            self._confirming = True
            self._after(self.world.between(0, 0.01), partial(self._confirm, answers))

    def _confirm(self, answers: list[Callable[[], None]]) -> None:
        if not self.is_confirmed():  # It waits for its lease to be renewed, or steps down.
            self._after(0.05, partial(self._confirm, answers))
            return
        self._confirming = False
        self._answer_unwritten(answers, [])

    def _say(self, request: Request, answer: object) -> None:
        self.roads.travel(self.name, request.worker, lambda: request.answer(answer))


class Addresses:
    """Which coordinator a client believes leads."""

    def __init__(self, whole: WholeScenario) -> None:
        self._whole = whole
        self.name = whole.world.random.choice(list(whole.replicas))

    @property
    def replica(self) -> Replica:
        return self._whole.replicas[self.name]

    def turn(self, leader: str = "") -> None:
        names = list(self._whole.replicas)
        self.name = leader or names[(names.index(self.name) + 1) % len(names)]


class Front:
    """The library of a process: it has a session of its own, and asks whoever it believes leads."""

    def __init__(self, whole: WholeScenario, place: str) -> None:
        self.whole, self.world, self.roads, self.place = whole, whole.world, whole.roads, place
        self.addresses = Addresses(whole)
        self._asked: object = None
        self._is_answered = True
        self._chain = 0
        self._retries = 0
        """That wait for their turn."""
        self._heard_s = 0.0
        self._is_new = True
        """Whether the session is one that its coordinator does not know yet."""

    @property
    def listener(self) -> Oracle:
        return self.whole.oracle

    def receive(self, request: Request) -> None:
        if request.what is self._asked and not self._is_answered:
            self._turn()
        self._asked, self._is_answered = request.what, False
        self._chain += 1
        self._post(request, self._chain)

    def _turn(self, leader: str = "") -> None:
        self.addresses.turn(leader)
        self._is_new = True

    def _post(self, request: Request, chain: int) -> None:
        replica = self.addresses.replica

        def answered(answer: Any) -> None:
            if not isinstance(answer, NotLeading):
                self._is_answered = self._is_answered or self._asked is request.what
                request.answer(answer)
                return
            self.whole.counts["redirected"] += 1
            if self._chain == chain and not self._is_answered and self._retries < RETRIES_AT_ONCE:
                self._retries += 1
                self._turn(answer.leader)
                wait_s = self.world.between(0.02, 0.1) if answer.leader else self.world.between(0.2, 0.5)
                self.world.after(wait_s, again)

        def again() -> None:
            self._retries -= 1
            if self._chain == chain and not self._is_answered:
                self._post(request, chain)

        sent = replace(request, worker=self.place, answer=answered)
        self.roads.travel(self.place, replica.name, lambda: replica.receive(sent))

    def beat(self, worker: WorkerId, incarnation: int, *, connects: bool) -> None:
        if connects:
            self._is_new, self._heard_s = True, self.world.now_s
        elif self.world.now_s - self._heard_s > SILENT_S:
            self._turn()
            self._heard_s = self.world.now_s
        replica, is_new = self.addresses.replica, self._is_new

        def heard(answer: object) -> None:
            if replica is not self.addresses.replica:
                return
            if isinstance(answer, NotLeading):
                self._turn(answer.leader)
            else:
                self._heard_s, self._is_new = self.world.now_s, False

        def arrive() -> None:
            replica.hear(
                worker,
                incarnation,
                connects=is_new,
                answer=lambda answer: self.roads.travel(replica.name, self.place, partial(heard, answer)),
            )

        self.roads.travel(self.place, replica.name, arrive)

    def dropped(self, worker: WorkerId, incarnation: int) -> None:
        """Its end of the connection is closed: whoever holds the other end sees it, unless the road is cut."""
        replica = self.addresses.replica
        if not self.roads.is_cut(self.place, replica.name):
            replica.dropped(worker, incarnation)


class ReplicaStream(MachineStream):
    coordinator: Replica

    def __init__(self, agent: ReplicaAgent, number: int) -> None:
        self._roads = agent.whole.roads
        super().__init__(agent, number)
        self.heard_s = self.world.now_s

    def _ways(self) -> tuple[Way, Way]:
        there, here = self.coordinator.name, self.agent.name
        return Road(self._roads, self.world, here, there), Road(self._roads, self.world, there, here)

    @property
    def sessions(self) -> dict[WorkerId, tuple[int, int]]:
        return self.coordinator.sessions

    def take(self, message: Up) -> None:
        self.coordinator._mine(super().take)(message)

    def ended(self) -> None:
        self.coordinator._mine(super().ended)()


class ReplicaAgent(Agent):
    """An agent that finds who leads."""

    def __init__(self, whole: WholeScenario, name: str) -> None:
        self.whole = whole
        self.addresses = Addresses(whole)
        self._attempt = 0
        super().__init__(whole, name)

    @property
    def coordinator(self) -> Hosting:
        return self.addresses.replica

    def _open(self) -> None:
        if not self.alive or self.stream is not None:
            return
        self._attempt += 1
        attempt = self._attempt
        self.fleet.streams += 1
        replica = self.addresses.replica
        stream = ReplicaStream(self, self.fleet.streams)

        def arrive() -> None:
            if replica.leads():
                stream.down.send(lambda: self._welcomed(stream))
            else:
                leader = replica.leadership.leader
                named = leader.name.partition(".")[0] if leader is not None else ""
                stream.down.send(lambda: self._redirected(named, attempt))

        def unanswered() -> None:
            if self.stream is None and self._attempt == attempt:
                self.addresses.turn()
                self._open()

        stream.up.send(replica._mine(arrive))
        self.world.after(1.0, unanswered)

    def _redirected(self, leader: str, attempt: int) -> None:
        if self.stream is None and self._attempt == attempt:
            self._attempt += 1
            self.addresses.turn(leader)
            wait_s = self.world.between(0.02, 0.1) if leader else self.world.between(0.2, 0.5)
            self.world.after(wait_s, self._open)

    def _welcomed(self, stream: MachineStream) -> None:
        super()._welcomed(stream)
        if self.stream is stream:
            assert isinstance(stream, ReplicaStream)
            stream.heard_s = self.world.now_s
            self._ping(stream)

    def _ping(self, stream: ReplicaStream) -> None:
        """A coordinator that does not answer may be paused, or cut off one way."""
        if self.stream is not stream or not self.alive:
            return
        if self.world.now_s - stream.heard_s > SILENT_S:
            self.world.tell(f"{self.name} hears nothing from {stream.coordinator.name}")
            stream.cut()
            self.addresses.turn()
            self._lost(stream)
            return

        def pong() -> None:
            stream.heard_s = self.world.now_s

        stream.up.send(stream.coordinator._mine(lambda: stream.down.send(pong)))
        self.world.after(PING_S, lambda: self._ping(stream))

    def coordinator_fell(self, replica: Replica) -> None:
        stream = self.stream
        if stream is not None and stream.coordinator is replica:
            stream.up.is_cut = stream.down.is_cut = True
            self.world.after(self.world.between(0.0, 0.3), partial(self._lost, stream))
