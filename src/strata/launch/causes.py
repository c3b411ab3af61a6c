"""Why a run failed: the first failure of each round of workers, from what workers report and what torchrun prints.

A worker that raises reports it with its traceback (`strata.launch.entry`). One that is killed cannot; torchrun names its
rank and exit status. SIGKILL beside a count of the kernel's out-of-memory kills that has just risen is called by that
name. An error that comes back without a new step (`strata.core.restarts`) will come back again: then another start is no
help. Nor is it after a crash without words that is like the two before it, each within a minute.
"""

from __future__ import annotations

import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata.core.messages import ExitCause
from strata.core.restarts import RepeatedErrors, WorkerError, root_cause

USAGE_STATUS = 2
"""A program that ends with it does not accept how it was called: the same call will not do better."""
SAME_ROUNDS = 3
QUICK_ROUND_S = 60.0
LAST_LINES = 20
TICK_S = 1.0
OOM_SAMPLES = 4
OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM")
"""Sent by somebody else: they say nothing about what the program will do next time."""

_AGENT_LINE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")


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
    ) -> None:
        self._clock = clock
        self._oom_kills = oom_kills or count_oom_kills
        self._oom_kills_seen: deque[int] = deque([self._oom_kills()], maxlen=OOM_SAMPLES)
        self._round_began_s = clock()
        self._reports: list[_Report] = []
        self._rounds: deque[tuple[ExitCause, bool]] = deque(maxlen=SAME_ROUNDS)
        self._lines: dict[int | None, deque[str]] = {}
        self._refused: ExitCause | None = None
        self._errors = RepeatedErrors()
        self._repeated: ExitCause | None = None

    def tick(self) -> None:
        """Every `TICK_S`: only what the kernel killed lately can have been ours."""
        self._oom_kills_seen.append(self._oom_kills())

    # --- what is reported ---------------------------------------------------------------------------------

    def reported(self, rank: int, failure: Mapping[str, Any]) -> None:
        """How a worker failed, in its own words. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        report = _Report(rank, WorkerError.from_dict(failure), int(failure["exit_code"]))
        self._reports.append(report)
        if report.exit_code == USAGE_STATUS and self._refused is None:
            self._refused = replace(self._of_worker(rank, USAGE_STATUS), may_retry=False)

    def read_line(self, rank: int | None, text: str) -> ExitCause | None:
        """A line of stderr. Returns the cause when it is the agent's that a round has failed."""
        self._lines.setdefault(rank, deque(maxlen=LAST_LINES)).append(text)
        found = _AGENT_LINE.search(text) if rank is None else None
        if found is None:
            return None
        cause = self._of_worker(int(found[2]), int(found[1]))
        now_s = self._clock()
        lasted_s = now_s - self._round_began_s
        self._rounds.append((cause, lasted_s < QUICK_ROUND_S))
        error = root_cause([report.error for report in self._reports]) if int(found[1]) > 0 else None
        if self._errors.failed(error, lasted_s=lasted_s) is not None:
            message = f"{cause.message} (it restarted without a new step)"
            self._repeated = replace(cause, message=message, may_retry=False)
        self._round_began_s = now_s
        self._reports.clear()
        self._lines.clear()
        return cause

    # --- what follows ---------------------------------------------------------------------------------------

    def hopeless(self) -> ExitCause | None:
        """Why starting the workers again would be in vain, if it would."""
        if self._refused is not None or self._repeated is not None:
            return self._refused or self._repeated
        if len(self._rounds) < SAME_ROUNDS or not all(quick for _, quick in self._rounds):
            return None
        causes = [cause for cause, _ in self._rounds]
        last = causes[-1]
        from_outside = last.signal in OUTSIDE_SIGNALS and last.kind != "oom"
        if from_outside or last.kind == "exception" or any(_kind(cause) != _kind(last) for cause in causes):
            return None
        message = f"{last.message} ({SAME_ROUNDS} times in a row)"
        return replace(last, message=message, may_retry=False)

    def cause(self, agent_code: int, *, asked_to_stop: bool) -> ExitCause | None:
        """Why the run ended; None where it ended well or as it was asked to."""
        hopeless = self.hopeless()
        if asked_to_stop:
            if agent_code != -signal.SIGKILL:
                return None
            message = "it did not exit in time and was killed; the newest checkpoint is the previous one"
            return ExitCause(kind="signal", signal="SIGKILL", message=message)
        if agent_code == 0:
            return None
        if hopeless is not None:
            return hopeless
        if agent_code > 0 and self._rounds:
            return self._rounds[-1][0]
        return self._of_process("the torchrun agent", None, agent_code)

    # --- inside ---------------------------------------------------------------------------------------------

    def _of_worker(self, rank: int, code: int) -> ExitCause:
        report = next((t for t in self._reports if t.rank == rank), None)
        if code > 0 and self._reports and (report is None or report.error.is_about_peers):
            blamed = root_cause([one.error for one in self._reports])
            report = next(one for one in self._reports if one.error is blamed)
        if report is None or code < 0:
            return self._of_process(f"rank {rank}", rank, code)
        if report.error.traceback:
            return ExitCause(
                kind="exception",
                message=f"rank {report.rank}: {report.message}",
                rank=report.rank,
                exit_code=report.exit_code,
                traceback=report.error.traceback,
            )
        return self._of_process(f"rank {report.rank}", report.rank, report.exit_code)

    def _of_process(self, who: str, rank: int | None, code: int) -> ExitCause:
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
        if name == "SIGKILL" and self._oom_kills() > self._oom_kills_seen[0]:
            self._oom_kills_seen.clear()
            self.tick()
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


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, here and in this control group."""
    counts = [_field(Path("/proc/vmstat"), "oom_kill")]
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                counts.append(_field(Path(f"/sys/fs/cgroup{path}/memory.events"), "oom_kill"))
            elif "memory" in controllers.split(","):
                counts.append(_field(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill"))
    except (OSError, ValueError):
        pass
    return sum(counts)


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _kind(cause: ExitCause) -> tuple[str, str]:
    """What two failures have in common when they are the same: numbers differ from time to time."""
    return cause.kind, re.sub(r"\d+", "#", cause.message)
