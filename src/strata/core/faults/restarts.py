"""Whether starting a run's workers again can help: the policy of a run, and what its failures so far say under it.

A typo, a missing file or a wrong shape fails the same way each time. The second time in a row, without a new step in
between, the run is given up with that error; other failures of its own (a crash, memory that ran out, a hang, a device, a disk)
the third time. A step is new if no attempt before had made it: what a restart repeats does not count. Where others continue
while one is replaced, steps are theirs too, so there the third time counts, whatever was made.
What says nothing about the program itself neither counts nor is forgotten: workers that were killed from outside, and those
that lost a peer. Pure: the caller says how long an attempt lasted, and what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from strata.core.faults.failures import SIGKILL, Failure, FailureClass, classify, is_corrupting
from strata.core.text import counted

QUICK_S = 60.0
"""A program that reports no steps may still have made progress if an attempt lasted longer."""
HOUR_S = 3600.0
FROM_OUTSIDE: frozenset[FailureClass] = frozenset({"preemption", "node_lost"})
"""They say nothing about what the program will do next time."""

Decision = Literal["restart", "stop"]
OnUserError = Literal["stop", "stop_if_repeated", "continue"]
OnFailure = Literal["stop", "continue"]
OnGpu = Literal["stop", "continue", "quarantine"]


class PolicyError(ValueError):
    """A policy that cannot be read: what is wrong, and what may be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a run does after a failure. Written as `user_error=stop,max_restarts_per_hour=10`."""

    same_fingerprint: int = 3
    """Stop after the same failure so many times in a row without a new step."""
    user_error: OnUserError = "stop_if_repeated"
    """`stop`: the first ends the run; `stop_if_repeated`: one that comes back without a new step; `continue`: as any other."""
    gpu: OnGpu = "continue"
    """`quarantine`: the machine is taken out of use, and the run continues without it where it can."""
    preemption: OnFailure = "continue"
    max_restarts_per_hour: int = 0
    """0: as many as there are."""

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Raises `PolicyError`."""
        names = [part.name for part in fields(cls)]
        allowed: Mapping[str, tuple[str, ...]] = {
            "user_error": get_args(OnUserError),
            "gpu": get_args(OnGpu),
            "preemption": get_args(OnFailure),
        }
        found: dict[str, int | str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in names:
                raise PolicyError(f"'{name}' is not a policy setting; choose from {', '.join(names)}.")
            if name in allowed:
                if value not in allowed[name]:
                    raise PolicyError(f"{name} is '{value}'; it may be {' or '.join(allowed[name])}.")
                found[name] = value
                continue
            least = 1 if name == "same_fingerprint" else 0
            if not value.isdecimal() or int(value) < least:
                raise PolicyError(f"{name} is '{value}'; it must be a whole number of at least {least}.")
            found[name] = int(value)
        return cls(**found)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a failure, and why."""

    decision: Decision
    reason: str
    quarantine: bool = False
    """This machine is to be taken out of use: it leaves the run, and takes no part in any."""


@dataclass(slots=True)
class Restarts:
    """The failures of one run, one after the other, under its policy."""

    policy: Policy = field(default_factory=Policy)
    _last: Failure | None = None
    _last_was_quick: bool = False
    _alike: int = 0
    """Quick ones in a row that were the same, whatever was made in between."""
    _stuck: int = 0
    """The same in a row, without a new step in between."""
    _restarted_s: deque[float] = field(default_factory=deque)

    def failed(
        self,
        first: Failure | None,
        *,
        lasted_s: float,
        now_s: float,
        others_continue: bool = False,
        can_quarantine: bool = False,
    ) -> Verdict:
        """An attempt has failed; `first` is the worker to blame, None where that is not known. `now_s` is monotonic. `can_quarantine`:
        there is a coordinator that keeps machines out of use."""
        if can_quarantine and self.policy.gpu == "continue" and first is not None and is_corrupting(first):
            # Others have checked it: a run there computes wrong results without noticing.
            reason = f"a machine that corrupts its state is quarantined: {_said(first)}"
            return Verdict(decision="restart", reason=reason, quarantine=True)
        if first is not None and classify(first) == "gpu" and self.policy.gpu == "quarantine":
            reason = f"the policy of this run quarantines a machine whose GPU has failed: {_said(first)}"
            return Verdict(decision="restart", reason=reason, quarantine=True)
        stop = self._stops(first, lasted_s, others_continue) or self._too_many(now_s)
        if stop is not None:
            return Verdict(decision="stop", reason=stop)
        self._restarted_s.append(now_s)
        return Verdict(decision="restart", reason=_why_again(first))

    def _stops(self, first: Failure | None, lasted_s: float, others_continue: bool) -> str | None:
        policy, kind = self.policy, classify(first)
        if first is None:
            return None
        if kind == "user_error" and policy.user_error == "stop":
            return f"the policy of this run stops at the first error of the program: {_said(first)}"
        if (kind == "gpu" and policy.gpu == "stop") or (kind == "preemption" and policy.preemption == "stop"):
            return f"the policy of this run stops at a failure of class {kind}: {_said(first)}"
        if (
            first.is_about_peers
            or kind in FROM_OUTSIDE
            or (kind == "unknown" and first.exit_code == -SIGKILL)
        ):
            return None
        before, before_was_quick = self._last, self._last_was_quick
        self._last, self._last_was_quick = first, lasted_s < QUICK_S
        is_like = before is not None and first.is_like(before)
        self._alike = self._alike + 1 if is_like and self._last_was_quick else 1
        is_stuck = is_like and not _made_progress(before, first, before_was_quick and self._last_was_quick)
        self._stuck = self._stuck + 1 if is_stuck else 1
        if others_continue and self._alike >= policy.same_fingerprint:
            return f"the same error came back {counted(self._alike - 1, 'time')} in a row: {_said(first)}"
        at_once = kind == "user_error" and policy.user_error == "stop_if_repeated"
        if self._stuck < (2 if at_once else policy.same_fingerprint):
            return None
        step = first.error.step if first.error is not None else None
        progress = "no step was completed" if not step else f"no step was completed after step {step:,}"
        times = "" if self._stuck == 2 else f" {counted(self._stuck - 1, 'time')}"
        return f"the same {'error' if first.error else 'failure'} came back{times} and {progress} in between: {_said(first)}"

    def _too_many(self, now_s: float) -> str | None:
        most = self.policy.max_restarts_per_hour
        while self._restarted_s and now_s - self._restarted_s[0] > HOUR_S:
            self._restarted_s.popleft()
        if not most or len(self._restarted_s) < most:
            return None
        return f"{counted(most, 'restart')} within an hour, the limit of this run's policy"


def _made_progress(before: Failure | None, now: Failure, both_quick: bool) -> bool:
    then_step = before.error.step if before is not None and before.error is not None else None
    step = now.error.step if now.error is not None else None
    if step is None and then_step is None:
        return not both_quick
    return (step or 0) > (then_step or 0)


def _said(failure: Failure) -> str:
    return str(failure.error) if failure.error is not None and not failure.signal else str(failure)


def _why_again(first: Failure | None) -> str:
    if first is None:
        return "the cause of the failure is unknown"
    match classify(first):
        case "user_error":
            return "it may not recur; a second time without a new step ends the run"
        case "preemption":
            return "it was asked to leave, which is not a failure of the program"
        case "network":
            return "a connection was lost, which is not a failure of the program"
        case "unknown" if first.exit_code == -SIGKILL:
            return "it was killed from outside, which is not a failure of the program"
        case kind:
            return f"a failure of class {kind} may not recur"
