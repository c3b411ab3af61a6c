"""What an agent says about workers that ended: a line in the log, the coordinator where there is one, a file where there is none.

Nothing waits for the coordinator: reports go through a bounded queue to a thread of their own, which repeats them until they have
arrived. When the agent ends, the last ones have `LAST_WORDS_S`. Without a coordinator the incidents of a launch lie in a file of
the user's (`local_folder`), of which the newest are kept; `strata why` reads them.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.faults.failures import Failure, classify, first_failing, others
from strata.core.faults.incidents import MAX_FAILURES, local_incident
from strata.core.faults.restarts import Verdict
from strata.core.messages import JobId, ReportFailure
from strata.core.text import as_identifier

if TYPE_CHECKING:
    from strata.rpc.cas import CoordinatorCasClient

log = logging.getLogger("strata.rendezvous")

REPORTS_WAITING = 64
ATTEMPT_S, PAUSE_S = 2.0, 0.5
LAST_WORDS_S = 3.0
FILES_KEPT = 50
_LINE_CHARACTERS = 1_000


class IncidentReporter:
    """Of one launch. `coordinator` is HOST:PORT, or empty."""

    def __init__(self, launch: str, coordinator: str) -> None:
        self._launch = launch
        self._coordinator = coordinator
        self._waiting: queue.Queue[ReportFailure] = queue.Queue(REPORTS_WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, failures: Sequence[Failure], verdict: Verdict) -> None:
        first = first_failing(failures)
        decided = "the run stops" if verdict.decision == "stop" else "the run recovers"
        if verdict.quarantine:
            decided = "this machine is quarantined and leaves the run"
        log.error(
            "%s%s (%s); %s: %s",
            *(first, others(failures, first), classify(first), decided, verdict.reason),
        )
        kept = sorted(failures, key=lambda failure: failure is not first)[:MAX_FAILURES]
        if self._coordinator:
            self._send(kept, verdict)
        else:
            self._write(kept, verdict)

    @property
    def coordinator(self) -> str:
        """HOST:PORT, or empty."""
        return self._coordinator

    @property
    def has_coordinator(self) -> bool:
        return bool(self._coordinator)

    def flush(self) -> None:
        """Wait, a little, until everything has arrived."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        while self._waiting.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def close(self) -> None:
        if self._thread is not None:
            self._closing.set()
            self._thread.join(LAST_WORDS_S)

    # --- to the coordinator ---------------------------------------------------------------------------------

    def _send(self, failures: Sequence[Failure], verdict: Verdict) -> None:
        job = os.environ.get("STRATA_JOB_ID", "")
        command = ReportFailure(
            failures=tuple(failures),
            launch="" if self._launch == "none" else self._launch,
            job_id=JobId(job) if job else None,
            decision=verdict.decision,
            reason=verdict.reason,
            quarantine=verdict.quarantine,
        )
        with suppress(queue.Full):
            self._waiting.put_nowait(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="strata-incidents", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _work(self) -> None:
        from strata.rpc.cas import CoordinatorCasClient

        client: CoordinatorCasClient | None = None
        while True:
            try:
                command = self._waiting.get(timeout=PAUSE_S)
            except queue.Empty:
                if self._closing.is_set():
                    return
                continue
            client = client or CoordinatorCasClient(self._coordinator, timeout_s=ATTEMPT_S)
            self._deliver(client, command)
            self._waiting.task_done()

    def _deliver(self, client: CoordinatorCasClient, command: ReportFailure) -> None:
        deadline_s = None
        while True:
            try:
                client.report_failure(command)
                return
            except ConnectionError as error:
                refused = not any(word in str(error) for word in ("unavailable", "deadline_exceeded"))
                if (
                    refused
                ):  # One of an earlier version, or one that does not know us: saying it again is no help.
                    log.warning("the coordinator does not accept reports of failures: %s", error)
                    return
            if self._closing.is_set():
                deadline_s = deadline_s or time.monotonic() + LAST_WORDS_S
                if time.monotonic() > deadline_s:
                    return
            time.sleep(PAUSE_S)

    # --- without one ----------------------------------------------------------------------------------------

    def _write(self, failures: Sequence[Failure], verdict: Verdict) -> None:
        run = os.environ.get("STRATA_JOB_ID") or self._launch
        incident = local_incident(
            failures, run=run, decision=verdict.decision, reason=verdict.reason, now_s=time.time()
        )
        with suppress(OSError):
            folder = local_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{as_identifier(run, otherwise='run')[:100]}.jsonl"
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
                file.write(json.dumps(asdict(incident)) + "\n")
            for old in sorted(folder.glob("*.jsonl"), key=lambda one: one.stat().st_mtime)[:-FILES_KEPT]:
                old.unlink(missing_ok=True)


def local_folder() -> Path:
    """Where the incidents of launches without a coordinator lie."""
    return Path(os.environ.get("STRATA_DATA_DIR") or Path.home() / ".strata").expanduser() / "incidents"


def read_local(run: str | None) -> list[dict[str, Any]]:
    """The incidents of a launch, or of the newest one that had any; newest first."""
    folder = local_folder()
    paths = [path for path in folder.glob("*.jsonl") if run is None or path.stem == as_identifier(run)[:100]]
    newest = max(paths, key=lambda path: path.stat().st_mtime, default=None)
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in newest.read_text().splitlines() if newest is not None else ():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found[::-1]


def trimmed(lines: Sequence[str]) -> tuple[str, ...]:
    """As the coordinator takes them: without what cannot be written down, and not endless."""
    return tuple(line.replace("\0", "")[:_LINE_CHARACTERS] for line in lines)
