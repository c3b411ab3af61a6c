"""A fleet of agents and workers that recover without a restart, on a clock of its own.

Each machine's agent holds a real `Regroup`; workers, processes and the meeting of agents are played. Workers are killed, raise,
hang, stop and take their time at any moment, also while they leave or join; machines are cut off while they meet. What must
hold is checked after every event, and at the end, when faults have ceased, everybody trains in one generation.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.core.regroup import (
    Continue,
    Leave,
    Limits,
    Meet,
    Phase,
    Regroup,
    Release,
    Replace,
    Restart,
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
    inside: int | None = None
    is_alive: bool = True
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
    meeting: tuple[int, ...] | None = None
    """The workers that its agent meets the others with; None while it does not meet."""


@dataclass
class Fleet:
    seed: int
    machines: int = 2
    workers: int = 3
    sharded: bool = False
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
        self.fleet = [
            Machine(
                m,
                Regroup(self.workers, limits=LIMITS),
                [Process(next(self._pids), m, s) for s in range(self.workers)],
            )
            for m in range(self.machines)
        ]
        self.excused: set[int] = set()
        """Processes that may be replaced: they were hurt, or did not leave in time."""

    # --- the clock --------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), what))

    def run(self) -> None:
        for machine in self.fleet:
            for process in machine.processes:
                self._arrive(process, waits=False)
        self._begin({p.pid for m in self.fleet for p in m.processes})
        self.after(self.random.expovariate(0.5), self._fault)
        self.after(self.faults_until_s + 60.0, self._finish)
        while self._events and self.now_s < self.faults_until_s + 400.0:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
            if all(p.is_released for m in self.fleet for p in m.processes):
                return
        raise Violation(f"seed {self.seed}: not everybody came to an end\n" + "\n".join(self.story[-60:]))

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now_s:8.3f} {text}")

    # --- agents -----------------------------------------------------------------------------------------------

    def look(self, machine: Machine) -> None:
        while machine.meeting is None:
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
                self._replace(machine, instruction.worker)
            elif isinstance(instruction, Release):
                machine.regroup.released(now_s=self.now_s)
                for process in machine.processes:
                    process.is_released = True
            elif isinstance(instruction, Restart):
                self._restart(machine)
            else:
                self._meet(machine, instruction)

    def _meet(self, machine: Machine, meet: Meet) -> None:
        for slot in meet.workers:
            if machine.regroup.workers[slot].phase is Phase.LOST:
                raise Violation(f"seed {self.seed}: a lost worker is a member")
        machine.meeting = meet.workers
        for other in self.fleet:
            if other is not machine and other.meeting is None:
                other.regroup.others_wait()
                self.after(self.random.uniform(0, 0.2), lambda other=other: self.look(other))  # type: ignore[misc]
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
            self.after(0.05, lambda g=self.generation: self._step(g))  # type: ignore[misc]

    def _step(self, generation: int) -> None:
        if generation == self.generation:
            for machine in self.fleet:
                machine.regroup.stepped(self.generation)

    def _begin(self, pids: set[int]) -> None:
        self.trains = pids
        if self.generation == 0:
            for machine in self.fleet:
                for process in machine.processes:
                    process.inside = 0

    def _replace(self, machine: Machine, slot: int) -> None:
        old = machine.processes[slot]
        if old.is_alive and old.pid not in self.excused:
            raise Violation(
                f"seed {self.seed}: process {old.pid} was replaced, and had done nothing\n"
                + "\n".join(self.story[-30:])
            )
        old.is_alive = False
        self._broken(old)
        new = machine.processes[slot] = Process(next(self._pids), machine.number, slot)
        machine.regroup.replaced(slot, now_s=self.now_s)
        self.after(self.random.choice((0.1, 0.5, 3.0)), lambda: self._arrive(new, waits=True))

    def _restart(self, machine: Machine) -> None:
        for slot, old in enumerate(machine.processes):
            old.is_alive = False
            self._broken(old)
            machine.processes[slot] = Process(next(self._pids), machine.number, slot)
        machine.regroup.restarted(now_s=self.now_s)
        for process in machine.processes:
            self.after(self.random.uniform(0.1, 2.0), lambda p=process: self._arrive(p, waits=True))  # type: ignore[misc]

    # --- workers ----------------------------------------------------------------------------------------------

    def _arrive(self, process: Process, *, waits: bool) -> None:
        machine = self.fleet[process.machine]
        if not process.is_alive or machine.processes[process.slot] is not process:
            return
        machine.regroup.arrived(process.slot, now_s=self.now_s, waits=waits, limits=LIMITS)
        machine.regroup.shards(process.slot, is_sharded=self.sharded)
        self.after(0.0, lambda: self.look(machine))

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
        machine = self.fleet[process.machine]
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
        process = self.random.choice([p for m in self.fleet for p in m.processes])
        kind = self.random.choice(("kill", "kill", "raise", "stop", "two"))
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
                self._kill(self.random.choice(self.fleet[process.machine].processes))
        self.after(self.random.choice((0.01, 0.3, 4.0)), self._fault)

    def _let_go(self, process: Process) -> None:
        process.is_stuck = False

    def _kill(self, process: Process) -> None:
        process.is_alive = False
        self._broken(process)
        self.after(0.01, lambda: self._notice_death(process))

    def _notice_death(self, process: Process) -> None:
        machine = self.fleet[process.machine]
        phase = machine.regroup.workers[process.slot].phase
        if process.is_alive or machine.processes[process.slot] is not process or phase is Phase.LOST:
            return
        if machine.meeting is None:
            machine.regroup.ended(process.slot, f"process {process.pid} was killed", now_s=self.now_s)
            self.after(0.0, lambda: self.look(machine))

    def _raise(self, process: Process) -> None:
        """An error of its own: it reports that and ends."""
        machine = self.fleet[process.machine]
        if not process.is_alive or process.is_stuck or machine.meeting is not None:
            return
        machine.regroup.left(process.slot, now_s=self.now_s, error="ValueError", is_own=True)
        self.after(0.1, lambda: self._kill(process))
        self.excused.add(process.pid)
        self.after(0.0, lambda: self.look(machine))

    # --- the end ----------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Everybody's function returns, if everybody trains together; else a little later."""
        everyone = [p for m in self.fleet for p in m.processes]
        together = all(p.is_alive and p.inside == self.generation for p in everyone)
        if not together or any(m.regroup.is_over or m.meeting is not None for m in self.fleet):
            self.after(1.0, self._finish)
            return
        for process in everyone:
            process.is_finished = True
            self.fleet[process.machine].regroup.finished(process.slot, now_s=self.now_s)
        for machine in self.fleet:
            self.after(0.0, lambda machine=machine: self.look(machine))  # type: ignore[misc]
