"""The errors Strata raises on purpose.

Every one says what happened, whose turn it is, and what to do next: a stable `code` for programs, a message
for people, a `hint` with the next step. Facts travel as fields, never only inside the text. `ValueError` is
kept for bad arguments to a local function, `assert` for our own bugs; everything else is a `StrataError`.
"""

from __future__ import annotations

import sys
from typing import ClassVar


class StrataError(Exception):
    """Base of everything Strata raises on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Both, each a sentence: some messages are texts that users know without a full stop."""
        is_open = self.message[-1:].isalnum() or self.message[-1:] in ("'", '"', ")", "]")
        stop = "." if is_open and "\n" not in self.message else ""
        return f"{self.message}{stop} {self.hint}" if self.hint else self.message


class MissingDependency(StrataError):
    """The requested feature needs an optional package."""

    code = "missing_dependency"

    def __init__(self, package: str, *, extra: str, feature: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed.",
            hint=f"Install it with: pip install 'strata-runtime[{extra}]'",
        )
        self.package = package
        self.extra = extra


class UnsupportedPlatform(StrataError):
    """Strata needs Linux: `/proc`, shared memory as files, its signals."""

    code = "unsupported_platform"

    def __init__(self, platform: str) -> None:
        super().__init__(
            f"Strata needs Linux, and this is {platform}.",
            hint="Use a Linux machine, a container, or WSL 2 on Windows.",
        )


def require_linux() -> None:
    """Raises `UnsupportedPlatform` elsewhere: one sentence, before anything fails for want of a file."""
    if not sys.platform.startswith("linux"):
        raise UnsupportedPlatform(sys.platform)
