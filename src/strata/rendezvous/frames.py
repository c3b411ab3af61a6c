"""A script's own part of a traceback, without what brought the script to run. Needs no torch."""

from __future__ import annotations

from types import TracebackType


def script_frames(error: BaseException) -> TracebackType | None:
    """From the last program's top level on; all of it where no program had begun."""
    found = at = error.__traceback__
    while at is not None:
        frame = at.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            found = at
        at = at.tb_next
    return found
