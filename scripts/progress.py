"""Running installers so that a person can follow: what is done, how far it is, how long it takes; their own output goes
to a log, and the part of it that tells the cause is shown when one fails. Needs only Python's standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

ON_A_TERMINAL_EVERY_S = 0.2
IN_A_LOG_EVERY_S = 15.0
UNCHANGED_EVERY = 4
"""Where nothing has moved on, every so manieth line of a log: it is still at work."""
CAUSE_LINES = 12

_TELLING = re.compile(
    r"^\s*(ERROR\b|E:|W:|Err:|npm (ERR!|error)|(\w+: )?(fatal )?error\b|fatal:|\w*Error:|WARNING: Retrying)",
    re.I,
)
_BUILD_OUTPUT_ENDS = re.compile(r"\[end of output\]")


class ToolFailed(Exception):
    """The lines of a tool's output that tell why, and where all of it is."""


class Step:
    """One line of progress. On a terminal it is rewritten as things move on; in a log there is a line now and then."""

    def __init__(self, title: str, *, number: int = 1, count: int = 1) -> None:
        self.state: str | Callable[[], str] = ""
        """How far it is, or a way to find out; whoever does the work sets it."""
        self._title = f"[{number}/{count}] {title}"
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._began_s = time.monotonic()
        self._shown = ""
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Step:
        self._show(f"{self._title} …", "\r")
        self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._clock.join()
        outcome = "failed" if error is not None else self._now() or "done"
        self._show(f"{self._title}: {outcome}, {duration(time.monotonic() - self._began_s)}", "\n")

    def _tick(self) -> None:
        shown, seldom = "", 0
        while not self._over.wait(ON_A_TERMINAL_EVERY_S if self._is_terminal else IN_A_LOG_EVERY_S):
            state, seldom = self._now(), seldom + 1
            if self._is_terminal or state != shown or seldom % UNCHANGED_EVERY == 0:
                shown = state
                words = f": {state}" if state else " …"
                self._show(f"{self._title}{words}, {duration(time.monotonic() - self._began_s)}", "\r")

    def _now(self) -> str:
        return self.state if isinstance(self.state, str) else self.state()

    def _show(self, line: str, end: str) -> None:
        if self._is_terminal:
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}{' ' * (len(self._shown) - len(line))}", end=end, flush=True)
        else:
            print(line, flush=True)
        self._shown = line


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    watch: Callable[[str], None] = lambda line: None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a tool. Its output goes to the log, and line by line to `watch`. Raises `ToolFailed`."""
    name = Path(command[0]).name
    if name.startswith("python") and "-m" in command:
        name = str(command[list(command).index("-m") + 1])
    lines: list[str] = []
    with open(log, "a", errors="replace") as file:
        file.write(f"\n$ {' '.join(map(str, command))}\n")
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ToolFailed(f"{name} cannot be started: {error}") from error
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                lines.append(line.rstrip())
                watch(line)
    if process.returncode:
        said = "\n".join(f"  {line}" for line in cause(lines)) or "  (it said nothing)"
        raise ToolFailed(f"{name} ended with status {process.returncode}:\n{said}\nAll it said: {log}")


def cause(lines: Sequence[str]) -> list[str]:
    """The lines of a tool's output that tell why it failed: its errors, and the end of a build that it ran; without any,
    the last lines."""
    said = [line for line in lines if line.strip()]
    builds = [number for number, line in enumerate(said) if _BUILD_OUTPUT_ENDS.search(line)]
    built = said[max(0, builds[0] - CAUSE_LINES) : builds[0]] if builds else []
    telling, in_conflict = [], False
    for line in said:
        # What pip says of versions that do not go together is indented below its heading.
        in_conflict = line.startswith("The conflict is caused by:") or (
            in_conflict and line.startswith("    ")
        )
        if (in_conflict or _TELLING.search(line)) and line not in built:
            telling.append(line)
    return [*built, *list(dict.fromkeys(telling))[-CAUSE_LINES:]] or said[-CAUSE_LINES:]
