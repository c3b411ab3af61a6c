"""A fleet of agents and workers that recover without a restart, on a clock of its own.

Each machine's agent holds a real `Regroup`; workers, processes and the meeting of agents are played. Workers are killed, raise,
hang, stop and take their time at any moment, also while they leave or join; machines are cut off while they meet. Spares are
killed like workers, while they start, wait and are let in; whole machines are lost, and others that stand by take their places.
What must hold is checked after every event, and at the end, when faults have ceased, everybody trains in one generation.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.core.jobs.regroup import (
    Continue,
    Leave,
    Limits,
    Meet,
    Phase,
    Regroup,
    Release,
    Replace,
    Restart,
    StartSpare,
    Take,
)

LIMITS = Limits(max_in_process=50, timeout_s=10.0)


class Violation(AssertionError):
    pass


@dataclass(slots=True)
class Process:
    """A worker's process. `inside` is the generation it trains in."""

    pid: int
    machine: int
    slot: int
    """Of a spare that was not taken: its number."""
    inside: int | None = None
    is_alive: bool = True
    has_arrived: bool = False
    """It has come to its function."""
    is_noticed: bool = False
    """Its agent knows that it has ended."""
    is_stuck: bool = False
    """It does not react, until it is let go."""
    asked: bool = False
    """Its generation is over, and it has been notified."""
    is_finished: bool = False
    is_released: bool = False


@dataclass(slots=True)
class Machine:
    number: int
    regroup: Regroup
    processes: list[Process]
    spares: dict[int, Process] = field(default_factory=dict)
    """By the number that each was started under."""
    is_lost: bool = False
    meeting: tuple[int, ...] | None = None
    """The workers that its agent meets the others with; None while it does not meet."""


