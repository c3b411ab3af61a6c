"""What the kernel is asked to do for processes. Needs nothing but Python."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int) -> None:
    """The kernel sends `number` to this process when the thread that started it is gone. A parent that was gone before
    this call is not noticed: see `os.getppid`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
