"""The agent of workers that recover without a restart: it carries out what `strata.core.jobs.regroup` decides.

Workers of recoverable functions (`strata.training.recoverable`) report to it over a channel. While there are any, torch's agent
leaves all of them alone: who is lost is replaced, by a spare where one stands by (`--spares`), the others meet again and enter their
function anew. Without such workers, or when recovery in the process is given up, everything is as torch has it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.connection
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerState

from strata import locks
from strata.agent.careful import CarefulAgent
from strata.agent.channel import (
    AGENT_VARIABLE,
    DROPPED,
    ENTRANCE_VARIABLE,
    SLOT_VARIABLE,
    AgentChannel,
    Message,
)
from strata.agent.finishing import WorkFinisher
from strata.agent.frames import take_report
from strata.agent.session_relay import SessionRelay
from strata.agent.trace import note_rendezvous
from strata.checkpoint.peers.memory import SOCKET_VARIABLE, Meeting, PeerMemory
from strata.checkpoint.peers.wire import PeerError
from strata.core.faults.failures import WorkerError, signal_name
from strata.core.faults.restarts import Verdict
from strata.core.jobs.regroup import (
    BROKEN,
    JOINS,
    OTHERS_MEET,
    START_S,
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
from strata.rpc.frames import SESSIONS_VARIABLE
from strata.shared_memory import make_private, remove_empty, run_folder
from strata.torch_compat.elastic import WorkerProcesses

log = logging.getLogger("strata.rendezvous")

ASK_S = 1.0
"""Between two questions to the rendezvous' server."""


@runtime_checkable
class MeetsOthers(Protocol):
    """A rendezvous of several machines, some of which may stand by."""

    on_stand_by: Callable[[], None] | None

    @property
    def max_machines(self) -> int: ...

    def announce_recoverable(self) -> bool:
        """The workers of this run recover without a restart: whether the others can know now."""
        ...

    def is_recoverable(self) -> bool:
        """Whether one of the others has announced that."""
        ...


def finish_although_asked_once(finisher: WorkFinisher) -> None:
    """A process that watches an agent (a task's supervisor) may ask it to end because its workers have failed, just when it does so by
    itself: that is no reason to give up what they left. Asked again, it ends."""
    try:
        finisher.finish()
    except BaseException as error:
        if getattr(error, "sigval", None) == signal.SIGTERM:
            finisher.finish()
        raise


