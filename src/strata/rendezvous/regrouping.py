"""The agent of workers that recover without a restart: it carries out what `strata.core.regroup` decides.

Workers of recoverable functions (`strata.training.recoverable`) report to it over a channel. While there are any, torch's agent
leaves all of them alone: who is lost is replaced, the others meet again and enter their function anew. Without such workers,
or when recovery in the process is given up, everything is as torch has it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState

from strata.core.regroup import Continue, Leave, Limits, Meet, Regroup, Release, Replace, Restart
from strata.core.restarts import WorkerError
from strata.rendezvous.agent import CarefulAgent
from strata.rendezvous.channel import AGENT_VARIABLE, ENTRANCE_VARIABLE, SLOT_VARIABLE, AgentChannel, Message
from strata.rendezvous.frames import take_report
from strata.shared_memory import make_private, remove_empty, run_folder
from strata.training.trace import note_rendezvous

log = logging.getLogger("strata.rendezvous")


class RegroupingAgent(CarefulAgent):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        spec = self._worker_group.spec
        self._slots = spec.local_world_size
        self._regroup = Regroup(self._slots)
        self._lock = threading.Lock()
        """Of `_regroup`: workers report in a thread of their own."""
        self._noted: set[int] = set()
        """The numbers of the processes whose end was noticed."""
        self._pause_s = spec.monitor_interval
        self._channel = self._listen(spec.rdzv_handler.get_run_id())
        if self._channel is not None:
            spec.monitor_interval = 0.0  # The wait is in `look`, where it ends when something happens.

    def _listen(self, run: str) -> AgentChannel | None:
        # Not the run's own folder, which a job clears when it has ended.
        folder = run_folder(f"agent-{os.getpid()}-{run}")
        try:
            make_private(folder, inside=folder.parent)
            channel = AgentChannel(folder / "socket", self._heard)
        except OSError as error:
            log.warning("workers cannot recover without a restart: %s", error)
            return None
        os.environ[AGENT_VARIABLE] = str(channel.path)
        atexit.register(self.close)
        return channel

    def starting(self) -> None:
        super().starting()
        with self._lock:
            self._regroup.restarted(now_s=time.monotonic())
        self._noted.clear()

    def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()
            remove_empty(channel.path.parent)

    # --- what workers say, in the channel's thread ------------------------------------------------------------

    def _heard(self, slot: int, message: Message) -> Message | None:
        now_s, kind, regroup = time.monotonic(), message["kind"], self._regroup
        with self._lock:
            if kind == "arrived":
                limits = Limits(
                    max_in_process=int(message["max_in_process"]), timeout_s=float(message["timeout_s"])
                )
                regroup.arrived(slot, now_s=now_s, waits=bool(message["waits"]), limits=limits)
            elif kind == "left":
                error = WorkerError.from_dict(message["error"]) if message["error"] else None
                is_own = error is not None and not error.is_about_peers and not regroup.is_over
                said = f"rank {self.rank_of(slot)}: {error}" if error is not None else ""
                regroup.left(slot, now_s=now_s, error=said, is_own=is_own)
                return {"kind": "end"} if is_own else None
            elif kind == "finished":
                regroup.finished(slot, now_s=now_s)
            elif kind == "withdrew":
                regroup.withdrew(slot, now_s=now_s)
            elif kind == "attached":
                regroup.shards(slot, is_sharded=bool(message["is_sharded"]))
            elif kind == "stepped":
                regroup.stepped(int(message["step"]))
            elif kind == "may_rescue":
                return {"kind": "rescue", "may": regroup.may_rescue(slot, int(message["step"]))}
        return None

    # --- what is done, in torch's ------------------------------------------------------------------------------

    def look(self) -> WorkerState | None:
        if self._channel is None or self.processes is None:
            time.sleep(self._pause_s if self._channel is not None else 0.0)
            return None
        self._wait()
        with self._lock:
            if not self._regroup.is_active:
                return None
        if self._note_ends() is not None:
            return None  # Torch ends the run.
        while True:
            with self._lock:
                instruction = self._regroup.decide(time.monotonic())
            if isinstance(instruction, Continue):
                return WorkerState.HEALTHY
            if isinstance(instruction, Restart):
                if self.has_restarts:
                    log.warning("all workers of this machine are restarted: %s", instruction.reason)
                    return WorkerState.UNHEALTHY
                log.error("the run ends, because there are no restarts left: %s", instruction.reason)
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
        multiprocessing.connection.wait([self._channel.news, *endings], timeout=max(limit_s, 0.0))
        self._channel.taken()

    def _note_ends(self) -> str | None:
        """Workers whose processes have ended are lost; why the run is given up, if it is."""
        assert self.processes is not None
        pids = self.processes.pids()
        for slot, code in self.processes.exit_codes().items():
            if pids[slot] in self._noted:
                continue
            self._noted.add(pids[slot])
            error = take_report(self.processes.error_files[slot]) if code > 0 else None
            reason = (
                f"rank {self.rank_of(slot)} ({socket.gethostname()}, pid {pids[slot]}) {_ended(code, error)}"
            )
            log.error("%s", reason)
            with self._lock:
                self._regroup.ended(slot, reason, now_s=time.monotonic())
            given_up: str | None = "there are no restarts left"
            if self.has_restarts:
                given_up = self.hopeless(error, others_continue=True)
                super().starting()  # The next attempt.
            if given_up is not None:
                self.give_up()
                return given_up
            self.count_restart()
        return None

    def _carry_out(self, instruction: Leave | Replace | Meet | Release) -> None:
        assert self._channel is not None
        assert self.processes is not None
        if isinstance(instruction, Leave):
            with self._lock:
                self._regroup.asked(instruction.workers, now_s=time.monotonic())
            for slot in instruction.workers:
                self._channel.send(slot, {"kind": "leave", "reason": instruction.reason})
        elif isinstance(instruction, Replace):
            self._replace(instruction)
        elif isinstance(instruction, Release):
            with self._lock:
                self._regroup.released(now_s=time.monotonic())
            for slot in range(self._slots):
                self._channel.send(slot, {"kind": "release"})
        else:
            self._meet(instruction)

    def _replace(self, instruction: Replace) -> None:
        assert self.processes is not None
        slot = instruction.worker
        if self.processes.pids()[slot] not in self._noted:
            log.error("rank %d is replaced: %s", self.rank_of(slot), instruction.reason)
        self._noted.add(self.processes.pids()[slot])
        pid = self.processes.replace(slot, {ENTRANCE_VARIABLE: "wait", SLOT_VARIABLE: str(slot)})
        self._worker_group.workers[slot].id = pid
        with self._lock:
            self._regroup.replaced(slot, now_s=time.monotonic())

    def _meet(self, instruction: Meet) -> None:
        assert self._channel is not None
        began_s = time.monotonic()
        variables = self.meet(instruction.workers)
        note_rendezvous(self._worker_group.spec.rdzv_handler.get_run_id(), began_s, time.monotonic())
        first = min(instruction.workers)
        with self._lock:
            self._regroup.met(instruction.workers, now_s=time.monotonic())
            generation = self._regroup.generation
        log.info(
            "generation %d: %d of %d workers of this machine (%s)",
            *(generation, len(instruction.workers), self._slots, instruction.reason),
        )
        for slot in instruction.workers:
            own = {**variables[slot], "LOCAL_WORLD_SIZE": str(self._slots)}
            message = {"kind": "enter", "variables": own, "is_first": slot == first}
            self._channel.send(slot, {**message, "generation": generation, "reason": instruction.reason})


def _ended(code: int, error: WorkerError | None) -> str:
    if code < 0:
        name = f"signal {-code}"
        with suppress(ValueError):
            name = signal.Signals(-code).name
        return f"was killed by {name}"
    return f"failed: {error}" if error is not None else f"ended with status {code}"
