"""The agent finishes the work of its workers: it uploads the newest snapshot they left in memory (`strata.checkpoint.finishing`).

At the end of a run whose workers have died the agent waits for it; a signal ends the waiting. While workers are away because their
machine waits for others, it is done beside that, in a thread that nothing waits for, and is given up as soon as workers are started.
What was saved is logged, and reported to the coordinator where there is one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strata.checkpoint.catalog.listing import where
from strata.checkpoint.finishing import Finished, Finisher
from strata.core.jobs.finishing import ABSENCE_S, NOT_UPLOADED, UPLOADED, Outcome
from strata.core.messages import AGENT, SAVED_BY
from strata.core.text import counted
from strata.files import is_on_network

if TYPE_CHECKING:
    from strata.rpc import coordinator_pb2 as pb

log = logging.getLogger("strata.rendezvous")

LIMIT_VARIABLE = "STRATA_FINISH_SECONDS"
LIMIT_S = 600.0
LAST_S = 1.0
ATTEMPT_S = 3.0
BACK = "workers are started again"


def limit_s() -> float:
    """For how long an agent whose workers have died stays to upload their last snapshot; 0 for not at all."""
    try:
        return max(0.0, float(os.environ.get(LIMIT_VARIABLE, "") or LIMIT_S))
    except ValueError:
        log.warning("%s=%s is not a number of seconds", LIMIT_VARIABLE, os.environ[LIMIT_VARIABLE])
        return LIMIT_S


class WorkFinisher:
    """Of one agent. `agent` is what its workers know it by, `coordinator` HOST:PORT or empty."""

    def __init__(self, agent: str, coordinator: str) -> None:
        self._agent = agent
        self._coordinator = coordinator
        self._finisher: Finisher | None = None
        self._has_started = False

    def workers_start(self) -> None:
        """Nothing is published from here on, and what is under way is not waited for."""
        self._has_started = True
        if self._finisher is not None:
            self._finisher.give_up(BACK)
            self._finisher = None

    def workers_are_away(self) -> None:
        """They have ended and are to be started again, which may take long: others have to come first."""
        if not self._has_started or not limit_s():
            return
        finisher = self._finisher = Finisher(self._agent)

        def work() -> None:
            finisher.sleep(ABSENCE_S)
            if self._finisher is finisher:
                self._report(_run(finisher))

        threading.Thread(target=work, name="strata-finish", daemon=True).start()

    def finish(self) -> None:
        """All workers have ended, and will not be started again. Returns when their newest snapshot is in every destination, or
        cannot be; an exception that a signal raises ends it."""
        self.workers_start()
        seconds = limit_s()
        if not seconds:
            return
        finisher, found = Finisher(self._agent), list[Finished]()
        thread = threading.Thread(
            target=lambda: found.extend(_run(finisher)), name="strata-finish", daemon=True
        )
        began_s = time.monotonic()
        thread.start()
        try:
            while thread.is_alive() and time.monotonic() - began_s < seconds:
                thread.join(0.1)  # A signal is noticed between two of these.
        finally:
            finisher.give_up(
                f"the agent was stopped after {time.monotonic() - began_s:.0f} s" if thread.is_alive() else ""
            )
            thread.join(LAST_S)
            self._report(found)

    # --- what is said -------------------------------------------------------------------------------------------

    def _report(self, found: Sequence[Finished]) -> None:
        for finished in found:
            for outcome in finished.outcomes:
                _log(finished, outcome)
            if finished.saved and self._coordinator:
                self._notify(finished)

    def _notify(self, finished: Finished) -> None:
        from strata.rpc.cas import CoordinatorCasClient

        client = CoordinatorCasClient(self._coordinator, timeout_s=ATTEMPT_S)
        try:
            client.notify_checkpoint(_notice(finished, host=socket.gethostname()))
        except ConnectionError as error:
            log.warning("the coordinator could not be notified of the upload: %s", error)
        finally:
            client.close()


def _run(finisher: Finisher) -> list[Finished]:
    """The end of a run is the last place where an unexpected error may hide why the run has failed."""
    try:
        return finisher.run()
    except Exception:
        log.exception("uploading the snapshots that workers left in memory failed unexpectedly")
        return []


def _notice(finished: Finished, *, host: str) -> pb.NotifyCheckpointRequest:
    """As rank 0 would have reported it, and who has done it."""
    from strata.rpc import coordinator_pb2 as pb
    from strata.rpc.wire import STATUS_NUMBERS

    copies = [
        (store.tier, where(store, entry.manifest.parts[0].key)) for store, entry in finished.entries.values()
    ]
    manifest = next(iter(finished.entries.values()))[1].manifest
    saved = finished.saved[0].steps_saved
    more = "" if saved is None else f", which saved {counted(saved, 'step')}"
    metadata = {SAVED_BY: AGENT, "host": host}
    if saved is not None:
        metadata["steps_saved"] = str(saved)
    if is_on_network(copies[0][1]):
        metadata["disk"] = "network"
    return pb.NotifyCheckpointRequest(
        worker_id=finished.record.worker,
        job_id=finished.record.job,
        checkpoint_id=manifest.checkpoint_id,
        step=manifest.step,
        epoch=manifest.epoch,
        path=copies[0][1],
        size_bytes=manifest.size_bytes,
        status=STATUS_NUMBERS["completed"],  # type: ignore[arg-type]
        tiers=[tier for tier, _ in copies],
        digest=manifest.digest,
        parent_id=manifest.durable_parent or "",
        data_json=json.dumps(manifest.data) if isinstance(manifest.data, dict) else "",
        reason=f"its workers had died: the agent of {host} uploaded it{more}",
        metadata=metadata,
        run_id=manifest.run,
        run_generation=manifest.generation,
    )


def _log(finished: Finished, outcome: Outcome) -> None:
    run = finished.record.run[:8]
    if outcome.result == "saved":
        more = (
            "the first checkpoint there"
            if outcome.steps_saved is None
            else f"{counted(outcome.steps_saved, 'step')} saved"
        )
        log.warning(
            "the workers of run %s have died: %s %s to %s, %s",
            *(run, UPLOADED, f"{outcome.step:,}", outcome.destination, more),
        )
    elif outcome.result == "known":
        log.info("step %s of run %s is durable: %s", f"{outcome.step:,}", run, outcome)
    elif outcome.result == "given up":
        log.info("step %s of run %s %s: %s", f"{outcome.step:,}", run, NOT_UPLOADED, outcome)
    else:
        log.warning("step %s of run %s %s: %s", f"{outcome.step:,}", run, NOT_UPLOADED, outcome)
