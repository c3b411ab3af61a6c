"""Why a run failed: the first failure of each round of workers, from what workers report and what torchrun prints.

A worker that raises reports it with its traceback (`strata.launch.entry`). One that is killed cannot; torchrun names its
rank, process and exit status. A kill by the kernel for want of memory is called by that name. Whether another start can help
is decided by the run's policy (`strata.core.faults.restarts`).
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.agent.evidence import OomKills
from strata.core.faults.failures import LINES_KEPT, Failure, WorkerError, root_cause, signal_name
from strata.core.faults.restarts import Policy, Restarts
from strata.core.messages import ExitCause

USAGE_STATUS = 2
"""A program that ends with it does not accept how it was called: the same call will not do better."""
TICK_S = 1.0
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM")
"""Sent from outside: they say nothing about what the program will do next time."""


_AGENT_LINE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


@dataclass(frozen=True, slots=True)
class _Report:
    rank: int
    error: WorkerError
    exit_code: int

    @property
    def message(self) -> str:
        """A status says by itself what it is."""
        error = self.error
        return (
            f"{error.type}: {error.message}"
            if error.traceback and error.message
            else error.message or error.type
        )


class Failures:
    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._clock = clock
        self._oom_kills = OomKills(oom_kills)
        self._round_began_s = clock()
        self._reports: list[_Report] = []
        self._last_round: ExitCause | None = None
        self._lines: dict[int | None, deque[str]] = {}
        self._lines_before: dict[int | None, deque[str]] = {}
        """Of the round that failed last: its agent may ask for them after it has said so."""
        self._refused: ExitCause | None = None
        self._restarts = Restarts(policy or Policy())
        self._repeated: ExitCause | None = None

    def tick(self) -> None:
        """Every `TICK_S`: only what the kernel killed lately can have been ours."""
        self._oom_kills.tick()

    # --- what is reported ---------------------------------------------------------------------------------

    def reported(self, rank: int, failure: Mapping[str, Any]) -> None:
        """How a worker failed, in its own words. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        report = _Report(rank, WorkerError.from_dict(failure), int(failure["exit_code"]))
        self._reports.append(report)
        if report.exit_code == USAGE_STATUS and self._refused is None:
            self._refused = replace(self._of_worker(rank, USAGE_STATUS), may_retry=False)

    def read_line(self, rank: int | None, text: str) -> ExitCause | None:
        """A line of stderr. Returns the cause when it is the agent's that a round has failed."""
        self._lines.setdefault(rank, deque(maxlen=LINES_KEPT)).append(text)
        found = _AGENT_LINE.search(text) if rank is None else None
        if found is None:
            return None
        cause = self._last_round = self._of_worker(int(found[2]), int(found[1]), pid=int(found[3]))
        now_s = self._clock()
        lasted_s = now_s - self._round_began_s
        error = root_cause([report.error for report in self._reports]) if int(found[1]) > 0 else None
        first = Failure(
            rank=cause.rank,
            exit_code=cause.exit_code,
            error=error,
            oom_killed=cause.kind == "oom",
            last_lines=self.last_lines(cause.rank),
        )
        verdict = self._restarts.failed(first, lasted_s=lasted_s, now_s=now_s)
        if verdict.decision == "stop" and self._repeated is None:
            message = f"{cause.message} (not started again: {verdict.reason.partition(': ')[0]})"
            self._repeated = replace(cause, message=message, may_retry=False)
        self._round_began_s = now_s
        self._reports.clear()
        self._lines, self._lines_before = {}, self._lines
        return cause

    # --- what follows ---------------------------------------------------------------------------------------

    def hopeless(self) -> ExitCause | None:
        """Why starting the workers again would be in vain, if it would."""
        return self._refused or self._repeated

    def last_lines(self, rank: int | None) -> tuple[str, ...]:
        """What it printed last to its standard error."""
        return tuple(self._lines.get(rank) or self._lines_before.get(rank) or ())

    def cause(
        self, agent_code: int, *, asked_to_stop: bool, agent_pid: int | None = None
    ) -> ExitCause | None:
        """Why the run ended; None where it ended well or as it was asked to."""
        hopeless = self.hopeless()
        if asked_to_stop:
            if agent_code != -signal.SIGKILL:
                return None
            message = "it did not exit in time and was killed; the newest checkpoint is the one before"
            return ExitCause(kind="signal", signal="SIGKILL", message=message)
        if agent_code == 0:
            return None
        if hopeless is not None:
            return hopeless
        if agent_code > 0 and self._last_round is not None:
            return self._last_round
        return self._of_process("the torchrun agent", None, agent_code, pid=agent_pid)

    # --- inside ---------------------------------------------------------------------------------------------

    def _of_worker(self, rank: int, code: int, *, pid: int | None = None) -> ExitCause:
        report = next((t for t in self._reports if t.rank == rank), None)
        if code > 0 and self._reports and (report is None or report.error.is_about_peers):
            blamed = root_cause([one.error for one in self._reports])
            report = next(one for one in self._reports if one.error is blamed)
        if report is None or code < 0:
            return self._of_process(f"rank {rank}", rank, code, pid=pid)
        if report.error.traceback:
            return ExitCause(
                kind="exception",
                message=f"rank {report.rank}: {report.message}",
                rank=report.rank,
                exit_code=report.exit_code,
                traceback=report.error.traceback,
            )
        return self._of_process(f"rank {report.rank}", report.rank, report.exit_code)

    def _of_process(self, who: str, rank: int | None, code: int, *, pid: int | None = None) -> ExitCause:
        lines = "\n".join(self._lines.get(rank, ()))
        if code >= 0:
            # Indented lines belong to the one that says what happened.
            last = next((line for line in reversed(lines.splitlines()) if line[:1].strip()), "").rstrip()
            message = f"{who} ended with status {code}" + (f": {last}" if last else "")
            return ExitCause(
                kind="exit",
                message=message,
                rank=rank,
                exit_code=code,
                traceback=lines,
            )
        name = signal_name(-code)
        if name == "SIGKILL" and pid is not None and self._oom_kills.take(pid):
            message = f"{who} was killed by the kernel because memory ran out (SIGKILL)"
            return ExitCause(kind="oom", message=message, rank=rank, exit_code=code, signal=name)
        return ExitCause(
            kind="signal",
            message=f"{who} was killed by {name}",
            rank=rank,
            exit_code=code,
            signal=name,
            traceback=lines if name not in OUTSIDE_SIGNALS else "",
        )
