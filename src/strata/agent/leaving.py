"""A machine that goes, seen from its agent: notices in, workers asked with a deadline, and what became of the run reported.

What is decided is in `strata.core.jobs.handover`. The agent leaves as torch's does after SIGTERM. What workers have to know lies in a
file beside the socket of their channel, before they get the signal: until when (`read_deadline`); what they have saved they write
there too (`write_outcome`), also when it was too late. So it works with and without a coordinator, and for workers that do not recover
in their process.

Needs no torch: workers read it in a signal handler.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strata.agent.channel import AGENT_VARIABLE
from strata.core.jobs.handover import Handover, Notice, Outcome, Summary, summarize
from strata.core.messages import JobId, ReportHandover
from strata.files import write_file

log = logging.getLogger("strata.rendezvous")

SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"
SLURM_WARNING_S = 600.0
"""A signal within so long before the time limit of a Slurm job is its warning (`--signal`); an earlier one has another reason."""
GRACE_VARIABLE = "STRATA_GRACE_S"
"""How long after SIGTERM this machine or container is there: Kubernetes' terminationGracePeriodSeconds, the time of Slurm's --signal."""
DEADLINE_FILE, OUTCOME_PREFIX = "leave-by", "left-"
REPORT_S, LONGEST_REPORT_S = 2.0, 30.0
SIGNAL_AGAIN_S = 5.0
"""A signal may be lost in whatever the agent does: one that has not begun to leave by then is signalled when it is asked again."""


class Leaving:
    """Of the agent in this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handover = Handover()
        self._signalled_s: float | None = None
        """When this agent has asked itself to leave, by a signal."""
        self._is_asked = False
        """The workers are being ended."""
        self._kill: Callable[[], None] | None = None
        self._timer: threading.Timer | None = None
        self._before: Any = None
        """What SIGTERM did before."""
        self.on_notice: Callable[[Notice], None] = lambda notice: None
        """Called with each notice that counts."""

    @property
    def reason(self) -> str:
        """Why this machine leaves; empty while it does not."""
        notice = self._handover.notice
        return f"{notice.source}: {notice.reason}" if notice is not None else ""

    def notice(self, *, source: str, reason: str, within_s: float) -> None:
        """This machine goes within so many seconds. Its agent leaves as after SIGTERM."""
        notice = Notice(source=source, reason=reason, deadline_s=time.monotonic() + within_s)
        with self._lock:
            if not self._handover.take(notice):
                return
            was_asked = self._is_asked
        log.warning(
            "this machine shuts down within %.0f s (%s: %s): saving and leaving the run",
            within_s,
            source,
            reason,
        )
        self.on_notice(notice)
        if was_asked:
            self._shorten()
        else:
            self._write_deadline()
            self.ask()

    def ask(self) -> bool:
        """Have this agent leave as after SIGTERM; False where it does already, and would be interrupted."""
        now_s = time.monotonic()
        with self._lock:
            was_signalled = self._signalled_s is not None and now_s - self._signalled_s < SIGNAL_AGAIN_S
            if was_signalled or self._is_asked:
                return False
            self._signalled_s = now_s
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    def begin(self, kill: Callable[[], None]) -> float | None:
        """Workers are about to be asked to leave: how long they have, in seconds; None where it is not known. `kill` ends those that
        are left, should an earlier deadline be announced."""
        with self._lock:
            self._is_asked, self._kill = True, kill
        # What comes now has nothing left to ask for, and must not interrupt the wait for the workers.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        grace_s = _grace_s()
        with self._lock:
            if self._handover.notice is None and grace_s is not None:
                deadline_s = time.monotonic() + grace_s
                self._handover.take(Notice(source="SIGTERM", reason="asked to leave", deadline_s=deadline_s))
        self._write_deadline()
        with self._lock:
            return self._handover.kill_in_s(time.monotonic())

    def end(self, *, workers: int, launch: str, coordinator: str) -> Summary | None:
        """All workers have ended: what that means is said, to the coordinator too where there is one."""
        with self._lock:
            if self._handover.state == "drained":
                return None
            self._handover.left()
        if self._timer is not None:
            self._timer.cancel()
        outcomes = _read_outcomes()
        if not outcomes and self._handover.notice is None:
            self._end_in_time()
            return None  # A script of its own kind, which was asked to end: it says itself what it has saved.
        summary = summarize(outcomes, workers=workers)
        lost = (
            " (the remaining ranks will report how many steps are lost)" if summary.lost_steps is None else ""
        )
        log.warning("this machine has left the run: %s%s", summary.reason, lost)
        if coordinator:
            notice = self._handover.notice
            left_s = notice.deadline_s - time.monotonic() if notice is not None else 0.0
            _report(summary, launch=launch, coordinator=coordinator, within_s=call_limit_s(left_s))
        self._end_in_time()  # Last: an agent that runs out of time has reported already.
        return summary

    def _end_in_time(self) -> None:
        """What the agent does from now on, such as finishing an upload, ends with the next signal, and with the machine."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
        notice = self._handover.notice
        if notice is not None:
            left_s = max(0.0, notice.deadline_s - time.monotonic())
            self._timer = threading.Timer(left_s, os._exit, (128 + signal.SIGTERM,))
            self._timer.daemon = True
            self._timer.start()

    def _shorten(self) -> None:
        with self._lock:
            left_s, kill = self._handover.kill_in_s(time.monotonic()), self._kill
        if left_s is not None and kill is not None:
            self._timer = threading.Timer(left_s, kill)
            self._timer.daemon = True
            self._timer.start()

    def _write_deadline(self) -> None:
        with self._lock:
            ask_s = self._handover.ask_in_s(time.monotonic())
        folder = _folder()
        if ask_s is None or folder is None:
            return
        with suppress(OSError):
            write_file(folder / DEADLINE_FILE, str(time.monotonic() + ask_s), durable=False)


LEAVING = Leaving()


def _grace_s() -> float | None:
    """How long there is after a signal, where that is known."""
    with suppress(ValueError):
        return max(0.0, float(os.environ.get(GRACE_VARIABLE, "")))
    with suppress(ValueError):
        left_s = float(os.environ.get(SLURM_END_VARIABLE, "")) - time.time()
        return left_s if 0.0 < left_s <= SLURM_WARNING_S else None
    return None


def _folder() -> Path | None:
    path = os.environ.get(AGENT_VARIABLE)
    return Path(path).parent if path else None


def call_limit_s(left_s: float) -> float:
    """How long a coordinator may take to answer a machine that has so long left."""
    return min(max(REPORT_S, left_s / 2), LONGEST_REPORT_S)


def _report(summary: Summary, *, launch: str, coordinator: str, within_s: float) -> None:
    from strata.rpc.cas import CoordinatorCasClient

    host, job = socket.gethostname(), os.environ.get("STRATA_JOB_ID", "")
    command = ReportHandover(
        host=host,
        node=f"{host}_{os.getpid()}",
        launch="" if launch == "none" else launch,
        job_id=JobId(job) if job else None,
        saved_step=summary.saved_step,
        lost_steps=summary.lost_steps,
        where=summary.where,
        reason=summary.reason,
    )
    client = CoordinatorCasClient(coordinator, timeout_s=within_s)
    try:
        client.report_handover(command)
    except ConnectionError as error:
        log.warning("the coordinator could not be notified that this machine has left: %s", error)
    finally:
        client.close()


# --- in a worker --------------------------------------------------------------------------------------------------


def read_deadline() -> float | None:
    """Until when this worker is to have left, by the monotonic clock; None where it is not known."""
    folder = _folder()
    if folder is not None:
        with suppress(OSError, ValueError):
            return float((folder / DEADLINE_FILE).read_text())
    grace_s = _grace_s()
    if grace_s is None:
        return None
    # The signal has come to workers and agent alike, as Slurm sends it.
    by_signal = Handover()
    now_s = time.monotonic()
    by_signal.take(Notice(source="SIGTERM", reason="", deadline_s=now_s + grace_s))
    asked_s = by_signal.ask_in_s(now_s)
    return None if asked_s is None else now_s + asked_s


def write_outcome(outcome: Outcome) -> None:
    folder = _folder()
    if folder is not None:
        with suppress(OSError):
            write_file(folder / f"{OUTCOME_PREFIX}{os.getpid()}", json.dumps(asdict(outcome)), durable=False)


def _read_outcomes() -> list[Outcome]:
    folder = _folder()
    found: list[Outcome] = []
    for path in sorted(folder.glob(f"{OUTCOME_PREFIX}*")) if folder is not None else []:
        with suppress(OSError, ValueError, TypeError):
            found.append(Outcome(**json.loads(path.read_text())))
    return found
