"""Why a command was refused: whose fault it is, and what to do next. A refused command has changed nothing."""

from __future__ import annotations

from typing import ClassVar, Literal

from strata.errors import StrataError

Cause = Literal["", "superseded", "failed", "unknown", "generation", "run_generation"]
"""Why a caller may not speak for a worker or a run (any more); empty where a refusal is about something else.

* `superseded`: a newer registration of the same worker took its place, so that this process is one too many.
* `run_generation`: a later generation of its run has started, so that this process is a remnant of an earlier one.
* `failed`: it was taken for dead; `unknown`: it is not in the coordinator's memory. It may register again.
* `generation`: the job's members have changed since; it may ask again in the present generation.
"""


class Refused(StrataError):
    """A command that changed nothing, and why."""

    code: ClassVar[str] = "refused"
    cause: Cause = ""


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


class UnknownWorker(Unknown):
    """Never registered, or forgotten since."""

    cause = "unknown"

    def __init__(self, name: str) -> None:
        hint = "Register the worker first (RegisterWorker, or TrainingOrchestrator.register_worker)."
        super().__init__("worker", name, hint=hint)


class Conflict(Refused):
    """The thing exists already, and differs."""

    code = "conflict"


class NameInUse(Conflict):
    """Another live run has this job name."""

    code = "name_in_use"

    def __init__(self, *, job: str, run_id: str, holder: str) -> None:
        super().__init__(
            f"The job name '{shorten(job)}' is used by another live run ({holder}, run {shorten(run_id)}).",
            hint="Give this job a name of its own: job='another-name'; or stop the other one first.",
        )
        self.job = job
        self.run_id = run_id


class Stale(Refused):
    """The caller speaks for an incarnation or generation that is over; `cause` says which, and what to do follows."""

    code = "stale"

    def __init__(self, message: str, *, cause: Cause, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause


class Overloaded(Refused):
    """A limit that protects everyone was reached; trying again later is right."""

    code = "overloaded"


def shorten(text: str, limit: int = 80) -> str:
    """Names come from callers: a message quotes at most `limit` characters of one, and none that cannot be shown."""
    shown = text if len(text) <= limit else text[: limit - 1] + "…"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
