"""Runs that have an identity: which generation of each is the newest, and which runs the members of a job belong to.

A run's generations only grow: a caller that speaks for an earlier one than the newest known is refused. What one job says of a
run concerns that job alone. A worker or a checkpoint without a run id belongs to no run, and nothing here concerns it.
Pure; part of `membership`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from strata.core import checks
from strata.core.messages import JobId, Stale, WorkerSpec

RUNS_KEPT = 10_000


class RunRegistry:
    def __init__(self) -> None:
        self._generations: dict[tuple[JobId, str], int] = {}
        """The newest one known of each run of each job, by its workers and its checkpoints; last the one noted last."""
        self._members: dict[JobId, Counter[str]] = {}
        """How many present members of each job belong to which run."""

    def admit(self, job: JobId, run_id: str, generation: int) -> None:
        newest = self._generations.get((job, run_id))
        if newest is not None and generation < newest:
            raise Stale(
                f"Generation {checks.number(newest)} of run '{run_id}' has started; this call comes from its "
                f"generation {checks.number(generation)}.",
                cause="run_generation",
                hint="Stop this process: the run continues elsewhere.",
            )

    def knows(self, job: JobId, run_id: str) -> bool:
        """Whether a generation of the run has shown itself in this job."""
        return bool(run_id) and (job, run_id) in self._generations

    def are_others_in(self, job: JobId, run_id: str) -> bool:
        """Whether present members of the job belong to another run."""
        return bool(self._members.get(job, {}).keys() - {run_id})

    # --- facts ----------------------------------------------------------------------------------------------

    def note(self, job: JobId, run_id: str, generation: int) -> None:
        """A generation of a run has shown itself."""
        if not run_id:
            return
        key = (job, run_id)
        self._generations[key] = max(generation, self._generations.pop(key, 0))
        if len(self._generations) > RUNS_KEPT:
            del self._generations[next(iter(self._generations))]

    def joined(self, spec: WorkerSpec) -> None:
        if spec.run_id:
            self._members.setdefault(spec.job_id, Counter())[spec.run_id] += 1
            self.note(spec.job_id, spec.run_id, spec.run_generation)

    def left(self, spec: WorkerSpec) -> None:
        runs = self._members.get(spec.job_id)
        if runs is None or spec.run_id not in runs:
            return
        runs[spec.run_id] -= 1
        if not runs[spec.run_id]:
            del runs[spec.run_id]
        if not runs:
            del self._members[spec.job_id]

    # --- compaction -----------------------------------------------------------------------------------------

    def compact(self) -> tuple[tuple[JobId, str, int], ...]:
        return tuple((job, run_id, number) for (job, run_id), number in self._generations.items())

    def restore(self, runs: Iterable[tuple[JobId, str, int]]) -> None:
        self._generations = {(job, run_id): number for job, run_id, number in runs}
