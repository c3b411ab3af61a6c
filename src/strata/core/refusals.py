"""Why a command was refused: whose fault it is, and what to do next. A refused command has changed nothing."""

from __future__ import annotations

from typing import ClassVar

from strata.errors import StrataError


class Refused(StrataError):
    """A command that changed nothing, and why."""

    code: ClassVar[str] = "refused"


class InvalidArgument(Refused):
    """The caller's values cannot be right, whatever the state."""

    code = "invalid_argument"

    def __init__(self, field_name: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{field_name}: {message}", hint=hint)
        self.field_name = field_name


class Unknown(Refused):
    """The thing named does not exist here."""

    code = "not_found"

    def __init__(self, kind: str, name: str, *, hint: str = "") -> None:
        super().__init__(f"{kind} '{shorten(name)}' is not known here.", hint=hint)
        self.kind = kind
        self.name = name


class Conflict(Refused):
    """The thing exists already, and differs."""

    code = "conflict"


class Stale(Refused):
    """The caller speaks for an incarnation or generation that is over."""

    code = "stale"


class Overloaded(Refused):
    """A limit that protects everyone was reached; trying again later is right."""

    code = "overloaded"


def shorten(text: str, limit: int = 80) -> str:
    """Names come from callers: a message quotes at most `limit` characters of one, and none that cannot be shown."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
