"""The recoveries a job has made: the duration of each phase, and what was lost. Pure; newest kept, oldest dropped."""

from __future__ import annotations

from collections import deque

from strata.core import checks
from strata.core.messages import Event, Instant, JobId, RecoveryRecorded, ReportRecovery

KEPT = 1_000
MAX_PHASES = 16


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
        ):
            checks.between(field, value, 0, checks.SAMPLES_LIMIT)
        checks.text("tier", command.tier, limit=64)
        checks.text("reason", command.reason)
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
        )

    def apply(self, event: RecoveryRecorded) -> None:
        self.records.append(event)

    def compact(self) -> list[Event]:
        return list(self.records)
