"""A fleet of 1,000 workers, by the minute, for as long as it is asked for: the real core and the real journal, a simulated clock.

Rates are those of a busy fleet, not of a test: ten jobs of a hundred workers that live for two days each, a checkpoint of each every
quarter of an hour with its barrier, two tiers and a removal, twelve machines lost a day, each of which brings a job down and up again
with a rendezvous, two hundred small tasks a day, and what tasks report of their progress. Heartbeats and keep-alives are soft and leave no trace.

The journal's files are measured after every simulated minute. `python -m tests.sim.month --days 30` prints the table of
docs/operating/growth.md.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.coordinator import engine as engines
from strata.coordinator.journal import codec
from strata.coordinator.journal.sqlite import SqliteJournal
from strata.core import views
from strata.core.cluster import Cluster, Limits
from strata.core.data.ledger import DataCommit, RankRecord
from strata.core.fleet.membership import MembershipLimits
from strata.core.messages import (
    SOFT_EVENTS,
    BeginAttempt,
    Command,
    CreateTask,
    DatasetId,
    DeregisterWorker,
    EndAttempt,
    Event,
    Instant,
    NoteProgress,
    PlanEpoch,
    Rebalance,
    RegisterDataset,
    RegisterWorker,
    ReportRecovery,
    SwapValue,
    TaskId,
    Tick,
    WorkerConnected,
    WorkerDisconnected,
    WorkerId,
)
from tests.core.builders import arrival, data_json, dataset_spec, instant, notice, task_spec, worker_spec

MINUTE_S = 60.0
HOUR, DAY = 60, 1_440
JOBS, WORKERS_OF_A_JOB = 10, 100
JOB_MINUTES = 2 * DAY
CHECKPOINT_MINUTES, CHECKPOINTS_KEPT = 15, 3
LOST_A_DAY = 12
SMALL_TASKS_A_DAY = 200
VALUE_BYTES = 4_000
LIMITS = Limits(membership=MembershipLimits(heartbeat_timeout_s=1e9))
"""Nobody sends heartbeats here: a worker is lost when its stream ends."""


@dataclass
class Job:
    number: int
    ends: int
    workers: list[WorkerId]
    step: int = 0
    checkpoints: list[str] = field(default_factory=list)
    starts: int = 0

    @property
    def name(self) -> str:
        return f"pretraining-{self.number:05}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The largest that were seen."""

    events: int
    compactions: int
    journal_bytes: int
    snapshot_bytes: int
    written_bytes: int
    objects: dict[str, int]


