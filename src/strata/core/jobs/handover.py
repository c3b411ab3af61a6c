"""How a machine leaves a run that was notified when it goes: what is saved, by when, and what that means for the run.

An agent has one `Handover`. Notices come from a person (through the coordinator), from a signal, or from the machine's cloud; the earliest
deadline counts. The first one asks the workers to save and leave; those that have not when `kill_in_s` is over are killed, so that what is
known can still be reported before the machine goes. The job decides by `choose_save` what can be saved in the time that is left: a
durable checkpoint where that is likely to be written, else a snapshot that the machines that stay have in their memory.

Active → draining → drained; never back: an agent that leaves is started anew. Pure: time arrives as `now_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from strata.core.text import counted

RESERVE, LONGEST_RESERVE_S = 0.1, 2.0
"""Of the time that is left, so much is kept for ending what did not end by itself, and again for reporting it."""
DURABLE_MARGIN, DURABLE_SLACK_S = 1.5, 1.0
"""A checkpoint is taken to need so many times what the last one took, and this much more."""
DURABLE_UNKNOWN_S = 10.0
"""Where none was written yet."""

State = Literal["active", "draining", "drained"]
Where = Literal["durable", "memory", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The machine goes."""

    source: str
    """Who says so: strata drain, SIGTERM, AWS, …"""
    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one worker says when it leaves, or has to."""

    step: int
    """That it had made."""
    saved_step: int | None
    """The newest that is saved, as far as it knows."""
    where: Where
    others_stay: bool
    """Ranks on other machines continue, with copies of their own."""
    in_time: bool
    """It has saved what it had, rather than been ended by the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of all workers of the machine."""

    saved_step: int | None
    lost_steps: int | None
    """None: those who continue will know."""
    where: Where
    reason: str


class Handover:
    def __init__(self) -> None:
        self.state: State = "active"
        self.notice: Notice | None = None

    def take(self, notice: Notice) -> bool:
        """Whether it changes anything: the first one does, and one with an earlier deadline."""
        if self.state == "drained" or (
            self.notice is not None and notice.deadline_s >= self.notice.deadline_s
        ):
            return False
        self.state, self.notice = "draining", notice
        return True

    def left(self) -> None:
        """All workers have ended."""
        self.state = "drained"

    def ask_in_s(self, now_s: float) -> float | None:
        """How long workers have for themselves; None without a deadline."""
        left_s = self._left_s(now_s)
        return None if left_s is None else left_s - 2 * _reserve(left_s)

    def kill_in_s(self, now_s: float) -> float | None:
        left_s = self._left_s(now_s)
        return None if left_s is None else left_s - _reserve(left_s)

    def _left_s(self, now_s: float) -> float | None:
        return None if self.notice is None else max(0.0, self.notice.deadline_s - now_s)


def _reserve(left_s: float) -> float:
    return min(RESERVE * left_s, LONGEST_RESERVE_S)


def choose_save(
    *,
    left_s: float,
    durable_s: float | None,
    has_destinations: bool,
    others_stay: bool,
    is_sharded: bool,
) -> Literal["durable", "memory"]:
    """What to save before some ranks leave. `durable_s` is what the last durable checkpoint took; None: there was none.

    A snapshot is enough only where the machines that stay have all of it: of a sharded state each has a part."""
    if not has_destinations:
        return "memory"
    if is_sharded or not others_stay:
        return "durable"
    needed_s = DURABLE_UNKNOWN_S if durable_s is None else DURABLE_MARGIN * durable_s + DURABLE_SLACK_S
    return "durable" if left_s >= needed_s else "memory"


def summarize(outcomes: Sequence[Outcome], *, workers: int) -> Summary:
    """What the workers of a machine have said, of so many."""
    if not outcomes:
        return Summary(
            saved_step=None,
            lost_steps=None if workers else 0,
            where="nothing",
            reason="its workers ran no Strata job, or ended before they could report what was saved"
            if workers
            else "it had no workers in the run: nothing was saved",
        )
    step = max(one.step for one in outcomes)
    saved = [one for one in outcomes if one.saved_step is not None]
    best = max(saved, key=lambda one: (one.saved_step or 0, one.where == "durable"), default=None)
    others_stay = any(one.others_stay for one in outcomes)
    if best is None or best.saved_step is None:
        if others_stay:
            return Summary(
                saved_step=None,
                lost_steps=None,
                where="nothing",
                reason=f"step {step:,} could not be saved before the deadline; the other machines continue from their own copies",
            )
        return Summary(
            saved_step=None,
            lost_steps=step,
            where="nothing",
            reason=f"nothing was saved before the deadline: {counted(step, 'step')} lost",
        )
    missing = max(0, step - best.saved_step)
    if best.where == "durable" and (best.in_time or not missing):
        return Summary(
            saved_step=best.saved_step,
            lost_steps=0,
            where="durable",
            reason=f"step {best.saved_step:,} is durable: 0 steps lost",
        )
    if others_stay:
        said = (
            f"step {best.saved_step:,} is in the memory of the remaining machines: there was no time for a durable checkpoint"
            if best.in_time
            else f"step {step:,} could not be saved before the deadline; the newest save is step {best.saved_step:,} ({best.where})"
        )
        return Summary(saved_step=best.saved_step, lost_steps=None, where=best.where, reason=said)
    if best.where == "durable":
        return Summary(
            saved_step=best.saved_step,
            lost_steps=missing,
            where="durable",
            reason=f"step {step:,} could not be saved before the deadline; step {best.saved_step:,} is durable: "
            f"{counted(missing, 'step')} lost",
        )
    return Summary(
        saved_step=best.saved_step,
        lost_steps=None,
        where="memory",
        reason=f"step {best.saved_step:,} is only in the memory of this machine, and lost with it; a restart on this "
        "machine continues from it",
    )
