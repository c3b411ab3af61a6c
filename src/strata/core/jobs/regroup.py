"""What an agent does with its workers when one of them is lost: the others leave their process group and enter a new one.

One agent has a `Regroup` for the workers of its machine, and gives it what it observes: workers that enter and leave
`strata.recoverable` functions, processes that end, time. `decide` says what to do next, until it says `Continue`.

A generation is one process group of one set of workers. When a worker is lost, fails, or waits to join, the generation is over:
every worker in it is asked to leave, which aborts its collectives. A worker that has left meets those of the other machines
and enters the next generation; none waits for a replacement that is still starting, or for a worker that is busy. Those
join when they are ready, by the same way. Only sharded state needs every rank, so there all are waited for.

A spare is a process beyond those that train: it waits at the function's entrance, in no generation, and takes the place of a worker
that is lost, as its replacement that is ready already. One that ends meanwhile disturbs no worker, and another is started; after
`SPARE_LOSSES` of them in a row none is. A machine that stands by (`stand_by`) has all its workers wait like that, until it is let in.

A process ends for one of four reasons: it was lost by itself; it failed by an error of its own; it did not leave in
time; or in-process recovery is given up (`Restart`), with the reason, and all workers of the machine are started anew.

Pure: time arrives as `now_s`, and nothing here starts, ends or signals a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

JOINS = "a replacement joins"
OTHERS_MEET = "another machine left or joined"
BROKEN = "a collective broke"
"""How the reason begins of a worker that left because of others: what became of those says more."""
GRACE_S = 1.0
"""How long those who have left wait for one that has not."""
EXIT_S = 5.0
"""How long a process may take to end after its connection has, where none is left to continue without it: how it ended is the reason
of the restart, which has to wait for its end anyway."""
SETTLE_S = 10.0
"""How long a replacement waits for the first step of those who train, where they have a job that says when they have made it."""
START_S = 120.0
"""How long a replacement may take until it is ready, where no worker can continue without it."""
SPARE_LOSSES = 5
"""So many spares in a row may end unused."""
STEADY_S = 60.0
"""A spare that has waited for so long ends such a row."""

MAX_IN_PROCESS = 100
TIMEOUT_S = 30.0


class Phase(Enum):
    """Where a worker is."""

    STARTING = "starting"
    """Its process runs, and has not come to a recoverable function."""
    READY = "ready"
    """It waits at the function's entrance, as a replacement does."""
    INSIDE = "inside"
    OUTSIDE = "outside"
    """It has left its generation and waits for the next one."""
    FINISHED = "finished"
    """Its function has returned; it waits until that is so everywhere."""
    ENDING = "ending"
    """It ends by an error of its own, or its connection has ended, and its process is about to be found to have."""
    LOST = "lost"
    WITHDRAWN = "withdrawn"
    """It ends because it was asked to. Such an end is not recovered from here."""


