"""Who the ranks of a job are: the same processes as before under new numbers, or new ones; and who of those before is lost.

Ranks are numbered anew whenever their set changes. A process that outlives such a change keeps the name that it had as a
worker; a new one is named after its rank, or, where a process that has survived is called so, after the lowest number that is free:
that of a lost one, which it replaces. Every rank decides the same from what all have reported to each other. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from strata.core.jobs.regroup import BROKEN, OTHERS_MEET


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The workers of one set of ranks, in the order of their ranks."""

    number: int = 0
    """Later sets have larger ones."""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """What a rank reports of itself when a set of ranks begins."""

    name: str = ""
    """Of the worker that this process has been; empty for a new process."""
    given: str = ""
    """What the user calls this worker."""
    left: Roster = Roster()
    """The set of ranks that this process was in before."""
    cause: str = ""
    """Why that one is over."""
    host: str = ""
    """The machine that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """A set of ranks, beside the one before it."""

    roster: Roster
    survived: int = 0
    """How many processes were there before."""
    lost: tuple[str, ...] = ()
    """Workers whose processes are no longer there."""
    joined: tuple[str, ...] = ()
    """Workers whose processes are new, where others have survived; those among the lost are replaced."""
    cause: str = ""
    """Why the set of ranks before is over."""
    hosts: tuple[str, ...] = ()
    """The machines of the ranks, each once."""

    @property
    def reporter(self) -> int:
        """The rank that reports the recovery: the first that has survived, for what it took is what the run has lost."""
        names = self.roster.names
        return next((rank for rank, name in enumerate(names) if name not in self.joined), 0)


def enter(entrants: Sequence[Entrant], *, job: str) -> Changes:
    """What all ranks report, in their order."""
    survivors = {entrant.name for entrant in entrants if entrant.name}
    taken = survivors | {entrant.given for entrant in entrants if entrant.given}
    names = []
    for rank, entrant in enumerate(entrants):
        name = entrant.name or entrant.given or _free(rank, job, taken)
        taken.add(name)
        names.append(name)
    before = max((entrant.left for entrant in entrants), key=lambda roster: roster.number)
    causes = sorted((entrant.cause for entrant in entrants if entrant.cause), key=_vagueness)
    return Changes(
        roster=Roster(number=before.number + 1, names=tuple(names)),
        survived=len(survivors),
        lost=tuple(name for name in before.names if name not in survivors),
        joined=tuple(name for name in names if name not in survivors) if survivors else (),
        cause=causes[0] if causes and survivors else "",
        hosts=tuple(sorted({entrant.host for entrant in entrants if entrant.host})),
    )


def _vagueness(cause: str) -> int:
    """Each machine knows why its own workers left; what was first is known where it happened."""
    return 2 if cause == OTHERS_MEET else 1 if cause.startswith(BROKEN) else 0


def _free(rank: int, job: str, taken: set[str]) -> str:
    name = f"{job}-rank{rank}"
    numbers = count()
    while name in taken:
        name = f"{job}-rank{next(numbers)}"
    return name