class RegroupingAgent(CarefulAgent):
    wanted_spares = 0
    """Of each agent in this process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        spec = self.get_worker_group().spec
        self._slots = spec.local_world_size
        self._regroup = Regroup(self._slots, spares=self.wanted_spares)
        self._numbers = list(range(self._slots))
        """For each slot, the number that its process has on the channel: its own, or that of the spare it was."""
        self._lock = threading.Lock()
        """Of `_regroup`: workers report in a thread of their own."""
        self._noted: set[int] = set()
        """The numbers of the processes whose end was noticed."""
        self._is_announced = False
        """That the workers of this run recover without a restart."""
        self._is_cold = False
        """Workers of this machine do not stand by, because they have ended when they did."""
        self._ask_again_s = 0.0
        self._pause_s = spec.monitor_interval
        self._finisher: WorkFinisher | None = None
        self._relay: SessionRelay | None = None
        """Speaks for this machine's workers."""
        self._channel = self._listen(spec.rdzv_handler.get_run_id())
        if self._channel is not None:
            spec.monitor_interval = 0.0  # The wait is in `look`, where it ends when something happens.
        self._others = spec.rdzv_handler if isinstance(spec.rdzv_handler, MeetsOthers) else None
        self.peer_memory = self._open_peer_memory(spec.rdzv_handler)
        """Keeps copies of other machines' snapshots, as soon as a job wants some."""
        self._ask_for_copies_s = 0.0
        if self._others is not None and self._channel is not None:
            self._others.on_stand_by = self._stand_by

    def _listen(self, run: str) -> AgentChannel | None:
        # Not the run's own folder, which a job clears when it has ended.
        folder = run_folder(f"agent-{os.getpid()}-{run}")
        try:
            make_private(folder, inside=folder.parent)
            self._folder = locks.create(folder)  # Others remove what an agent that was killed has left.
            channel = AgentChannel(folder / "socket", self._on_message)
        except OSError as error:
            log.warning("workers cannot recover without a restart: %s", error)
            return None
        os.environ[AGENT_VARIABLE] = str(channel.path)
        try:
            self._relay = SessionRelay(folder / "sessions")
            os.environ[SESSIONS_VARIABLE] = str(self._relay.path)
        except OSError as error:
            log.warning("each worker opens its own session: %s", error)
        self._finisher = WorkFinisher(str(channel.path), self.coordinator)
        atexit.register(self.close)
        return channel

    def _open_peer_memory(self, handler: Any) -> PeerMemory | None:
        try:
            peer_memory = PeerMemory(
                handler if isinstance(handler, Meeting) else None, run=handler.get_run_id()
            )
        except OSError as error:
            log.warning("this machine cannot keep copies of other machines' snapshots: %s", error)
            return None
        os.environ[SOCKET_VARIABLE] = str(peer_memory.socket_path)
        atexit.register(peer_memory.close)
        return peer_memory

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Workers that have died are not the end: what they left in memory is made durable first."""
        try:
            result = super().run(role)
        except BaseException as error:
            # The user at the terminal wants it to end.
            if not isinstance(error, KeyboardInterrupt) and getattr(error, "sigval", None) != signal.SIGINT:
                self._finish()
            raise
        if result.is_failed() and self._finisher is not None:
            finish_although_asked_once(self._finisher)
        return result

    def _finish(self) -> None:
        if self._finisher is not None:
            self._finisher.finish()

    def starting(self) -> None:
        super().starting()
        if self._finisher is not None:
            self._finisher.workers_are_away()
        with self._lock:
            self._regroup.restarted(now_s=time.monotonic())
            self._numbers = list(range(self._slots))
        self._noted.clear()
        self.forget_processes()  # They have ended.

    def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            if self._relay is not None:
                self._relay.close()
            channel.close()
            shutil.rmtree(self._folder.folder, ignore_errors=True)
            remove_empty(self._folder.folder)
            self._folder.release()

    # --- what workers say, in the channel's thread ------------------------------------------------------------

    def _on_message(self, number: int, message: Message) -> Message | None:
        now_s, kind, regroup = time.monotonic(), message["kind"], self._regroup
        with self._lock:
            if number in regroup.spares:
                slot = number
            elif number in self._numbers:
                slot = self._numbers.index(number)
            else:
                return None  # Of a process that another has taken the place of.
            if kind == "arrived":
                limits = Limits(
                    max_in_process=int(message["max_in_process"]), timeout_s=float(message["timeout_s"])
                )
                regroup.arrived(slot, now_s=now_s, waits=bool(message["waits"]), limits=limits)
            elif kind == "left":
                error = WorkerError.from_dict(message["error"]) if message["error"] else None
                is_own = bool(message["is_own"]) and not regroup.is_over
                who = f"rank {self.rank_of(slot)}" if is_own else f"{BROKEN} on rank {self.rank_of(slot)}"
                said = f"{who}: {error}" if error is not None else str(message.get("reason", ""))
                regroup.left(slot, now_s=now_s, error=said, is_own=is_own)
                return {"kind": "end"} if is_own else None
            elif kind == "finished":
                regroup.finished(slot, now_s=now_s)
            elif kind == "withdrew":
                regroup.withdrew(slot, now_s=now_s)
            elif kind == "attached":
                regroup.attached(slot, is_sharded=bool(message["is_sharded"]))
            elif kind == "stepped":
                regroup.stepped(int(message["step"]))
            elif kind == "may_rescue":
                return {"kind": "rescue", "may": regroup.may_rescue(slot, int(message["step"]))}
            elif kind == DROPPED and slot < self._slots:
                regroup.dropped(slot, f"rank {self.rank_of(slot)} has ended", now_s=now_s)
        return None

    # --- what is done, in torch's ------------------------------------------------------------------------------

    def look(self) -> WorkerState | None:
        self.look_at_memory()
        if self._channel is None or self.processes is None:
            time.sleep(self._pause_s if self._channel is not None else 0.0)
            return None
        self._wait()
        with self._lock:
            if not self._regroup.is_active:
                return None
        if self._others is not None and not self._is_announced and self._may_ask():
            self._is_announced = self._others.announce_recoverable()
        if self._note_ends() is not None:
            return None  # Torch ends the run.
        while True:
            with self._lock:
                instruction = self._regroup.decide(time.monotonic())
            if isinstance(instruction, Continue):
                self.processes.before_poll()  # Torch does not poll them, as long as all is decided here.
                return WorkerState.HEALTHY
            if isinstance(instruction, Restart):
                if self.has_restarts:
                    log.warning("all workers of this machine are restarted: %s", instruction.reason)
                    return WorkerState.UNHEALTHY
                log.error("the run ends, because no restarts are left: %s", instruction.reason)
                self.processes.kill()
                return None  # Torch finds them, and says that the run has failed.
            self._carry_out(instruction)

    def keep(self) -> bool:
        with self._lock:
            if not self._regroup.is_active:
                return False
            self._regroup.others_wait()
            return True

    def _wait(self) -> None:
        """Until a worker says something or ends, or it is time to look at what else may have changed."""
        assert self._channel is not None
        assert self.processes is not None
        with self._lock:
            instruction = self._regroup.decide(time.monotonic()) if self._regroup.is_active else Continue()
        if not isinstance(instruction, Continue):
            return
        now_s = time.monotonic()
        limit_s = (
            self._pause_s if instruction.until_s is None else min(self._pause_s, instruction.until_s - now_s)
        )
        ended = self.processes.exit_codes()
        endings = [fd for slot, fd in self.processes.endings().items() if slot not in ended]
        endings += [spare.sentinel for spare in self.processes.spares().values() if spare.exitcode is None]
        multiprocessing.connection.wait([self._channel.news, *endings], timeout=max(limit_s, 0.0))
        self._channel.taken()

    def _note_ends(self) -> str | None:
        """Workers whose processes have ended are lost; why the run is given up, if it is."""
        assert self.processes is not None
        self._note_ends_of_spares(self.processes)
        pids = self.processes.pids()
        for slot, code in self.processes.exit_codes().items():
            if pids[slot] in self._noted:
                continue
            self._noted.add(pids[slot])
            error = take_report(self.processes.error_files[slot]) if code > 0 else None
            failure = self.failure(slot, pids[slot], code=code, error=error)
            with self._lock:
                self._regroup.ended(slot, str(failure), now_s=time.monotonic())
            if code == 0:
                self.count_restart()
                continue
            verdict = self.conclude([failure], others_continue=True)
            super().starting()  # The next attempt.
            if verdict.decision == "stop":
                return verdict.reason
            self.count_restart()
        return None

    def _note_ends_of_spares(self, processes: WorkerProcesses) -> None:
        """They disturb no worker."""
        for number, process in processes.spares().items():
            if process.exitcode is None:
                continue
            error = take_report(processes.end_spare(number))
            with self._lock:
                self._regroup.ended(number, "", now_s=time.monotonic())
                is_last = self._regroup.has_given_up_spares
            then = "no more are started, and a lost worker is replaced by a new process" if is_last else ""
            log.warning(
                "a spare (pid %d) %s%s",
                *(process.pid, _ended(process.exitcode, error), f"; {then}" if then else ""),
            )

    def _carry_out(self, instruction: Leave | Replace | Take | StartSpare | Meet | Release) -> None:
        assert self._channel is not None
        assert self.processes is not None
        if isinstance(instruction, Leave):
            with self._lock:
                self._regroup.asked(instruction.workers, now_s=time.monotonic())
            for slot in instruction.workers:
                self._channel.send(self._numbers[slot], {"kind": "leave", "reason": instruction.reason})
        elif isinstance(instruction, Replace | Take):
            self._replace(instruction)
        elif isinstance(instruction, StartSpare):
            self._start_spare(instruction.spare)
        elif isinstance(instruction, Release):
            numbers = list(self._numbers)
            with self._lock:
                self._regroup.released(now_s=time.monotonic())
                self._numbers = list(range(self._slots))  # By which they come to another such function.
            for spare in self.processes.spares():
                self.processes.end_spare(spare)
            for number in numbers:
                self._channel.send(number, {"kind": "release"})
        else:
            self._meet(instruction)

    def _replace(self, instruction: Replace | Take) -> None:
        """By a new process, or by a spare."""
        assert self.processes is not None
        slot = instruction.worker
        pid = self.processes.pids()[slot]
        if pid not in self._noted:
            failure = self.failure(slot, pid, code=None, replaced=instruction.reason)
            reason = "it is killed and replaced by another process"
            self._incidents.report([failure], Verdict(decision="restart", reason=reason))
        self._noted.discard(pid)  # Another process may get its number.
        if isinstance(instruction, Take):
            pid = self.processes.take_spare(instruction.spare, slot)
            log.warning("a spare (pid %d) replaces rank %d", pid, self.rank_of(slot))
            with self._lock:
                self._regroup.taken(slot, instruction.spare, now_s=time.monotonic())
                self._numbers[slot] = instruction.spare
        else:
            with self._lock:  # Before it is there: it may arrive at once.
                self._regroup.replaced(slot, now_s=time.monotonic())
                self._numbers[slot] = slot
            pid = self.processes.replace(slot, {ENTRANCE_VARIABLE: "wait", SLOT_VARIABLE: str(slot)})
        self.get_worker_group().workers[slot].id = pid

    def _start_spare(self, number: int) -> None:
        """It knows neither its rank nor its device before it takes a worker's place: until then it has a rank beyond all."""
        assert self.processes is not None
        rank = self.get_worker_group().workers[0].world_size + number - self._slots
        variables = {ENTRANCE_VARIABLE: "spare", SLOT_VARIABLE: str(number), "RANK": str(rank)}
        with self._lock:  # Before it is there: it may arrive at once.
            self._regroup.spare_started(number, now_s=time.monotonic())
        pid = self.processes.start_spare(number, {**variables, "LOCAL_WORLD_SIZE": str(self._slots)})
        log.info("a spare is started (pid %d)", pid)

    def _meet(self, instruction: Meet) -> None:
        began_s = time.monotonic()
        variables = self.meet(instruction.workers)
        note_rendezvous(self.get_worker_group().spec.rdzv_handler.get_run_id(), began_s, time.monotonic())
        self._enter(instruction, variables)

    def _enter(self, instruction: Meet, variables: Mapping[int, dict[str, str]]) -> None:
        assert self._channel is not None
        assert self.processes is not None
        first = min(instruction.workers)
        with self._lock:
            phases = {worker.phase for worker in self._regroup.workers.values()}
            self._regroup.met(instruction.workers, now_s=time.monotonic())
            generation = self._regroup.generation
        # Why a worker of this machine has ended is in the log already; an error that has ended none of them is not.
        none_ended = phases <= {Phase.INSIDE, Phase.OUTSIDE, Phase.FINISHED}
        is_news = none_ended and instruction.reason not in (JOINS, OTHERS_MEET)
        log.log(
            logging.WARNING if is_news else logging.INFO,
            "generation %d: %d of %d workers of this machine (%s)",
            *(generation, len(instruction.workers), self._slots, instruction.reason),
        )
        for slot in instruction.workers:
            number = self._numbers[slot]
            own = {**variables[slot], "LOCAL_WORLD_SIZE": str(self._slots), SLOT_VARIABLE: str(slot)}
            message = {"kind": "enter", "variables": own, "is_first": slot == first, "generation": generation}
            if number != slot:  # It was a spare.
                message["outputs"] = self.processes.outputs(slot)
            self._channel.send(number, {**message, "reason": instruction.reason})

    # --- while this machine stands by, within torch's rendezvous ---------------------------------------------------

    def _stand_by(self) -> None:
        """Called repeatedly. Where the run's workers recover without a restart, those of this machine are started, and wait at the
        entrance of their function until it is let in; else they are started then."""
        assert self._channel is not None
        assert self._others is not None
        self._keep_copies_meanwhile()
        if self.processes is not None:
            # Workers that were in the world, and lost their places to another machine, wait where they are.
            if self._regroup.stands_by:
                self._channel.taken()
                self._look_after_waiting(self.processes)
        elif not self._is_cold and self._may_ask() and self._others.is_recoverable():
            first_rank = self._others.max_machines * self._slots
            with self._lock:
                self._regroup.stand_by(now_s=time.monotonic())
            self.start_early({ENTRANCE_VARIABLE: "wait"}, first_rank=first_rank)

    def _keep_copies_meanwhile(self) -> None:
        """A machine that stands by has memory for copies too."""
        now_s = time.monotonic()
        if self.peer_memory is None or self.peer_memory.is_open or now_s < self._ask_for_copies_s:
            return
        self._ask_for_copies_s = now_s + ASK_S
        try:
            if self.peer_memory.is_wanted():
                self.peer_memory.open()
        except (OSError, PeerError, ValueError) as error:
            log.warning("this machine keeps no copies of other machines' snapshots: %s", error)
            self._ask_for_copies_s = now_s + 30 * ASK_S

    def _look_after_waiting(self, processes: WorkerProcesses) -> None:
        pids = processes.pids()
        for slot, code in processes.exit_codes().items():
            if pids[slot] not in self._noted:
                self._noted.add(pids[slot])
                error = take_report(processes.error_files[slot]) if code > 0 else None
                log.warning("a standby worker (pid %d) %s", pids[slot], _ended(code, error))
                with self._lock:
                    self._regroup.ended(slot, "", now_s=time.monotonic())
        while True:
            with self._lock:
                instruction = self._regroup.decide(time.monotonic())
            if isinstance(instruction, Replace):
                self._replace(instruction)
            elif isinstance(instruction, Restart):
                log.warning("workers are started when this machine may join: %s", instruction.reason)
                self._end_waiting(processes)
                return
            else:
                return

    def _end_waiting(self, processes: WorkerProcesses) -> None:
        processes.close()
        self.forget_processes()
        self._is_cold = True
        with self._lock:
            self._regroup.restarted(now_s=time.monotonic())

    def let_in(self) -> dict[int, int] | None:
        if self._finisher is not None:
            self._finisher.workers_start()
        processes = self.processes
        if processes is None or not self._regroup.stands_by:
            return None
        assert self._channel is not None
        deadline_s = time.monotonic() + START_S
        while self.processes is not None:
            self._look_after_waiting(processes)
            with self._lock:
                if self._regroup.is_ready:
                    break
            if time.monotonic() > deadline_s and self.processes is not None:
                self._end_waiting(processes)
            multiprocessing.connection.wait(
                [self._channel.news, *processes.endings().values()], timeout=self._pause_s
            )
            self._channel.taken()
        if self.processes is None:
            return None
        everyone = tuple(range(self._slots))
        self._enter(Meet(workers=everyone, reason="this machine replaces another"), self.variables())
        return processes.pids()

    def _may_ask(self) -> bool:
        """Not more than once a second."""
        now_s = time.monotonic()
        if now_s < self._ask_again_s:
            return False
        self._ask_again_s = now_s + ASK_S
        return True


def _ended(code: int, error: WorkerError | None) -> str:
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"failed: {error}" if error is not None else f"ended with status {code}"
