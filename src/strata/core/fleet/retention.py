"""What the coordinator forgets, and when: tasks that have ended, checkpoints that no longer exist, barriers that are over.

Nothing that can still be used is forgotten: a task that waits or runs, a checkpoint that exists, a barrier that is open. What
was decided long ago is, so that a fleet's state, and with it the journal, stays as large as the fleet is and not as old. Some of each kind
are kept whatever their age, because a clock may have been set.

Other parts bound themselves: members are forgotten some time after they failed, jobs that no worker is in, recoveries and incidents
by number, values a day after they were last touched.

Pure. What is forgotten is an event like any other, so a replay forgets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TypeVar

from strata.core.fleet.barriers import Barriers
from strata.core.fleet.checkpoints import CheckpointRecord, Checkpoints
from strata.core.fleet.tasks import ENDED, Task, Tasks
from strata.core.messages import Instant, RecordsForgotten

DAY_S = 86_400.0
AT_ONCE = 1_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionLimits:
    tasks_s: float = 30 * DAY_S
    """After their end."""
    checkpoints_s: float = 7 * DAY_S
    """Of those that were removed, have failed, or were never reported again."""
    barriers_s: float = DAY_S
    values_s: float = DAY_S
    """After they were last touched."""
    always_kept: int = 100
    """Of each kind, however old."""
    slack_s: float = 3_600.0
    """So much beyond its time a record may be kept, so that many are forgotten with one event."""
    look_every_s: float = 60.0


class Retention:
    def __init__(self, limits: RetentionLimits) -> None:
        self.limits = limits
        self._look_mono_s = 0.0

    def is_time(self, now: Instant) -> bool:
        return now.mono_s >= self._look_mono_s

    def looked(self, now: Instant) -> None:
        """Soft: a restart looks at once."""
        self._look_mono_s = now.mono_s + self.limits.look_every_s

    def decide_forget(
        self, tasks: Tasks, checkpoints: Checkpoints, barriers: Barriers, now: Instant
    ) -> RecordsForgotten | None:
        """Cheap where there is nothing to forget: what is kept is in the order of its age."""
        limits = self.limits

        def old(
            records: Iterable[_T],
            count: int,
            at_s: Callable[[_T], float],
            keep_s: float,
            over: Callable[[_T], bool],
        ) -> list[_T]:
            before_s = now.wall_s - keep_s
            aged = takewhile(lambda record: at_s(record) < before_s, records)
            return list(islice(filter(over, aged), max(0, min(count - limits.always_kept, AT_ONCE))))

        ended = old(
            tasks.tasks.values(),
            len(tasks.tasks),
            lambda task: task.created_at_s,
            limits.tasks_s,
            lambda task: _is_over(task, now.wall_s - limits.tasks_s),
        )
        removed = old(
            checkpoints.records.values(),
            len(checkpoints.records),
            lambda record: record.created_at_s,
            limits.checkpoints_s,
            _is_unusable,
        )
        rounds = old(
            barriers.ended.values(),
            len(barriers.ended),
            lambda outcome: outcome.at_s,
            limits.barriers_s,
            lambda outcome: True,
        )
        is_due = (
            any(
                task.ended_at_s < now.wall_s - limits.tasks_s - limits.slack_s
                for task in ended
                if task.ended_at_s
            )
            or any(
                record.created_at_s < now.wall_s - limits.checkpoints_s - limits.slack_s for record in removed
            )
            or any(outcome.at_s < now.wall_s - limits.barriers_s - limits.slack_s for outcome in rounds)
        )
        if not is_due:
            return None
        return RecordsForgotten(
            tasks=tuple(task.spec.task_id for task in ended),
            checkpoints=tuple(record.checkpoint_id for record in removed),
            barriers=len(rounds),
            reason=f"old: {len(ended):,} tasks, {len(removed):,} removed or failed checkpoints, {len(rounds):,} barriers",
            at_s=now.wall_s,
        )


def _is_over(task: Task, before_s: float) -> bool:
    return task.status in ENDED and task.ended_at_s is not None and task.ended_at_s < before_s


def _is_unusable(record: CheckpointRecord) -> bool:
    """No recovery can use it. One that is still being saved after days is not."""
    return record.removed or record.status != "completed"
