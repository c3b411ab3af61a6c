"""Which rank the others wait for.

In lock step all ranks take as long as the slowest, so step times alone say nothing. A rank's own time is what it needs
for a step without waiting for the others; one whose own time is well above the median of the others', report after
report, is slow. It must be so several times before it is reported, and no longer so for as long before that is withdrawn.
Pure: `judge` is given what the ranks of one job reported and returns what changed, each with a reason for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strata.core.messages import JobId, WorkerId

SLOW_RATIO = 1.5
FAIR_RATIO = 1.25
REPORTS = 5
"""Reports of new steps in a row that it takes to change our mind."""
LEAST_S = 0.002
"""Differences smaller than this are noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one rank said last."""

    worker_id: WorkerId
    step: int
    own_s: float
    """Time of its newest step, without waiting for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A rank became slow, or is no longer."""

    job_id: JobId
    worker_id: WorkerId
    slow: bool
    own_s: float
    others_s: float
    """Median of the others."""
    reason: str


@dataclass(slots=True)
class _Record:
    step: int = -1
    in_a_row: int = 0
    """Reports that speak against what is said about this rank now."""
    slow: bool = False


class Stragglers:
    def __init__(self) -> None:
        self._records: dict[JobId, dict[WorkerId, _Record]] = {}
        self.slow: dict[WorkerId, str] = {}
        """Why, for every rank that is slow now."""

    def judge(self, job: JobId, times: Sequence[StepTime]) -> list[Change]:
        """Called with the newest reports of a job's ranks; a report seen before does not count again."""
        known = self._records.setdefault(job, {})
        # A rank that is alone has no other that waits for it.
        self._forget(job, {reported.worker_id for reported in times} if len(times) > 1 else set())
        if len(times) < 2:
            return []
        ordered = sorted(reported.own_s for reported in times)
        changes = []
        for reported in times:
            record = known.setdefault(reported.worker_id, _Record())
            if reported.step <= record.step:
                if reported.step < record.step:
                    record.step = reported.step  # It went back to an earlier step.
                continue
            record.step = reported.step
            others_s = _median_without(ordered, reported.own_s)
            change = self._weigh(job, reported, others_s, record)
            if change is not None:
                changes.append(change)
        return changes

    def keep_only(self, jobs: Mapping[JobId, object]) -> None:
        for job in [job for job in self._records if job not in jobs]:
            self._forget(job, set())
            del self._records[job]

    def _weigh(self, job: JobId, reported: StepTime, others_s: float, record: _Record) -> Change | None:
        limit_s = others_s * (FAIR_RATIO if record.slow else SLOW_RATIO)
        is_slow = reported.own_s > max(limit_s, others_s + LEAST_S)
        if is_slow == record.slow:
            record.in_a_row = 0
            if is_slow:
                self.slow[reported.worker_id] = _reason(reported.own_s, others_s)
            return None
        record.in_a_row += 1
        if record.in_a_row < REPORTS:
            return None
        record.slow, record.in_a_row = is_slow, 0
        if is_slow:
            reason = self.slow[reported.worker_id] = _reason(reported.own_s, others_s)
        else:
            self.slow.pop(reported.worker_id, None)
            reason = f"{_ms(reported.own_s)} ms/step, median {_ms(others_s)} ms"
        return Change(
            job_id=job,
            worker_id=reported.worker_id,
            slow=is_slow,
            own_s=reported.own_s,
            others_s=others_s,
            reason=reason,
        )

    def _forget(self, job: JobId, present: set[WorkerId]) -> None:
        known = self._records[job]
        for worker_id in [worker_id for worker_id in known if worker_id not in present]:
            del known[worker_id]
            self.slow.pop(worker_id, None)


def _reason(own_s: float, others_s: float) -> str:
    ratio = f"{own_s / others_s:.1f}× the median" if others_s > 0 else "above the median"
    return f"{_ms(own_s)} ms/step, {ratio} of {_ms(others_s)} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.01 else f"{seconds * 1000:.1f}"


def _median_without(ordered: list[float], value: float) -> float:
    """The median of all but one of the values. `value` is one of them."""
    count = len(ordered) - 1

    def at(index: int) -> float:
        # Without one element, everything from its place on moves down by one.
        return ordered[index + 1] if ordered[index] >= value else ordered[index]

    middle = count // 2
    return at(middle) if count % 2 else (at(middle - 1) + at(middle)) / 2
