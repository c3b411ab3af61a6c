"""A progress bar on a terminal; silence everywhere else.

Drawn by rich where it is installed, by plain lines otherwise. Logs and pipes get nothing.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

LINE_INTERVAL_S = 1.0


class TerminalProgress:
    """Implements `builder.Progress` and `reader.Progress`. Use as a context manager, so that the terminal is left tidy."""

    def __init__(
        self, stream: TextIO | None = None, *, doing: str = "tokenizing", unit: str = "tokens"
    ) -> None:
        self._doing, self._unit = doing, unit
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._rich: Any = None
        self._task: Any = None
        self._total_bytes = self._done_bytes = self._tokens = 0
        self._last_line_s = 0.0

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

    def begin(self, *, total_bytes: int, done_bytes: int) -> None:
        self._total_bytes, self._done_bytes = total_bytes, done_bytes
        if not self._shown:
            return
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
        except ImportError:
            return
        self._rich = Progress(
            TextColumn(self._doing),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn(f"{{task.fields[tokens]:,}} {self._unit}"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
        )
        self._rich.start()
        self._task = self._rich.add_task("", total=total_bytes, completed=done_bytes, tokens=0)

    def advance(
        self, *, source_bytes: int = 0, tokens: int = 0, done_bytes: int = 0, samples: int = 0
    ) -> None:
        tokens += samples
        self._done_bytes += source_bytes + done_bytes
        self._tokens += tokens
        if self._rich is not None:
            self._rich.update(self._task, completed=self._done_bytes, tokens=self._tokens)
        elif self._shown and time.monotonic() - self._last_line_s > LINE_INTERVAL_S:
            self._last_line_s = time.monotonic()
            share = self._done_bytes / self._total_bytes if self._total_bytes else 1.0
            print(f"{self._doing}: {share:.0%}, {self._tokens:,} {self._unit}", file=self._stream, flush=True)
