"""The same disasters with an agent on each machine: workers' sessions ride on the agent's stream (`core.fleet.multiplexer`).

A stream keeps its order; it may be slow, and when it is cut what is on its way is lost, one end may notice seconds after the
other, and two streams of one machine overlap. Agents are killed, and their workers speak for themselves until there is another.
Beside what holds for every simulation: a worker is told only how its own calls ended, an agent never beats for a worker that has
said nothing, and one that is killed is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from strata.core.fleet.multiplexer import (
    Action,
    Arrivals,
    Attach,
    Beats,
    Close,
    Detach,
    Meeting,
    MeetingEnded,
    MemberAnswered,
    Multiplexer,
    Stimulus,
    StreamLost,
    StreamOpened,
    Tell,
    TellEnd,
    TimePassed,
    Up,
    WorkerArrived,
    WorkerBeat,
    WorkerDropped,
    WorkerOpened,
)
from strata.core.messages import (
    ArriveAtBarrier,
    ArriveTogether,
    Command,
    Refused,
    WorkerId,
)
from tests.sim.coordinator import Hosting, Query, Reachable, Request
from tests.sim.oracle import must
from tests.sim.scenario import Result, Scenario
from tests.sim.worker import HEARTBEAT_S, Fabric, Process
from tests.sim.world import Action as WorldAction
from tests.sim.world import Network, World

AGAIN_S = 0.05
"""How soon an agent opens its stream again."""


class Way:
    """One direction of a stream: what is sent arrives in that order, or not at all."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_s = 0.0
        self.is_cut = False

    def send(self, deliver: WorldAction) -> None:
        slow = self._world.chance(0.02)
        delay_s = self._world.between(0.2, 2.0) if slow else self._world.between(0.0005, 0.02)
        self._last_s = max(self._last_s, self._world.now_s + delay_s)

        def arrive() -> None:
            if not self.is_cut:
                deliver()

        self._world.after(self._last_s - self._world.now_s, arrive)


