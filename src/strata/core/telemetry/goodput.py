"""Where the time of a job went: training, checkpoint stalls, recovery, waiting.

Every worker process measures its own seconds and says, with each heartbeat, how many went where since it began (or,
where it replaces a process that died, since that one's last step). Here they are added up: over the workers of a job,
over all processes it has had. So the sum is the job's time in worker-seconds, and goodput is the share that was
training. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.core.messages import JobId, WorkerId

PARTS = ("training", "checkpoint", "recovery", "waiting")
METRIC_NAMES = {part: f"{part}_total_s" for part in PARTS}
"""Under which names workers report them."""
LIFE_METRIC = "account_began_s"
"""Which account it is: a worker's incarnation may change while its process lives, and its name outlives processes."""
JOBS_KEPT = 500
LONGEST_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputView:
    """Worker-seconds of one job, by activity."""

    job_id: str
    task_id: str | None
    training_s: float
    checkpoint_s: float
    """Training stood still for a save."""
    recovery_s: float
    """From the last step before a loss until training was as far again."""
    waiting_s: float
    """For data, for other ranks, and to start."""
    total_s: float
    goodput: float | None
    """The share that was training, 0 to 1; null when nothing has been measured."""
    processes: int
    """Worker processes that have reported."""
    queued_s: float | None
    """How long the task waited to be started, in seconds; null for a job that is no task."""


@dataclass(slots=True)
class _JobTime:
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lives: dict[WorkerId, tuple[float, dict[str, float]]] = field(default_factory=dict)
    """The account that each worker kept last, and what it had said."""
    processes: int = 0
    gpus: int = 0
    """Of a worker: the most that one has had."""


class Goodput:
    def __init__(self) -> None:
        self._jobs: dict[JobId, _JobTime] = {}

    def take(self, job: JobId, worker_id: WorkerId, metrics: Mapping[str, float], *, gpus: int = 0) -> None:
        """What a heartbeat of a worker with so many GPUs says. Metrics that cannot be right are not counted."""
        life = metrics.get(LIFE_METRIC)
        if life is None:
            return
        now = {part: metrics.get(name, 0.0) for part, name in METRIC_NAMES.items()}
        if not all(0.0 <= value <= LONGEST_S for value in now.values()):
            return
        time = self._jobs.get(job)
        if time is None:
            time = self._jobs[job] = _JobTime()
            if len(self._jobs) > JOBS_KEPT:
                del self._jobs[next(iter(self._jobs))]
        time.gpus = max(time.gpus, gpus)
        known = time.lives.get(worker_id)
        if known is None or known[0] != life:
            time.processes += 1
            before = dict.fromkeys(PARTS, 0.0)
        else:
            before = known[1]
        for part in PARTS:
            time.parts_s[part] += max(0.0, now[part] - before[part])
            now[part] = max(now[part], before[part])
        time.lives[worker_id] = (life, now)

    def jobs(self) -> list[JobId]:
        return list(self._jobs)

    def gpus_per_worker(self, job: JobId) -> int:
        time = self._jobs.get(job)
        return time.gpus if time is not None else 0

    def view(self, job: JobId, *, task_id: str | None = None, queued_s: float | None = None) -> GoodputView:
        time = self._jobs.get(job) or _JobTime()
        total_s = sum(time.parts_s.values())
        return GoodputView(
            job_id=job,
            task_id=task_id,
            training_s=time.parts_s["training"],
            checkpoint_s=time.parts_s["checkpoint"],
            recovery_s=time.parts_s["recovery"],
            waiting_s=time.parts_s["waiting"],
            total_s=total_s,
            goodput=time.parts_s["training"] / total_s if total_s > 0 else None,
            processes=time.processes,
            queued_s=queued_s,
        )

    # --- over a restart of the coordinator ------------------------------------------------------------------

    def dump(self) -> bytes:
        jobs = {
            job: {
                "parts_s": time.parts_s,
                "lives": time.lives,
                "processes": time.processes,
                "gpus": time.gpus,
            }
            for job, time in self._jobs.items()
        }
        return json.dumps(jobs).encode()

    def load(self, body: bytes) -> None:
        """Take up what `dump` wrote. Raises `ValueError` for anything else."""
        try:
            for job, found in json.loads(body).items():
                self._jobs[JobId(job)] = _JobTime(
                    parts_s={part: float(found["parts_s"][part]) for part in PARTS},
                    lives={
                        WorkerId(name): (float(life), {part: float(said[part]) for part in PARTS})
                        for name, (life, said) in found["lives"].items()
                    },
                    processes=int(found["processes"]),
                    gpus=int(found.get("gpus", 0)),
                )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not what was written: {error!r}") from None