class Fleet:
    def __init__(self, folder: Path, *, seed: int = 0, progress_s: float = MINUTE_S) -> None:
        self.cluster = Cluster(LIMITS)
        self.journal = SqliteJournal(folder, reserve_bytes=4096)
        self.journal._db.execute("PRAGMA synchronous=OFF")  # A simulated disk loses nothing.
        self.random = random.Random(seed)
        self.minute = 0
        self._progress_s = progress_s
        self._second = 0.0
        self._jobs: list[Job] = []
        self._started = 0
        self._tasks = 0
        self._fresh: list[Event] = []
        self._since = self._since_bytes = self._snapshot_bytes = 0
        self._events = self._compactions = self._written_bytes = self._largest = self._largest_snapshot = 0
        self._most: Counter[str] = Counter()
        for number in range(5):
            self._do(RegisterDataset(spec=dataset_spec(f"corpus-{number}", samples=10_000_000, shard=10_000)))

    @property
    def now(self) -> Instant:
        return instant(self.minute * MINUTE_S + self._second)

    def run(self, minutes: int, *, each_day: Callable[[int, Sizes], None] = lambda day, sizes: None) -> Sizes:
        for _ in range(minutes):
            self.minute += 1
            self._second = 0.0
            self._live()
            self._do(Tick())
            if self.cluster.plans_are_stale:
                self._do(Rebalance())
            self._commit()
            if self.minute % DAY == 0:
                each_day(self.minute // DAY, self.sizes())
        return self.sizes()

    def sizes(self) -> Sizes:
        return Sizes(
            events=self._events,
            compactions=self._compactions,
            journal_bytes=self._largest,
            snapshot_bytes=self._largest_snapshot,
            written_bytes=self._written_bytes,
            objects=dict(self._most),
        )

    # --- the engine's part ------------------------------------------------------------------------------------

    def _do(self, command: Command) -> None:
        decided = self.cluster.handle(command, self.now).events
        self._fresh += [event for event in decided if not isinstance(event, SOFT_EVENTS)]

    def _commit(self) -> None:
        """As the engine does it, with its own figures for when to compact."""
        if self._fresh:
            self.journal.append(self._fresh)
            size_bytes = sum(map(codec.size_bytes, self._fresh))
            self._events += len(self._fresh)
            self._since += len(self._fresh)
            self._since_bytes += size_bytes
            self._written_bytes += size_bytes
            self._fresh = []
        most_bytes = max(engines.SNAPSHOT_BYTES, self._snapshot_bytes)
        if self._since >= engines.SNAPSHOT_EVERY or self._since_bytes >= most_bytes:
            self.journal.snapshot(self.cluster.compaction())
            self._snapshot_bytes = self.journal.sizes().snapshot_bytes
            self._since = self._since_bytes = 0
            self._compactions += 1
        sizes = self.journal.sizes()
        self._largest = max(self._largest, sizes.file_bytes)
        self._largest_snapshot = max(self._largest_snapshot, sizes.snapshot_bytes)
        for kind, count in views.objects(self.cluster).items():
            self._most[kind] = max(self._most[kind], count)

    # --- what happens -----------------------------------------------------------------------------------------

    def _live(self) -> None:
        for job in [job for job in self._jobs if job.ends <= self.minute]:
            self._end(job)
        if len(self._jobs) < JOBS:
            self._start()
        for job in self._jobs:
            job.step += 30
            if (self.minute + job.number) % CHECKPOINT_MINUTES == 0:
                self._save(job)
        if self._jobs and self.random.random() < LOST_A_DAY / DAY:
            self._lose(self.random.choice(self._jobs))
        for number in range(int(MINUTE_S / self._progress_s)):
            self._second = max(self._second, number * self._progress_s)
            for job in self._jobs:
                self._note(job)
        if self.random.random() < SMALL_TASKS_A_DAY / DAY:
            self._small_task()

    def _start(self) -> None:
        number = self._started
        self._started += 1
        life = int(JOB_MINUTES * self.random.uniform(0.5, 1.5))
        workers = [WorkerId(f"node-{number % 37:02}-{rank:03}-{number}") for rank in range(WORKERS_OF_A_JOB)]
        job = Job(number=number, ends=self.minute + life, workers=workers)
        self._jobs.append(job)
        self._do(
            CreateTask(
                spec=task_spec(job.name, name=job.name, config_json='{"model": "gpt", "steps": 1000000}')
            )
        )
        self._do(BeginAttempt(task_id=TaskId(job.name), reason=""))
        self._meet(job)

    def _meet(self, job: Job) -> None:
        """A rendezvous, and everybody registers."""
        job.starts += 1
        for _ in range(8):
            known = self.cluster.values.get(f"rendezvous/{job.name}")
            version = known.version if known is not None else 0
            body = self.random.randbytes(VALUE_BYTES)
            self._do(SwapValue(key=f"rendezvous/{job.name}", body=body, expected_version=version, soft=False))
        for worker in job.workers:
            spec = worker_spec(
                worker,
                job.name,
                hostname=f"host-{worker}",
                run_id=f"run-{job.number}",
                run_generation=job.starts,
            )
            self._do(RegisterWorker(spec=spec, registration_id=f"{worker}-{job.starts}"))
            self.cluster.observe(WorkerConnected(worker_id=worker, incarnation=0), self.now)
        dataset = DatasetId(f"corpus-{job.number % 5}")
        first = job.workers[0]
        self._do(PlanEpoch(worker_id=first, incarnation=0, generation=0, dataset_id=dataset, epoch=0))

    def _save(self, job: Job) -> None:
        for worker in job.workers:
            self._do(arrival(worker, "saved", step=job.step, call_id=self.random.randbytes(8).hex()))
        name = f"{job.name}-{job.step:08}-{self.random.randbytes(4).hex()}"
        share = job.step // 4
        ranks = [
            RankRecord(dataset=f"corpus-{job.number % 5}", epoch=0, total=10_000_000, rank=rank).with_span(
                rank * share, (rank + 1) * share
            )
            for rank in range(8)
        ]
        data = data_json(DataCommit().next(ranks, world_size=8))
        parent = job.checkpoints[-1] if job.checkpoints else ""
        run: dict[str, Any] = {"run_id": f"run-{job.number}", "run_generation": job.starts}
        first = job.workers[0]
        self._do(notice(first, name, job.step, status="in_progress", **run))
        for tiers in (("nvme",), ("nvme", "s3")):
            self._do(notice(first, name, job.step, tiers=tiers, data_json=data, parent_id=parent, **run))
        job.checkpoints.append(name)
        while len(job.checkpoints) > CHECKPOINTS_KEPT:
            self._do(notice(first, job.checkpoints.pop(0), status="removed", **run))

    def _note(self, job: Job) -> None:
        step = job.step + int(self._second / 2)
        self._do(
            NoteProgress(
                task_id=TaskId(job.name),
                attempt=1,
                worker_ids=tuple(job.workers),
                step=step,
                total_steps=1_000_000,
            )
        )

    def _lose(self, job: Job) -> None:
        """One is lost; all of the job start again."""
        lost = self.random.choice(job.workers)
        incarnation = self.cluster.membership.members[lost].incarnation
        self.cluster.observe(WorkerDisconnected(worker_id=lost, incarnation=incarnation), self.now)
        self._second += 5.0
        self._do(Tick())
        assert not self.cluster.membership.members[lost].present
        self._meet(job)
        self._do(
            ReportRecovery(
                worker_id=job.workers[0],
                incarnation=0,
                phases_s={"detect": 0.5, "rendezvous": 2.0, "load": 8.0, "first_step": 3.0},
                resumed_step=job.step,
                lost_steps=20,
                tier="nvme",
                world_before=WORKERS_OF_A_JOB,
                world_after=WORKERS_OF_A_JOB,
                reason="a machine was lost",
                lost=(lost,),
            )
        )

    def _end(self, job: Job) -> None:
        self._jobs.remove(job)
        for worker in job.workers:
            self._do(DeregisterWorker(worker_id=worker, incarnation=0, reason="trained to the end"))
        self._do(EndAttempt(task_id=TaskId(job.name), attempt=1, cause=None))

    def _small_task(self) -> None:
        self._tasks += 1
        name = TaskId(f"evaluation-{self._tasks:06}")
        self._do(CreateTask(spec=task_spec(name, config_json='{"checkpoint": "latest"}')))
        self._do(BeginAttempt(task_id=name, reason=""))
        self._do(EndAttempt(task_id=name, attempt=1, cause=None))

    def close(self) -> None:
        self.journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--progress-s", type=float, default=MINUTE_S)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), progress_s=arguments.progress_s)

        def show(day: int, sizes: Sizes) -> None:
            print(
                f"| {day} | {sizes.events:,} | {sizes.written_bytes / 1e6:,.0f} | {sizes.compactions} | "
                f"{sizes.snapshot_bytes / 1e6:.1f} | {sizes.journal_bytes / 1e6:.1f} |",
                flush=True,
            )

        sizes = fleet.run(arguments.days * DAY, each_day=show)
        fleet.close()
    print(sizes.objects)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{time.monotonic() - started_s:.0f} s; {peak_mb:.0f} MB of memory at most")


if __name__ == "__main__":
    main()
