"""Which state of a rank that has lost a peer is right: its live one, or the newest snapshot.

Between two steps a rank's state is complete: the optimizer has stepped on a global batch that every rank contributed to, and
nothing of the next step has reached it. That is a **boundary**: the loop has asked for the next batch. A rank that is torn out
of the step after it still has the state of the boundary, provided that no step of the optimizer has started since, that the
device had really made the last one before any of its collectives was aborted, and that whatever else has changed since was
put back. `judge` says whether all this is known, and if not, what is missing. What is not known to be complete is not used:
then training continues from the newest snapshot, as after a restart.

Pure: the facts come from `strata.training.live`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["none", "done", "pending", "unknown"]
"""What is known of a device that makes the steps: there is none; it had made the boundary's step before anything was aborted,
or had not; or that is unknown."""
NAMED = 3
"""So many of the things that have changed are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The loop has asked for the next batch after a step."""

    step: int
    made: int
    """Steps that the optimizer had ended by then, in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What was known right before the process groups were aborted."""

    step: int
    """Of the last boundary."""
    began: int
    """Steps that the optimizer had started: those worked with gradients that had arrived."""
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a rank that has left its loop with an error."""

    boundary: Boundary | None
    """The last one of this process."""
    began: int = 0
    ended: int = 0
    """Steps of the optimizer, as counted by its hooks."""
    sees_steps: bool = True
    """The optimizer has hooks."""
    is_sharded: bool = False
    frozen: Frozen | None = None
    """None where nothing was aborted: a collective has failed by itself."""
    device: Device = "none"
    """Now."""
    has_read_on: bool = False
    """The position in the data is no longer the boundary's."""
    changed: tuple[str, ...] = ()
    """What has changed since the boundary and cannot be put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    step: int

    @property
    def reason(self) -> str:
        return f"the live state is complete at step {self.step:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incomplete:
    reason: str


def judge(facts: Facts) -> Complete | Incomplete:
    """Whether the live state is known to be that of a step, and of which."""
    reason = _what_is_missing(facts)
    if reason or facts.boundary is None:
        return Incomplete(reason=reason or "no step was completed since the job was entered")
    return Complete(step=facts.boundary.step)


def _what_is_missing(facts: Facts) -> str:
    boundary, frozen = facts.boundary, facts.frozen
    if facts.is_sharded:
        return "the state is sharded: each rank has only a part of it"
    if not facts.sees_steps:
        return "the steps of this optimizer cannot be observed"
    if boundary is None:
        return ""
    since = f"since step {boundary.step:,}"
    if facts.began != facts.ended:
        return f"the optimizer was in the middle of the step after step {boundary.step:,}"
    if facts.ended != boundary.made:
        return f"the optimizer has stepped {since}, and the loop has not asked for the next batch"
    if frozen is not None and boundary.made > frozen.began:
        return f"step {boundary.step:,} began after the process groups were aborted"
    if (device := _device_at(boundary, facts)) == "pending":
        return f"the device had not completed step {boundary.step:,} when the process groups were aborted"
    if device == "unknown":
        return f"it is unknown whether the device had completed step {boundary.step:,} before a collective was aborted"
    if facts.has_read_on:
        return f"batches were committed {since} without a step"
    if facts.changed:
        more = len(facts.changed) - NAMED
        names = ", ".join(facts.changed[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"changed {since}, without a copy: {names}"
    return ""


def _device_at(boundary: Boundary, facts: Facts) -> Device:
    """What the device had made of the boundary's step, when that could last be observed."""
    frozen = facts.frozen
    if frozen is None or facts.device == "none":
        return facts.device
    return frozen.device if frozen.step == boundary.step else "pending"
