"""Torch's agent, less its habit of repeating what cannot succeed: see `strata.core.restarts`.

After an attempt that failed, the agent reads what its workers reported. The same error without a new step in between uses
up all restarts at once, so that the agent ends as it would after the last one.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult

from strata.core.restarts import RepeatedErrors, WorkerError, root_cause
from strata.rendezvous.frames import read_report
from strata.torch_compat.elastic import Agent

logger = logging.getLogger(__name__)


class CarefulAgent(Agent):
    last_error: WorkerError | None = None
    """Of the newest attempt that failed in this process, where one of its workers could say why."""
    given_up: str | None = None
    """Why there is no further attempt, if that is not for want of restarts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._errors = RepeatedErrors()
        self._started_s = time.monotonic()

    def starting(self) -> None:
        self._started_s = time.monotonic()

    def failed(self, result: RunResult, error_files: Sequence[str]) -> None:
        if self.hopeless(_find_error(result, error_files)) is not None and self.has_restarts:
            self.give_up()

    def hopeless(self, error: WorkerError | None, *, others_continue: bool = False) -> str | None:
        """A worker has failed by this error, if it could say so: why another attempt would not help, if that is known."""
        CarefulAgent.last_error = error
        lasted_s = time.monotonic() - self._started_s
        reason = self._errors.failed(error, lasted_s=lasted_s, others_continue=others_continue)
        if reason is not None and self.has_restarts:
            CarefulAgent.given_up = reason
        return reason


def _find_error(result: RunResult, error_files: Sequence[str]) -> WorkerError | None:
    """A worker that was killed is why others have failed; but SIGTERM is what torch sends to those that are left."""
    ends = {failure.exitcode for failure in result.failures.values()}
    if any(end < 0 and end != -signal.SIGTERM for end in ends):
        return None
    reports = [read_report(path) for path in error_files]
    return root_cause([error for error in reports if error is not None])
