"""Warm restarts: workers are forked with torch in place, instead of importing it after every crash.

With `torchrun --start-method=forkserver --run-path SCRIPT` workers come from a server process that lives as long as the
agent. Strata's rendezvous runs in the agent and prepares both: the server imports beforehand what every worker needs,
which was most of the time of a recovery. Importing starts no thread and opens no device or connection, so what is
forked is as good as new. Without that start method nothing here has an effect.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from pathlib import Path

from torch.distributed.elastic import multiprocessing as workers

from strata.rendezvous import PRELOAD_VARIABLE

TRIES = 10


class WarmWorkers(workers.MultiprocessContext):
    """Torch's way of running such workers, less what would end the agent, or keep it waiting, when one dies."""

    def _start(self) -> None:
        for _ in range(TRIES - 1):
            try:
                super()._start()  # type: ignore[no-untyped-call]
                return
            except (EOFError, ConnectionError):  # One was killed before it could say who it is.
                for process in multiprocessing.active_children():
                    process.kill()
                    process.join()
        super()._start()  # type: ignore[no-untyped-call]

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # A worker that has finished waits to be told that its result was read. One that was asked to leave, saved
        # and returned would wait for that until it is killed.
        self._worker_finished_event.set()
        super()._close(death_sig, timeout)
        for path in self._pc.error_files if self._pc else ():
            Path(path).unlink(missing_ok=True)


def _brief(record: logging.LogRecord) -> bool:
    """Of a lost worker, log what it said and not the agent's own stack, for which torch would import its compiler."""
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text, record.exc_info = str(record.exc_info[1]), None
    return True


def warm_up() -> None:
    """In the agent, before it starts its first worker."""
    own = [name.strip() for name in os.environ.get(PRELOAD_VARIABLE, "").split(",")]
    multiprocessing.set_forkserver_preload(["torch.nn.parallel", "strata.training.job", *filter(None, own)])
    workers.MultiprocessContext = WarmWorkers  # type: ignore[misc]
    logging.getLogger(workers.api.__name__).addFilter(_brief)
