"""What ended a worker, in its own words: the script's part of the traceback, and a report for the agent.

The report is written beside the file that torchrun names for errors, so that the process that started the worker knows
the error, its place and the last step. Needs no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

from strata.core.faults.failures import EXIT_AGAIN, WorkerError

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_BESIDE = ".strata"
_SHOWN = "_strata_shown"
_FRAMES = 100
_CHARACTERS = 8_000
"""Of a message or traceback: a report travels in one line of 64 KiB at most."""


def script_frames(error: BaseException) -> TracebackType | None:
    """From the last program's top level on; all of it where no program had started."""
    found = at = error.__traceback__
    while at is not None:
        frame = at.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            found = at
        at = at.tb_next
    return found


def show(error: BaseException, frames: TracebackType | None) -> None:
    """Print it as Python does when it ends with it; only once, however often this is called."""
    if not getattr(error, _SHOWN, False):
        with suppress(AttributeError):
            setattr(error, _SHOWN, True)
        sys.excepthook(type(error), error, frames)


def describe(error: BaseException) -> WorkerError | None:
    """None for an end that is no failure."""
    frames = script_frames(error)
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(frames)]
    if isinstance(error, SystemExit):
        if error.code in (None, 0, EXIT_AGAIN):
            return None
        status = error.code if isinstance(error.code, int) else 1
        said = "" if isinstance(error.code, int) else f": {error.code}"
        name, message, text = "SystemExit", f"ended with status {status}{said}", ""
    else:
        name = type(error).__name__
        message = traceback.format_exception_only(error)[-1].strip().partition(": ")[2]
        text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, SyntaxError):
        places.append(f"{error.filename}:{error.lineno}")
    return WorkerError(
        type=name,
        message=message[:_CHARACTERS],
        where=tuple(places[-_FRAMES:]),
        step=_last_step(),
        traceback=text[-_CHARACTERS:],
        at_s=time.monotonic(),
    )


def report(error: WorkerError) -> None:
    """For the agent, beside what torch itself writes."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        with suppress(OSError), open(path + _BESIDE, "w") as file:
            json.dump(error.to_dict(), file)


def read_report(error_file: str) -> WorkerError | None:
    """What the worker reported that has this file for its errors; None if it did not."""
    try:
        with open(error_file + _BESIDE) as file:
            return WorkerError.from_dict(json.load(file))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def take_report(error_file: str) -> WorkerError | None:
    """The same, once: the next worker may have the same file."""
    found = read_report(error_file)
    with suppress(OSError):
        os.unlink(error_file + _BESIDE)
    return found


def _last_step() -> int | None:
    """Of this process; without importing what has not been imported."""
    trace = sys.modules.get("strata.agent.trace")
    step: int | None = trace.last_step_here() if trace is not None else None
    return step