WAITING = (Phase.READY, Phase.OUTSIDE, Phase.FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user has set: the same for all workers of a function."""

    max_in_process: int = MAX_IN_PROCESS
    """Recoveries in a row without a new step, before all workers are started anew."""
    timeout_s: float = TIMEOUT_S
    """Until a worker that does not leave is replaced."""


@dataclass(slots=True, kw_only=True)
class Worker:
    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    """In this phase."""
    asked_s: float | None = None
    """When it was asked to leave."""
    is_leaving: bool = False
    """It has a complete state, and is about to leave: those that wait for it wait for that."""
    is_sharded: bool = False
    """It trains a state that no other rank has."""
    is_behind: bool = False
    """It is still inside a generation before, which the others have left without it: what becomes of it does not concern them."""


# --- what to do -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue:
    """Nothing, until something happens or this time has come."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Ask these workers to leave their generation."""

    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """End this worker's process if it is still there, and start another."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """End this worker's process if it is still there; the spare is in its place from now on."""

    worker: int
    spare: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSpare:
    """Start a process that stands by, under this number."""

    spare: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Form the next generation of these workers and those of the other machines."""

    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The function has returned on every worker: they may continue, and spares end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start all workers of this machine anew; of one that stands by, when it is let in."""

    reason: str


Instruction = Continue | Leave | Replace | Take | StartSpare | Meet | Release | Restart


class Regroup:
    def __init__(self, workers: int, *, spares: int = 0, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.generation = 0
        self._workers = {number: Worker() for number in range(workers)}
        self._wanted_spares = spares
        self._spares: dict[int, Worker] = {}
        """By number, which no worker and no other spare has: those that wait, and those that start."""
        self._next_spare = workers
        self._losses = 0
        """Of spares in a row, or of workers of a machine that stands by."""
        self._stands_by = False
        self._reason = ""
        """Why the present generation is over; empty while it is not."""
        self._rescued: int | None = None
        """The furthest step whose state a worker of this machine saves, since the generation was over."""
        self._in_a_row = 0
        self._met_s = 0.0
        self._has_stepped = False
        """In the present generation."""
        self._has_job = False
        """Some worker has had a job, whose first step is reported."""
        self._dropped: int | None = None
        """The worker whose connection ended, where the generation is over for that, and it is not known why yet."""
        self._furthest = -1
        """The newest step of any worker, ever."""

    @property
    def workers(self) -> Mapping[int, Worker]:
        return self._workers

    @property
    def spares(self) -> Mapping[int, Worker]:
        return self._spares

    @property
    def has_given_up_spares(self) -> bool:
        return self._losses >= SPARE_LOSSES

    @property
    def stands_by(self) -> bool:
        return self._stands_by

    @property
    def is_ready(self) -> bool:
        """Whether all workers wait to be let in."""
        return all(worker.phase is Phase.READY for worker in self._workers.values())

    @property
    def is_active(self) -> bool:
        """Whether workers are in a recoverable function, and none ends on purpose: only then is there anything to decide."""
        phases = {worker.phase for worker in self._workers.values()}
        return Phase.WITHDRAWN not in phases and not phases <= {Phase.STARTING, Phase.LOST}

    @property
    def is_over(self) -> bool:
        """Whether the present generation is over, and the next one has not been entered."""
        return bool(self._reason)

    # --- what was observed ------------------------------------------------------------------------------------

    def arrived(self, number: int, *, now_s: float, waits: bool, limits: Limits) -> None:
        """A worker has come to a recoverable function: it enters at once, or, as a replacement or a spare, waits to be let in."""
        self.limits = limits
        if number in self._spares:
            self._spares[number] = Worker(phase=Phase.READY, since_s=now_s)
        elif number in self._workers:
            self._move(number, Phase.READY if waits else Phase.INSIDE, now_s)
            if not waits:
                self._met_s = now_s

    def left(self, number: int, *, now_s: float, error: str = "", is_own: bool = False) -> None:
        """A worker has left its generation: it was asked to, a collective broke, or (`is_own`) its program failed."""
        worker = self._workers[number]
        if worker.phase is not Phase.INSIDE:
            return
        self._move(number, Phase.ENDING if is_own else Phase.OUTSIDE, now_s)
        if not self._reason and not worker.is_behind:
            self._begin(error or f"worker {number} left")

    def finished(self, number: int, *, now_s: float) -> None:
        if self._workers[number].phase is Phase.INSIDE:
            self._move(number, Phase.FINISHED, now_s)

    def withdrew(self, number: int, *, now_s: float) -> None:
        if number in self._workers:
            self._move(number, Phase.WITHDRAWN, now_s)

    def stepped(self, step: int) -> None:
        """A worker has made this step: the recovery has led somewhere if no worker had made it before."""
        self._has_stepped = True
        if step > self._furthest:
            self._furthest = step
            self._in_a_row = 0

    def attached(self, number: int, *, is_sharded: bool) -> None:
        """A worker has started a job."""
        self._workers[number].is_sharded = is_sharded
        self._has_job = True

    def dropped(self, number: int, reason: str, *, now_s: float) -> None:
        """A worker's connection has ended, as it does some time before a process that holds a device has."""
        if number not in self._workers:
            return  # A spare, whose end disturbs no worker.
        worker = self._workers[number]
        if worker.phase not in (Phase.INSIDE, *WAITING):
            return
        self._move(number, Phase.ENDING, now_s)
        if not self._concerns_others(worker):
            return
        if not self._reason:
            self._begin(reason)
            self._dropped = number
        elif self._reason.startswith(BROKEN):  # The others have noticed it first.
            self._reason = reason
            self._dropped = number

    def ended(self, number: int, reason: str, *, now_s: float) -> None:
        """A worker's or a spare's process has ended before all had finished."""
        if number in self._spares:
            self._note_loss(self._spares.pop(number), now_s)
            return
        if self._stands_by:
            self._note_loss(self._workers[number], now_s)
        worker = self._workers[number]
        self._move(number, Phase.LOST, now_s)
        if self._concerns_others(worker) and not self._reason:
            self._begin(reason)
        elif self._dropped == number or (self._concerns_others(worker) and self._reason.startswith(BROKEN)):
            self._reason = reason  # The others have noticed it first, or its connection has ended first.

    def others_wait(self) -> None:
        """Another machine wants to meet: it has lost a worker, joins or leaves."""
        if not self._reason and self.is_active:
            self._begin(OTHERS_MEET)

    def may_rescue(self, number: int, step: int) -> bool:
        """A worker that leaves has the complete state of this step: whether it should save it. The first of each step does; who is
        further does too. One that comes from a generation before does not: the others have continued without it."""
        worker = self._workers[number]
        worker.is_leaving = True
        if worker.is_behind or (self._rescued is not None and step <= self._rescued):
            return False
        self._rescued = step
        return True

    # --- what was carried out ---------------------------------------------------------------------------------

    def asked(self, numbers: tuple[int, ...], *, now_s: float) -> None:
        for number in numbers:
            self._workers[number].asked_s = now_s

    def replaced(self, number: int, *, now_s: float) -> None:
        self._move(number, Phase.STARTING, now_s)

    def spare_started(self, spare: int, *, now_s: float) -> None:
        self._spares[spare] = Worker(since_s=now_s)
        self._next_spare = spare + 1

    def taken(self, number: int, spare: int, *, now_s: float) -> None:
        """This worker's process is the one that was the spare."""
        self._move(number, self._spares.pop(spare).phase, now_s)
        self._losses = 0

    def stand_by(self, *, now_s: float) -> None:
        """All workers were started to wait: this machine is not in the world."""
        self.restarted(now_s=now_s)
        self._stands_by = True

    def met(self, members: tuple[int, ...], *, now_s: float) -> None:
        """These workers were let into the next generation."""
        self.generation += 1
        self._met_s, self._has_stepped = now_s, False
        self._reason = ""
        self._rescued = self._dropped = None
        self._stands_by = False
        ended = [n for n in members if self._workers[n].phase is Phase.ENDING]
        for number in members:
            if number not in ended:
                self._move(number, Phase.INSIDE, now_s)
        for number in set(self._in(Phase.INSIDE)) - set(members):
            self._workers[number].is_behind = True
        if ended:
            self._begin(f"worker {ended[0]} ended during the rendezvous")

    def released(self, *, now_s: float) -> None:
        """All have continued behind their function: their ends are not recovered from here."""
        self.restarted(now_s=now_s)

    def restarted(self, *, now_s: float) -> None:
        """All processes are new, and no spare is left."""
        self._reason, self._in_a_row = "", 0
        self._stands_by, self._losses = False, 0
        self._spares.clear()
        self._rescued = self._dropped = None
        for number in self._workers:
            self._workers[number] = Worker(since_s=now_s)

    # --- what to do next --------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Instruction:
        if self._stands_by:
            return self._standing_by()
        if not self._reason and self._has_joiners(now_s):
            self._begin(JOINS)
        if not self._reason:
            return self._undisturbed(now_s)
        if self._in_a_row > self.limits.max_in_process:
            return Restart(reason=f"{self._in_a_row} recoveries in a row without a new step")
        survivors = self._in(Phase.READY, Phase.INSIDE, Phase.OUTSIDE, Phase.FINISHED)
        if not survivors and not (self._ready_spares() and self._in(Phase.LOST, Phase.ENDING)):
            exit_s = self._exit_s()
            if exit_s is not None and now_s < exit_s:
                return Continue(until_s=exit_s)
            return Restart(reason=f"no worker of this machine is left: {self._reason}")
        if unasked := tuple(n for n in self._in(Phase.INSIDE) if self._workers[n].asked_s is None):
            return Leave(workers=unasked, reason=self._reason)
        if late := self._late(now_s):
            return self._replacement(late[0], f"it did not leave within {self.limits.timeout_s:g} s", now_s)
        instruction, lost = self._meet(now_s), self._in(Phase.LOST)
        # While no worker waits for it: starting a process takes its time.
        if lost and isinstance(instruction, Continue):
            return self._replacement(lost[0], self._reason, now_s)
        return instruction

    def _exit_s(self) -> float | None:
        """Until when the process is waited for whose connection ended first; None where nothing more will be known of it."""
        if self._dropped is None or (worker := self._workers[self._dropped]).phase is not Phase.ENDING:
            return None
        return worker.since_s + EXIT_S

    def _undisturbed(self, now_s: float) -> Continue | Release | Replace | Take | StartSpare:
        if lost := self._in(Phase.LOST):
            return self._replacement(lost[0], "its process ended", now_s)
        if len(self._in(Phase.FINISHED)) == len(self._workers):
            return Release()
        if late := self._late(now_s):  # Of a generation before.
            return self._replacement(late[0], f"it did not leave within {self.limits.timeout_s:g} s", now_s)
        if self._wants_spare() and (self._has_stepped or now_s >= self._settled_s):
            return StartSpare(spare=self._next_spare)
        return Continue(until_s=self._next_s(now_s))

    def _standing_by(self) -> Continue | Replace | Restart:
        if self.has_given_up_spares:
            return Restart(reason=f"{self._losses} of its workers in a row have ended on standby")
        if lost := self._in(Phase.LOST):
            return Replace(worker=lost[0], reason="its process ended")
        return Continue()

    def _replacement(self, number: int, reason: str, now_s: float) -> Replace | Take:
        """The one that is ready first: a spare that is, one that is starting, or a process that is started now."""
        starting = (
            spare
            for spare, waiting in self._spares.items()
            if waiting.phase is Phase.STARTING and now_s - waiting.since_s < START_S
        )
        for spare in (*self._ready_spares(), *starting):
            return Take(worker=number, spare=spare, reason=reason)
        return Replace(worker=number, reason=reason)

    def _ready_spares(self) -> tuple[int, ...]:
        return tuple(number for number, spare in self._spares.items() if spare.phase is Phase.READY)

    def _wants_spare(self) -> bool:
        """While all train: the start of a process takes time from those that recover."""
        is_calm = len(self._in(Phase.INSIDE)) == len(self._workers)
        return is_calm and len(self._spares) < self._wanted_spares and not self.has_given_up_spares

    def _meet(self, now_s: float) -> Continue | Meet | Restart:
        waiting = self._in(*WAITING)
        busy = [self._workers[n] for n in self._in(Phase.INSIDE)]
        is_sharded = any(worker.is_sharded for worker in self._workers.values())
        if is_sharded:
            starting = self._in(Phase.STARTING, Phase.ENDING, Phase.LOST)
            if any(now_s - self._workers[n].since_s >= START_S for n in starting):
                return Restart(reason=f"a replacement was not ready within {START_S:g} s")
            if busy or starting:
                return Continue(until_s=self._next_s(now_s))
        elif not waiting or self._should_wait_for(busy, now_s):
            return Continue(until_s=self._next_s(now_s))
        survivors = self._in(Phase.OUTSIDE, Phase.FINISHED)
        if self._reason != JOINS and survivors and not is_sharded:
            waiting = survivors  # A new process is slow at its first step: it joins after theirs.
        return Meet(workers=waiting, reason=self._reason)

    def _should_wait_for(self, busy: list[Worker], now_s: float) -> bool:
        """Replacements have no state: they do not begin before a worker that has one, as long as there is such a worker."""
        has_survivors = bool(self._in(Phase.OUTSIDE, Phase.FINISHED))
        return any(
            worker.is_leaving or not has_survivors or now_s - (worker.asked_s or now_s) < GRACE_S
            for worker in busy
        )

    def _has_joiners(self, now_s: float) -> bool:
        """Whether a worker waits to join, no other is about to, and those who train have started."""
        joiners = self._in(Phase.READY, Phase.OUTSIDE)
        is_settling = not self._has_stepped and now_s < self._settled_s
        if not joiners or (is_settling and self._in(Phase.INSIDE)):
            return False
        waited_s = max(now_s - self._workers[n].since_s for n in joiners)
        return not self._in(Phase.STARTING) or waited_s >= GRACE_S

    @property
    def _settled_s(self) -> float:
        """When those who train have started, or are not waited for any longer."""
        return self._met_s + (SETTLE_S if self._has_job else GRACE_S)

    def _late(self, now_s: float) -> tuple[int, ...]:
        ending = [
            n for n in self._in(Phase.ENDING) if now_s - self._workers[n].since_s >= self.limits.timeout_s
        ]
        asked = {n: self._workers[n].asked_s for n in self._in(Phase.INSIDE)}
        return (
            *ending,
            *(n for n, at_s in asked.items() if at_s is not None and now_s - at_s >= self.limits.timeout_s),
        )

    def _next_s(self, now_s: float) -> float | None:
        """When time alone changes what is to be done."""
        times = [self._settled_s]
        for worker in self._workers.values():
            if worker.phase is Phase.INSIDE and worker.asked_s is not None:
                times += [worker.asked_s + GRACE_S, worker.asked_s + self.limits.timeout_s]
            elif worker.phase is Phase.ENDING:
                times.append(worker.since_s + self.limits.timeout_s)
            elif worker.phase in (Phase.READY, Phase.OUTSIDE):
                times.append(worker.since_s + GRACE_S)
            elif worker.phase is Phase.STARTING:
                times.append(worker.since_s + START_S)
        return min((time_s for time_s in times if time_s > now_s), default=None)

    def _note_loss(self, waiting: Worker, now_s: float) -> None:
        """Of a process that stood by."""
        was_steady = waiting.phase is Phase.READY and now_s - waiting.since_s >= STEADY_S
        self._losses = 1 if was_steady else self._losses + 1

    def _begin(self, reason: str) -> None:
        self._reason = reason
        self._in_a_row += 1

    @staticmethod
    def _concerns_others(lost: Worker) -> bool:
        """Whether it was in the present generation, which is over without it."""
        return lost.phase in (Phase.INSIDE, Phase.FINISHED) and not lost.is_behind

    def _in(self, *phases: Phase) -> tuple[int, ...]:
        return tuple(number for number, worker in self._workers.items() if worker.phase in phases)

    def _move(self, number: int, phase: Phase, now_s: float) -> None:
        self._workers[number] = replace(
            self._workers[number],
            phase=phase,
            since_s=now_s,
            asked_s=None,
            is_leaving=False,
            is_behind=False,
        )
