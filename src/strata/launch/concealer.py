"""Secrets of a task are hidden in whatever its programs print, and in what is said about their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from strata.core.faults.failures import Failure
from strata.core.messages import ExitCause

SECRET_SHOWN = "(secret)"
"""What stands for a secret wherever a config is shown."""
LEAST_CHARACTERS = 4
"""Shorter ones are found everywhere: hiding them would make logs unreadable, and tell what they are."""


class Concealer:
    """Replaces secrets in texts. One of several lines is found by each of its lines."""

    def __init__(self, secrets: Iterable[str]) -> None:
        pieces = {line.strip() for secret in secrets for line in [secret, *secret.splitlines()]}
        self._pieces = sorted((p for p in pieces if len(p) >= LEAST_CHARACTERS), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for piece in self._pieces:
            text = text.replace(piece, SECRET_SHOWN)
        return text

    def in_failure(self, failure: Failure) -> Failure:
        """What a program said before it failed may hold its secrets as well."""
        error = failure.error
        if error is not None:
            error = replace(error, message=self(error.message), traceback=self(error.traceback))
        lines = tuple(map(self, failure.last_lines))
        return replace(failure, error=error, last_lines=lines, replaced=self(failure.replaced))

    def in_cause(self, cause: ExitCause) -> ExitCause:
        return replace(cause, message=self(cause.message), traceback=self(cause.traceback))