@dataclass
class Fleet:
    seed: int
    machines: int = 2
    workers: int = 3
    sharded: bool = False
    spares: int = 0
    standing_by: int = 0
    """Machines beyond those that train."""
    now_s: float = 0.0
    faults_until_s: float = 60.0
    story: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._pids = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.generation = 0
        self.trains: set[int] = set()
        """The processes of the present generation."""
        self._numbers = itertools.count()
        self.all: dict[int, Machine] = {}
        self.fleet = [self._machine() for _ in range(self.machines)]
        """Those in the world."""
        self.waiting: list[Machine] = []
        """Those that stand by."""
        self.excused: set[int] = set()
        """Processes that may be replaced: they were hurt, or did not leave in time."""

    def _machine(self) -> Machine:
        number = next(self._numbers)
        processes = [Process(next(self._pids), number, slot) for slot in range(self.workers)]
        regroup = Regroup(self.workers, spares=self.spares, limits=LIMITS)
        self.all[number] = Machine(number, regroup, processes)
        return self.all[number]

    # --- the clock --------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), what))

    def run(self) -> None:
        for machine in self.fleet:
            for process in machine.processes:
                self._arrive(process, waits=False)
        self._begin({p.pid for m in self.fleet for p in m.processes})
        for _ in range(self.standing_by):
            self._stand_by()
        for machine in self.fleet:
            self.after(0.5, lambda machine=machine: self._first_step(machine))  # type: ignore[misc]
        self.after(self.random.expovariate(0.5), self._fault)
        self.after(self.faults_until_s + 60.0, self._finish)
        while self._events and self.now_s < self.faults_until_s + 400.0:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
            if self.fleet and all(p.is_released for m in self.fleet for p in m.processes):
                return
        raise self.violated("not everybody came to an end")

    def _first_step(self, machine: Machine) -> None:
        if self.generation == 0:
            machine.regroup.stepped(0)
            self.look(machine)

    def violated(self, what: str) -> Violation:
        return Violation(f"seed {self.seed}: {what}\n" + "\n".join(self.story[-60:]))

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now_s:8.3f} {text}")

    # --- agents -----------------------------------------------------------------------------------------------

    def look(self, machine: Machine) -> None:
        while machine.meeting is None and not machine.is_lost:
            instruction = machine.regroup.decide(self.now_s)
            if isinstance(instruction, Continue):
                if instruction.until_s is not None:
                    self.after(max(instruction.until_s - self.now_s, 1e-3), lambda: self.look(machine))
                return
            self.tell(f"machine {machine.number}: {instruction}")
            self.counts[type(instruction).__name__] += 1
            if isinstance(instruction, Leave):
                machine.regroup.asked(instruction.workers, now_s=self.now_s)
                for slot in instruction.workers:
                    self._ask(machine.processes[slot])
            elif isinstance(instruction, Replace):
                if machine in self.fleet and any(
                    spare.phase is Phase.READY for spare in machine.regroup.spares.values()
                ):
                    raise self.violated("a spare stood by, and a worker was replaced by a new process")
                self._replace(machine, instruction.worker)
            elif isinstance(instruction, StartSpare):
                self._start_spare(machine, instruction.spare)
            elif isinstance(instruction, Take):
                self._take(machine, instruction)
            elif isinstance(instruction, Release):
                machine.regroup.released(now_s=self.now_s)
                if machine.regroup.spares:
                    raise self.violated("spares are left when the function has returned everywhere")
                self._end_spares(machine)
                for process in machine.processes:
                    process.is_released = True
            elif isinstance(instruction, Restart):
                self._restart(machine)
            else:
                self._meet(machine, instruction)

    def _meet(self, machine: Machine, meet: Meet) -> None:
        for slot in meet.workers:
            if machine.regroup.workers[slot].phase is Phase.LOST or machine.processes[slot].is_noticed:
                raise self.violated("a lost worker is a member")
            if not machine.processes[slot].has_arrived:
                raise self.violated("a process is let in that has not come to its function")
        machine.meeting = meet.workers
        for other in self.fleet:
            if other is not machine and other.meeting is None:
                other.regroup.others_wait()
                self.after(self.random.uniform(0, 0.2), lambda other=other: self.look(other))  # type: ignore[misc]
        self._look_for_met()

    def _look_for_met(self) -> None:
        if all(other.meeting is not None for other in self.fleet):
            self.after(self.random.uniform(0, 0.1), self._met)

    def _met(self) -> None:
        if any(machine.meeting is None for machine in self.fleet):
            return
        self.generation += 1
        members = [m.processes[slot] for m in self.fleet for slot in m.meeting or ()]
        self.tell(f"generation {self.generation}: {[p.pid for p in members]}")
        for process in members:
            # One that has died meanwhile is noticed in the generation that it was let into.
            process.inside, process.asked, process.is_finished = self.generation, False, False
        self._begin({p.pid for p in members})
        for machine in self.fleet:
            assert machine.meeting is not None
            machine.regroup.met(machine.meeting, now_s=self.now_s)
            machine.meeting = None
            for slot in range(self.workers):
                self._notice_death(machine.processes[slot])
            self.after(0.0, lambda machine=machine: self.look(machine))  # type: ignore[misc]
        if self.random.random() < 0.9:
            self.after(0.05, lambda g=self.generation, m=self.trains: self._step(g, m))  # type: ignore[misc]

    def _step(self, generation: int, members: set[int]) -> None:
        """Where all are still there."""
        alive = {p.pid for m in self.fleet for p in m.processes if p.is_alive}
        if generation == self.generation and self.trains == members <= alive:
            for machine in self.fleet:
                machine.regroup.stepped(self.generation)

    def _begin(self, pids: set[int]) -> None:
        self.trains = pids
        if self.generation == 0:
            for machine in self.fleet:
                for process in machine.processes:
                    process.inside = 0

    def _end(self, machine: Machine, slot: int) -> None:
        old = machine.processes[slot]
        if old.is_alive and old.pid not in self.excused:
            raise self.violated(f"process {old.pid} was replaced, and had done nothing")
        old.is_alive = False
        self._broken(old)

    def _start_spare(self, machine: Machine, number: int) -> None:
        if number in machine.spares or number < self.workers:
            raise self.violated(f"two processes have the number {number}")
        new = machine.spares[number] = Process(next(self._pids), machine.number, number)
        machine.regroup.spare_started(number, now_s=self.now_s)
        alive = sum(spare.is_alive for spare in machine.spares.values())
        if len(machine.regroup.spares) > self.spares or alive > self.spares + self.counts["kill_spare"]:
            raise self.violated("there are more spares than were asked for")
        self.after(self.random.choice((0.1, 0.5, 3.0)), lambda: self._arrive(new, waits=True))

    def _end_spares(self, machine: Machine) -> None:
        for spare in machine.spares.values():
            spare.is_alive = False
        machine.spares.clear()

    def _take(self, machine: Machine, take: Take) -> None:
        if take.spare not in machine.spares:
            raise self.violated(f"there is no spare {take.spare}: it was lost, or taken before")
        self._end(machine, take.worker)
        spare = machine.processes[take.worker] = machine.spares.pop(take.spare)
        spare.slot = take.worker
        machine.regroup.taken(take.worker, take.spare, now_s=self.now_s)
        if not spare.is_alive:  # Which its agent has not noticed yet.
            self.after(0.01, lambda: self._notice_death(spare))

    def _replace(self, machine: Machine, slot: int) -> None:
        self._end(machine, slot)
        new = machine.processes[slot] = Process(next(self._pids), machine.number, slot)
        machine.regroup.replaced(slot, now_s=self.now_s)
        self.after(self.random.choice((0.1, 0.5, 3.0)), lambda: self._arrive(new, waits=True))

    def _restart(self, machine: Machine) -> None:
        for slot, old in enumerate(machine.processes):
            old.is_alive = False
            self._broken(old)
            machine.processes[slot] = Process(next(self._pids), machine.number, slot)
        self._end_spares(machine)
        machine.regroup.restarted(now_s=self.now_s)
        for process in machine.processes:
            self.after(self.random.uniform(0.1, 2.0), lambda p=process: self._arrive(p, waits=True))  # type: ignore[misc]

    # --- workers ----------------------------------------------------------------------------------------------

    def _arrive(self, process: Process, *, waits: bool) -> None:
        machine = self.all[process.machine]
        is_spare = process in machine.spares.values()
        if not process.is_alive or machine.is_lost:
            return
        if not is_spare and machine.processes[process.slot] is not process:
            return
        process.has_arrived = True
        machine.regroup.arrived(process.slot, now_s=self.now_s, waits=waits, limits=LIMITS)
        if not is_spare:
            machine.regroup.attached(process.slot, is_sharded=self.sharded)
        self.after(0.0, lambda: self.look(machine))
        if machine in self.waiting:
            self._let_in_machines()

    def _ask(self, process: Process) -> None:
        process.asked = True
        self._soon_leaves(process, process.inside)

    def _soon_leaves(self, process: Process, generation: int | None, error: str = "") -> None:
        delay_s = self.random.choice((0.0, 0.01, 0.05, 2.0))
        self.after(delay_s, lambda: self._leaves(process, generation, error))

    def _leaves(self, process: Process, generation: int | None, error: str) -> None:
        if process.inside != generation or not process.is_alive or process.is_finished:
            return
        if process.is_stuck:
            self.after(1.0, lambda: self._leaves(process, generation, error))
            return
        machine = self.all[process.machine]
        process.inside = None
        self._broken(process)
        machine.regroup.left(process.slot, now_s=self.now_s, error=error)
        self.after(0.0, lambda: self.look(machine))

    def _broken(self, gone: Process) -> None:
        """The collectives of whoever trains with one that has left or died fail."""
        if gone.pid not in self.trains:
            return
        self.trains = self.trains - {gone.pid}
        for machine in self.fleet:
            for process in machine.processes:
                if process.pid in self.trains and process.is_alive and self.random.random() < 0.7:
                    self._soon_leaves(process, process.inside, "connection closed by peer")

    # --- faults -----------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if self.now_s >= self.faults_until_s:
            return
        if self.waiting and len(self.fleet) > 1 and self.random.random() < 0.1:
            self._lose_machine(self.random.choice(self.fleet))
            self.after(self.random.choice((0.3, 4.0)), self._fault)
            return
        process = self.random.choice([p for m in self.fleet for p in m.processes])
        kind = self.random.choice(("kill", "kill", "raise", "stop", "two"))
        idle = [p for m in self.all.values() if not m.is_lost for p in self._idle(m) if p.is_alive]
        if idle and self.random.random() < 0.2:
            process, kind = self.random.choice(idle), "kill_spare"
        self.counts[kind] += 1
        self.tell(f"{kind} {process.pid} of machine {process.machine}")
        if kind == "stop":
            self.excused.add(process.pid)
            process.is_stuck = True
            self.after(self.random.choice((0.5, 5.0, 20.0)), lambda: self._let_go(process))
        elif kind == "raise":
            self._raise(process)
        else:
            self._kill(process)
            if kind == "two":
                self._kill(self.random.choice(self.all[process.machine].processes))
        self.after(self.random.choice((0.01, 0.3, 4.0)), self._fault)

    def _let_go(self, process: Process) -> None:
        process.is_stuck = False

    def _kill(self, process: Process) -> None:
        process.is_alive = False
        self._broken(process)
        self.after(self.random.choice((0.0, 0.005, 0.02)), lambda: self._drop(process))
        self.after(self.random.choice((0.01, 0.3, 2.0)), lambda: self._notice_death(process))

    def _drop(self, process: Process) -> None:
        """The agent's thread sees its connection end, also while the agent meets others; those that start have none."""
        machine = self.all[process.machine]
        is_worker = process.slot < self.workers and machine.processes[process.slot] is process
        if not machine.is_lost and (is_worker or process in machine.spares.values()):
            machine.regroup.dropped(process.slot, "a connection ended", now_s=self.now_s)
            self.after(0.0, lambda: self.look(machine))

    def _notice_death(self, process: Process) -> None:
        machine = self.all[process.machine]
        if machine.is_lost or process.is_alive:
            return
        if process in machine.spares.values():
            self._notice_death_of_spare(machine, process)
            return
        if process.slot >= self.workers:
            return
        phase = machine.regroup.workers[process.slot].phase
        if machine.processes[process.slot] is not process or phase is Phase.LOST:
            return
        if machine.meeting is None:
            process.is_noticed = True
            machine.regroup.ended(process.slot, f"process {process.pid} was killed", now_s=self.now_s)
            self.after(0.0, lambda: self.look(machine))

    def _notice_death_of_spare(self, machine: Machine, spare: Process) -> None:
        del machine.spares[spare.slot]
        before = (machine.regroup.is_over, [worker.phase for worker in machine.regroup.workers.values()])
        machine.regroup.ended(spare.slot, "", now_s=self.now_s)
        after = (machine.regroup.is_over, [worker.phase for worker in machine.regroup.workers.values()])
        if before != after:
            raise self.violated("the end of a spare has disturbed those that train")
        self.after(0.0, lambda: self.look(machine))

    def _raise(self, process: Process) -> None:
        """An error of its own: it reports that and ends."""
        machine = self.all[process.machine]
        if not process.is_alive or process.is_stuck or machine.meeting is not None:
            return
        machine.regroup.left(process.slot, now_s=self.now_s, error="ValueError", is_own=True)
        self.after(0.1, lambda: self._kill(process))
        self.excused.add(process.pid)
        self.after(0.0, lambda: self.look(machine))

    # --- machines ---------------------------------------------------------------------------------------------

    def _idle(self, machine: Machine) -> list[Process]:
        """Its processes that are in no world."""
        return [*machine.spares.values(), *(machine.processes if machine in self.waiting else ())]

    def _stand_by(self) -> None:
        machine = self._machine()
        self.tell(f"machine {machine.number} stands by")
        self.waiting.append(machine)
        machine.regroup.stand_by(now_s=self.now_s)
        for process in machine.processes:
            delay_s = self.random.choice((0.1, 0.5, 3.0))
            self.after(delay_s, lambda p=process: self._arrive(p, waits=True))  # type: ignore[misc]
        self._let_in_machines()

    def _lose_machine(self, machine: Machine) -> None:
        self.counts["machine"] += 1
        self.tell(f"machine {machine.number} is lost")
        machine.is_lost = True
        self.fleet.remove(machine)
        for process in machine.processes:
            process.is_alive = False
            self._broken(process)
        for other in self.fleet:
            if other.meeting is None:
                other.regroup.others_wait()
                self.after(self.random.uniform(0, 0.2), lambda other=other: self.look(other))  # type: ignore[misc]
        self._let_in_machines()
        self._look_for_met()
        self.after(self.random.choice((1.0, 10.0)), self._stand_by)

    def _let_in_machines(self) -> None:
        """One whose workers are ready takes part in the next meeting, where there is a place."""
        for machine in list(self.waiting):
            if len(self.fleet) == self.machines:
                return
            if machine.regroup.is_ready:
                self.waiting.remove(machine)
                self.fleet.append(machine)
                everyone = tuple(range(self.workers))
                self._meet(machine, Meet(workers=everyone, reason="its machine is let in"))

    # --- the end ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everybody's function returns, if everybody trains together; else a little later."""
        everyone = [p for m in self.fleet for p in m.processes]
        together = all(p.is_alive and p.inside == self.generation for p in everyone)
        if (
            not together
            or len(self.fleet) < self.machines
            or any(m.regroup.is_over or m.meeting is not None for m in self.fleet)
        ):
            self.after(1.0, self._finish)
            return
        for machine in self.fleet:
            spares = machine.regroup.spares.values()
            are_ready = len(spares) == self.spares and all(spare.phase is Phase.READY for spare in spares)
            if not are_ready and not machine.regroup.has_given_up_spares:
                if self.now_s > self.faults_until_s + 300.0:
                    raise self.violated(f"machine {machine.number} has no spares")
                self.after(1.0, self._finish)
                return
        for process in everyone:
            process.is_finished = True
            self.all[process.machine].regroup.finished(process.slot, now_s=self.now_s)
        for machine in self.fleet:
            self.after(0.0, lambda machine=machine: self.look(machine))  # type: ignore[misc]