class MachineStream:
    """One stream of one agent, with the coordinator's end of it: whose member numbers mean whom."""

    def __init__(self, agent: Agent, number: int) -> None:
        self.agent, self.number = agent, number
        self.world = agent.world
        self.coordinator: Hosting = agent.coordinator
        self.up, self.down = self._ways()
        self.boot = self.coordinator.boot
        self.members: dict[int, tuple[WorkerId, int]] = {}
        self.is_over = False

    def _ways(self) -> tuple[Way, Way]:
        return Way(self.world), Way(self.world)

    @property
    def sessions(self) -> dict[WorkerId, tuple[int, int]]:
        return self.agent.fleet.sessions

    def cut(self) -> None:
        """The coordinator may notice it long after the agent has."""
        self.up.is_cut = self.down.is_cut = True
        self.world.after(self.world.between(0.0, 2.5), self.ended)

    def ended(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self.coordinator.boot == self.boot:
            for member in list(self.members):
                self._close(member)

    def _close(self, member: int) -> None:
        worker, incarnation = self.members.pop(member)
        if self.sessions.get(worker) == (self.number, member):
            del self.sessions[worker]
            self.coordinator.dropped(worker, incarnation)

    def take(self, message: Up) -> None:
        """At the coordinator."""
        if self.is_over or not self.coordinator.is_up or self.coordinator.boot != self.boot:
            return
        match message:
            case Attach():
                self._attach(message)
            case Detach():
                if message.member in self.members:
                    self._close(message.member)
            case Beats():
                for member in message.members:
                    if member in self.members:
                        worker, incarnation = self.members[member]
                        self.agent.fleet.counted(worker, incarnation, member, self.number)
                        self.coordinator.beat(worker, incarnation, connects=False)
            case Arrivals():
                self._arrive(message)
            case _:
                raise AssertionError(f"{message} is not part of this simulation")

    def _attach(self, message: Attach) -> None:
        try:
            self.coordinator.admit(message.worker_id, message.incarnation)
        except Refused as refusal:
            answer = MemberAnswered(stream=self.number, member=message.member, message=refusal, ends=True)
            self.down.send(partial(self.agent.hear, answer))
            return
        self.members[message.member] = (message.worker_id, message.incarnation)
        self.sessions[message.worker_id] = (self.number, message.member)
        self.coordinator.beat(message.worker_id, message.incarnation, connects=True)

    def _arrive(self, message: Arrivals) -> None:
        meeting = message.meeting
        callers = {
            call_id.decode(): (member, call_id) for member, call_id in message.calls if member in self.members
        }

        def each(arrival: ArriveAtBarrier, outcome: object) -> None:
            member, call_id = callers[arrival.call_id]
            answer = MeetingEnded(stream=self.number, calls=((member, call_id, 0),), outcome=outcome)
            self.down.send(partial(self.agent.hear, answer))

        command = ArriveTogether(
            arrivals=tuple(
                ArriveAtBarrier(
                    worker_id=self.members[member][0],
                    incarnation=self.members[member][1],
                    generation=meeting.generation,
                    barrier_id=meeting.barrier_id,
                    step=meeting.step,
                    expected=meeting.expected,
                    call_id=call_id,
                    timeout_s=meeting.timeout_ms / 1000,
                )
                for call_id, (member, _) in callers.items()
            )
        )
        for arrival in command.arrivals:
            asked = self.agent.fleet.asked[arrival.call_id]
            must(arrival == asked, f"I5: {asked} went up as {arrival}")
        if command.arrivals:
            self.agent.fleet.largest = max(self.agent.fleet.largest, len(command.arrivals))
            request = Request(worker=self.agent.name, what=command, answer=lambda _: None, each=each)
            self.coordinator.receive(request)


class Agent:
    def __init__(self, fleet: MachineScenario, name: str) -> None:
        self.fleet, self.name = fleet, name
        self.world = fleet.world
        self.mux = Multiplexer(hold_s=fleet.hold_s)
        self.alive = True
        self.connections: dict[int, MachineProcess] = {}
        self.stream: MachineStream | None = None
        self._timer_s: float | None = None
        self.world.tell(f"{name} starts")
        self._open()

    @property
    def coordinator(self) -> Hosting:
        return self.fleet.coordinator

    def connect(self, process: MachineProcess) -> int:
        self.fleet.connections += 1
        connection = self.fleet.connections
        self.connections[connection] = process
        self.feed(
            WorkerOpened(connection=connection, worker_id=process.worker_id, incarnation=process.incarnation)
        )
        return connection

    def drop(self, connection: int) -> None:
        """A worker's process has ended, or has opened another connection."""
        if self.connections.pop(connection, None) is not None and self.alive:
            actions = self.feed(WorkerDropped(connection=connection))
            must(
                self.stream is None or any(isinstance(action, Detach) for action in actions),
                f"{self.name} kept to itself that a worker of it was lost",
            )

    def cut(self) -> None:
        if self.stream is not None:
            self.world.tell(f"the stream of {self.name} is cut")
            self.stream.cut()
            self.world.after(self.world.between(0.0, 1.5), partial(self._lost, self.stream))

    def kill(self) -> None:
        self.world.tell(f"{self.name} is killed")
        self.alive = False
        if self.stream is not None:
            self.stream.cut()
        for process in self.connections.values():
            self.world.after(self.world.between(0.001, 0.1), process.speak_for_itself)

    def hear(self, answer: Stimulus) -> None:
        self.feed(answer)

    def feed(self, stimulus: Stimulus) -> list[Action]:
        if not self.alive:
            return []
        actions = self.mux.handle(stimulus, self.world.now_s)
        for action in actions:
            self._act(action)
        if self.mux.due_s is not None and self.mux.due_s != self._timer_s:
            self._timer_s = self.mux.due_s
            self.world.after(max(0.0, self._timer_s - self.world.now_s), lambda: self._tick())
        return actions

    def _tick(self) -> None:
        self._timer_s = None
        self.feed(TimePassed())

    def _act(self, action: Action) -> None:
        match action:
            case Attach() | Detach() | Beats() | Arrivals():
                assert self.stream is not None
                stream = self.stream
                stream.up.send(lambda: stream.take(action))
            case TellEnd():
                process = self.connections.get(action.connection)
                if process is not None:
                    process.barrier_ended(action.call_id.decode(), action.outcome)
            case Tell():
                pass  # That it is stale: it hears so at its next question.
            case Close():
                process = self.connections.pop(action.connection, None)
                if process is not None:
                    process.connection = None
            case _:
                raise AssertionError(f"{action} is not part of this simulation")

    def _open(self) -> None:
        if not self.alive:
            return
        if not self.coordinator.is_up:
            self.world.after(AGAIN_S, self._open)
            return
        self.fleet.streams += 1
        stream = MachineStream(self, self.fleet.streams)
        stream.up.send(lambda: stream.down.send(lambda: self._welcomed(stream)))
        self.world.after(1.0, lambda: self._open() if self.stream is None else None)

    def _welcomed(self, stream: MachineStream) -> None:
        if not self.alive or self.stream is not None or stream.coordinator.boot != stream.boot:
            return
        self.stream = stream
        actions = self.feed(StreamOpened(stream=stream.number, interval_s=HEARTBEAT_S))
        arrived = {call for action in actions if isinstance(action, Arrivals) for _, call in action.calls}
        for process in self.connections.values():
            lost = {call for call in process.at_agent if call.encode() not in arrived}
            must(not lost, f"I4: {lost} of {process.worker_id} did not arrive again")

    def _lost(self, stream: MachineStream) -> None:
        if self.stream is stream:
            self.stream = None
            self.feed(StreamLost(stream=stream.number))
            self._open()

    def coordinator_crashed(self) -> None:
        if self.stream is not None:
            self.stream.up.is_cut = self.stream.down.is_cut = True
            self.world.after(self.world.between(0.0, 0.3), partial(self._lost, self.stream))


class MachineProcess(Process):
    fleet: MachineScenario
    machine: str
    connection: int | None = None
    agent: Agent | None = None
    beats = 0
    """That it has said to its agent, in all."""

    def __init__(self, fleet: MachineScenario, name: str, machine: str) -> None:
        self.fleet, self.machine = fleet, machine
        self._ends: dict[str, Callable[[object], None]] = {}
        self.at_agent: set[str] = set()
        """Calls that its agent has taken, on the present connection, and not answered."""
        network, coordinator = fleet.reach(self)
        super().__init__(fleet.world, network, coordinator, fleet.plan, fleet.fabric_of(self), name)

    def kill(self) -> None:
        agent, connection = self.agent, self.connection
        if connection is None or agent is None:
            super().kill()
            return
        self.world.tell(f"{self.worker_id} is killed")
        self.alive = False
        self.fabric.killed.add(self.pid)
        self.world.after(self.world.between(0.0, 3.0), self._report_end)
        self.world.after(self.world.between(0.0, 0.02), lambda: agent.drop(connection))

    def _gave_way(self) -> None:
        self.fleet.gave_way(self)

    def flap(self) -> None:
        if self.connection is None:
            super().flap()
            return
        self._leave_agent()
        self.world.after(
            self.world.between(0.0, 0.2), lambda: self._act(lambda: self._send_beat(connects=True))
        )

    def speak_for_itself(self) -> None:
        """Its agent is gone."""
        self.agent = self.connection = None
        self._act(lambda: self._send_beat(connects=True))

    def _leave_agent(self) -> None:
        agent, connection, self.agent, self.connection = self.agent, self.connection, None, None
        if agent is not None and connection is not None:
            agent.drop(connection)

    def _send_beat(self, *, connects: bool) -> None:
        if not self.incarnation:
            return
        if connects:
            self._leave_agent()
            agent = self.fleet.agents.get(self.machine)
            if agent is not None and agent.alive:
                self.agent = agent
                self.at_agent.clear()
                self.connection = agent.connect(self)
                return
        if self.connection is not None and self.agent is not None:
            self.beats += 1
            self.agent.feed(WorkerBeat(connection=self.connection, report=None))
            return
        worker, incarnation = self.worker_id, self.incarnation

        def deliver() -> None:
            if connects:
                self.fleet.sessions.pop(worker, None)  # It replaces the one that its agent had.
            self.coordinator.beat(worker, incarnation, connects=connects)

        self.network.send(worker, deliver)

    def _ask(self, what: Command | Query, number: int) -> None:
        if not isinstance(what, ArriveAtBarrier) or self.connection is None or self.agent is None:
            super()._ask(what, number)
            return

        def answered(answer: object) -> None:
            def hear() -> None:
                if self._asked == number and not self.finished:
                    self._asked += 1
                    self._resume(answer)

            self._act(hear)

        def again() -> None:
            if self._asked == number:
                self._ask(what, number)

        self._ends[what.call_id] = answered
        self.fleet.asked[what.call_id] = what
        self.at_agent.add(what.call_id)
        meeting = Meeting(
            barrier_id=what.barrier_id,
            step=what.step,
            generation=what.generation,
            expected=what.expected,
            timeout_ms=int(what.timeout_s * 1000),
        )
        arrived = WorkerArrived(connection=self.connection, meeting=meeting, call_id=what.call_id.encode())
        self.agent.feed(arrived)
        # Its library does not arrive again on a connection that stands; here it asks whether it still does.
        self.world.after(self.world.between(1.0, 2.0), lambda: self._act(again))

    def barrier_ended(self, call_id: str, outcome: object) -> None:
        must(
            call_id.startswith(f"{self.worker_id}-{self._born}-"),
            f"I5: {self.worker_id} was told how the barrier of call {call_id} ended",
        )
        self.at_agent.discard(call_id)
        answered = self._ends.pop(call_id, None)
        if answered is not None:
            answered(outcome)


class MachineScenario(Scenario):
    options = "--machines "

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.hold_s = self.world.random.choice([0.0, 0.02, 0.3])
        self.agents: dict[str, Agent] = {}
        self.sessions: dict[WorkerId, tuple[int, int]] = {}
        """Whose newest session is on which stream, under which member number; others speak for themselves."""
        self.asked: dict[str, ArriveAtBarrier] = {}
        """What each worker has said to its agent, by call."""
        self.connections = self.streams = 0
        self.largest = 0
        """How many arrived in one message."""
        self.cuts = self.agents_killed = 0
        self._beats_counted: dict[tuple[int, int], int] = {}

    def run(self) -> Result:
        self._watch_crashes()
        for machine in self.machine_names():
            self.world.after(self.world.between(0.0, 0.5), partial(self._start_agent, machine))
        return super().run()

    def machine_names(self) -> tuple[str, ...]:
        return ("m0", "m1")

    def _watch_crashes(self) -> None:
        crash = self.coordinator.crash

        def crash_with_streams() -> None:
            crash()
            self.sessions.clear()
            for agent in self.agents.values():
                agent.coordinator_crashed()

        self.coordinator.crash = crash_with_streams  # type: ignore[method-assign]

    def _start_agent(self, machine: str) -> None:
        agent = self.agents.get(machine)
        if agent is None or not agent.alive:
            self.agents[machine] = self._new_agent(machine)

    def _new_agent(self, machine: str) -> Agent:
        return Agent(self, machine)

    def _start(self, name: str) -> None:
        process = self.processes.get(name)
        if process is None or not (process.alive or process.finished):
            self.processes[name] = self._new_process(name, f"m{sum(name.encode()) // 2 % 2}")

    def _new_process(self, name: str, machine: str) -> MachineProcess:
        return MachineProcess(self, name, machine)

    def reach(self, process: MachineProcess) -> tuple[Network, Reachable]:
        """How a process speaks for itself."""
        return self.network, self.coordinator

    def gave_way(self, process: MachineProcess) -> None:
        pass

    def fabric_of(self, process: MachineProcess) -> Fabric:
        return self.fabric

    def counted(self, worker: WorkerId, incarnation: int, member: int, stream: int) -> None:
        """A folded heartbeat says that this member was heard."""
        for process in (*self.processes.values(), *self.zombies):
            assert isinstance(process, MachineProcess)
            if process.worker_id == worker and process.incarnation == incarnation:
                before = self._beats_counted.get((process.pid, incarnation), 0)
                must(process.beats > before, f"an agent beats for {worker}, which has said nothing")
                self._beats_counted[process.pid, incarnation] = before + 1

    def _fault(self) -> None:
        machine_faults: list[WorldAction] = [self._cut_stream, self._cut_stream, self._kill_agent]
        if self.agents and self.world.chance(0.35):
            self.world.random.choice(machine_faults)()
        else:
            super()._fault()

    def _cut_stream(self) -> None:
        self.cuts += 1
        self.world.random.choice(list(self.agents.values())).cut()

    def _kill_agent(self) -> None:
        machine = self.world.random.choice(list(self.agents))
        if self.agents[machine].alive:
            self.agents_killed += 1
            self.agents[machine].kill()
            self.world.after(self.world.between(0.1, 5.0), partial(self._start_agent, machine))


def simulate_machines(seed: int) -> tuple[Result, MachineScenario]:
    scenario = MachineScenario(seed)
    return scenario.run(), scenario
