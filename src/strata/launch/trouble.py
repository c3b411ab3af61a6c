"""An outage in the log: told when it begins, when its cause changes and when it is over, and not every time it is met."""

from __future__ import annotations

import logging


class Trouble:
    def __init__(self, log: logging.Logger, *, over: str) -> None:
        self._log = log
        self._over = over
        self._told = ""

    def begins(self, text: str) -> None:
        """Told unless something is known to be wrong already."""
        if not self._told:
            self.met(text)

    def met(self, text: str, *, level: int = logging.WARNING, traceback: bool = False) -> None:
        """Told when it is not what was told last."""
        if text != self._told:
            self._told = text
            self._log.log(level, "%s", text, exc_info=traceback)

    def ended(self) -> None:
        if self._told:
            self._told = ""
            self._log.warning("%s", self._over)
