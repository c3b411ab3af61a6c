"""The recoveries a job has made: the duration of each phase, and what was lost. Pure; newest kept, oldest dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from strata.core import checks
from strata.core.messages import Event, Instant, JobId, RecoveryRecorded, ReportRecovery

KEPT = 1_000
NAMES_SHOWN = 4
MAX_PHASES = 16
MAX_NAMED = 20_000


def who_survived(record: RecoveryRecorded) -> str:
    """'2 survived in process, rank1 replaced'; empty where none has survived."""
    if not record.survived:
        return ""
    lost, joined = set(record.lost), set(record.joined)
    parts = [f"{record.survived:,} survived in process"]
    for workers, became in (
        ([worker for worker in record.joined if worker in lost], "replaced"),
        ([worker for worker in record.lost if worker not in joined], "lost"),
        ([worker for worker in record.joined if worker not in lost], "joined"),
    ):
        if len(workers) > NAMES_SHOWN:
            parts.append(f"{len(workers):,} {became}")
        elif workers:
            names = (worker.removeprefix(f"{record.job_id}-") for worker in workers)
            parts.append(f"{' and '.join(names)} {became}")
    return ", ".join(parts)


class Recoveries:
    def __init__(self) -> None:
        self.records: deque[RecoveryRecorded] = deque(maxlen=KEPT)

    def decide_report(self, command: ReportRecovery, job: JobId, now: Instant) -> RecoveryRecorded:
        checks.between("number of phases", len(command.phases_s), 1, MAX_PHASES)
        for name, seconds in command.phases_s.items():
            checks.name("phases key", name, limit=64)
            checks.between(f"phases[{name}]", seconds, 0.0, 30 * 86_400.0)
        for field, value in (
            ("resumed_step", command.resumed_step),
            ("lost_steps", command.lost_steps),
            ("world_before", command.world_before),
            ("world_after", command.world_after),
            ("survived", command.survived),
        ):
            checks.between(field, value, 0, checks.SAMPLES_LIMIT)
        checks.text("tier", command.tier, limit=64)
        checks.text("reason", command.reason)
        checks.text("cause", command.cause)
        for field, names in (("lost", command.lost), ("joined", command.joined)):
            checks.between(f"number of workers in {field}", len(names), 0, MAX_NAMED)
            for name in names:
                checks.name(field, name)
        checks.between("number of hosts", len(command.hosts), 0, MAX_NAMED)
        return RecoveryRecorded(
            job_id=job,
            worker_id=command.worker_id,
            phases_s=dict(command.phases_s),
            resumed_step=command.resumed_step,
            lost_steps=command.lost_steps,
            tier=command.tier,
            world_before=command.world_before,
            world_after=command.world_after,
            reason=command.reason or f"resumed at step {command.resumed_step}",
            at_s=now.wall_s,
            survived=command.survived,
            lost=command.lost,
            joined=command.joined,
            cause=command.cause,
        )

    def apply(self, event: RecoveryRecorded) -> None:
        self.records.append(event)

    def compact(self) -> Iterator[Event]:
        return iter(list(self.records))
