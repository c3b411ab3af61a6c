"""Where Strata runs. Needs nothing but Python, of any platform."""

from __future__ import annotations

import sys

from strata.errors import UnsupportedPlatform


def require_linux() -> None:
    """Raises `UnsupportedPlatform` elsewhere: one sentence, before anything fails for want of a file."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedPlatform(sys.platform)
