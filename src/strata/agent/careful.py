"""Torch's agent, which says why its workers ended, and repeats nothing that cannot succeed: see `strata.core.faults.restarts`.

After an attempt that failed, the agent gathers what is known of each worker: its exit code, what it reported, what the kernel and
the process that keeps its output have to say. That becomes an incident (`incidents`), and the run's policy decides what follows: where it
stops, all restarts are used up at once, so that the agent ends as it would after the last one.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult

from strata.agent import run_policy
from strata.agent.evidence import OomKills, last_lines, wall_s
from strata.agent.frames import read_report
from strata.agent.health_gate import check_after
from strata.agent.incidents import IncidentReporter, trimmed
from strata.agent.leaving import LEAVING
from strata.agent.supervised import SUPERVISOR_VARIABLE
from strata.core.faults.failures import LINES_KEPT, Failure, WorkerError, first_failing
from strata.core.faults.restarts import Restarts, Verdict
from strata.devices import DeviceWatch, device_faults, device_of
from strata.torch_compat.elastic import Agent, leave
from strata.worker.address import coordinator_address

LOOK_S = 1.0
OUT_OF_RESTARTS = "no restarts left"


class CarefulAgent(Agent):
    first_failure: Failure | None = None
    """Of the newest attempt that failed in this process."""
    given_up: str | None = None
    """Why there is no further attempt, if that is not for want of restarts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        handler = self.get_worker_group().spec.rdzv_handler
        self.coordinator: str = coordinator_of_run() or getattr(handler, "coordinator", "")
        self._incidents = IncidentReporter(handler.get_run_id(), self.coordinator)
        self._restarts = Restarts(run_policy())
        self._oom_kills = OomKills()
        self._devices = DeviceWatch()
        self._device_faults: dict[int, list[str]] = {}
        """What NVML has said since this attempt began, by device."""
        self._looked_s = self._started_s = time.monotonic()
        self._concluded: set[int] = set()
        """Processes whose end has been reported."""

    def starting(self) -> None:
        self._started_s = time.monotonic()
        self._device_faults.clear()

    def leaving(self) -> float | None:
        return LEAVING.begin(self._kill_workers)

    def has_left(self) -> None:
        workers = len(self.processes.pids()) if self.processes is not None else 0
        launch = self.get_worker_group().spec.rdzv_handler.get_run_id()
        LEAVING.end(workers=workers, launch=launch, coordinator=self.coordinator)

    def _kill_workers(self) -> None:
        for pid in self.processes.pids().values() if self.processes is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def look_at_memory(self) -> None:
        """To be called often: only what the kernel killed lately can have been a worker."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            self._oom_kills.tick()

    def failed(self, result: RunResult, error_files: Mapping[int, str]) -> None:
        ends = {failure.local_rank: (failure.exitcode, failure.pid) for failure in result.failures.values()}
        processes = self.processes
        if processes is not None:
            pids, codes = processes.pids(), processes.exit_codes()
            ends |= {slot: (code, pids[slot]) for slot, code in processes.ended_first.items() if code}
            reported = {slot for slot, path in error_files.items() if read_report(path) is not None}
            ends |= {slot: (codes[slot], pids[slot]) for slot in reported - ends.keys() if codes.get(slot)}
        ends = {slot: (code, pid) for slot, (code, pid) in ends.items() if pid not in self._concluded}
        if not ends:
            return
        failures = [
            self.failure(slot, pid, code=code, error=read_report(error_files.get(slot, "")))
            for slot, (code, pid) in sorted(ends.items())
        ]
        self.conclude(failures)

    def failure(
        self,
        slot: int,
        pid: int,
        *,
        code: int | None,
        error: WorkerError | None = None,
        replaced: str = "",
    ) -> Failure:
        """All that this machine knows of how a worker ended."""
        rank = self.rank_of(slot)
        return Failure(
            rank=rank if rank >= 0 else None,
            host=socket.gethostname(),
            pid=pid,
            gpu=device_of(slot),
            at_s=wall_s(error.at_s) if error is not None and error.at_s else time.time(),
            exit_code=code,
            # Who was killed may have reported something before, which others lead to.
            error=error if code is None or code >= 0 or code == -15 else None,
            oom_killed=code == -signal.SIGKILL and self._oom_kills.take(pid),
            device_faults=trimmed(self._faults_of(device_of(slot))),
            last_lines=trimmed(last_lines(os.environ.get(SUPERVISOR_VARIABLE), rank)),
            replaced=replaced,
        )

    def _faults_of(self, gpu: str) -> list[str]:
        """What the kernel's log and NVML say of a worker's device; of all where it has no number."""
        if not gpu:
            return []
        for index, faults in self._devices.take().items():
            self._device_faults.setdefault(index, []).extend(faults)
        wanted = [int(gpu)] if gpu.isdecimal() else list(self._device_faults)
        said = [line for index in wanted for line in self._device_faults.get(index, [])]
        return [*device_faults(self._started_s), *said][-LINES_KEPT:]

    def conclude(self, failures: Sequence[Failure], *, others_continue: bool = False) -> Verdict:
        """What follows from these ends, once they are reported: where that is the end of the run, no restarts are left."""
        first = CarefulAgent.first_failure = first_failing(failures)
        lasted_s = time.monotonic() - self._started_s
        verdict = self._restarts.failed(
            first,
            lasted_s=lasted_s,
            now_s=time.monotonic(),
            others_continue=others_continue,
            can_quarantine=self._incidents.has_coordinator,
        )
        if verdict.quarantine and not self._incidents.has_coordinator:
            reason = f"{verdict.reason}; without a coordinator the run ends here"
            verdict = Verdict(decision="stop", reason=reason)
        if not self.has_restarts:
            verdict = Verdict(decision="stop", reason=OUT_OF_RESTARTS)
        elif verdict.decision == "stop":
            CarefulAgent.given_up = verdict.reason
            self.give_up()
        self._concluded.update(failure.pid for failure in failures)
        if verdict.quarantine:
            CarefulAgent.given_up = (
                verdict.reason
            )  # The coordinator may ask this machine to leave before it does so itself.
        self._incidents.report(failures, verdict)
        check_after(first, self.coordinator)
        if verdict.quarantine:
            self._incidents.flush()
            leave(verdict.reason)
        return verdict


def coordinator_of_run() -> str:
    """HOST:PORT, as the environment names it; else empty."""
    named = os.environ.get("COORDINATOR_ADDR") or os.environ.get("COORDINATOR_URL") or ""
    return coordinator_address(named) if named else ""
