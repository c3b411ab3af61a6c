"""Torch's agent, less its habit of repeating what cannot succeed: see `strata.core.restarts`.

After an attempt that failed, the agent reads what its workers reported. The same error without a new step in between uses
up all restarts at once, so that the agent ends as it would after the last one.
"""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

from torch.distributed import launcher
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from strata.core.restarts import RepeatedErrors, WorkerError, root_cause
from strata.rendezvous.frames import read_report

logger = logging.getLogger(__name__)


class CarefulAgent(LocalElasticAgent):
    last_error: WorkerError | None = None
    """Of the newest attempt that failed in this process, where one of its workers could say why."""
    given_up: str | None = None
    """Why there is no further attempt, if that is not for want of restarts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._errors = RepeatedErrors()
        self._began_s = time.monotonic()

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._began_s = time.monotonic()
        super()._initialize_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            CarefulAgent.last_error = error = self._find_error(result)
            reason = self._errors.failed(error, lasted_s=time.monotonic() - self._began_s)
            if reason is not None and self._remaining_restarts > 0:
                CarefulAgent.given_up = reason
                self._remaining_restarts = 0
        return result

    def _find_error(self, result: RunResult) -> WorkerError | None:
        """A worker that was killed is why others have failed; but SIGTERM is what torch sends to those that are left."""
        ends = {failure.exitcode for failure in result.failures.values()}
        if self._pcontext is None or any(end < 0 and end != -signal.SIGTERM for end in ends):
            return None
        reports = [read_report(path) for path in self._pcontext.error_files.values()]
        return root_cause([error for error in reports if error is not None])


def install() -> None:
    """In the agent's process, before torch creates its agent."""
    launcher.api.LocalElasticAgent = CarefulAgent  # type: ignore[attr-defined]
