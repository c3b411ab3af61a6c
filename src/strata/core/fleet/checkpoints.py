"""The registry of checkpoints: an index over manifests, from `in_progress` to `completed` or `failed`.

A completed checkpoint is final: a repeated notice of it is accepted, a different one under the same id is a
conflict. Removal by retention takes it out of what a recovery may use but leaves its data position in the
history, because the proof that every sample was trained exactly once needs the whole chain. Notices can be lost on the
way, so the owner of a run also reports which of its checkpoints exist at all: the registry then follows (`decide_reconcile`).
Pure. Bytes live elsewhere; what is kept here can be rebuilt from the manifests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from strata.core import checks
from strata.core.data.ledger import DataCommit, LedgerError
from strata.core.messages import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointId,
    CheckpointRemoved,
    CheckpointStarted,
    CheckpointStatus,
    Conflict,
    Event,
    Instant,
    InvalidArgument,
    JobId,
    NotifyCheckpoint,
    ReconcileCheckpoints,
    Unknown,
    WorkerId,
    shorten,
)

DATA_LIMIT_BYTES = 1 << 20
PRESENT_LIMIT = 100_000

CheckpointEvent = CheckpointStarted | CheckpointCompleted | CheckpointFailed | CheckpointRemoved


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    checkpoint_id: CheckpointId
    job_id: JobId
    worker_id: WorkerId
    step: int
    epoch: int
    path: str
    size_bytes: int
    status: CheckpointStatus
    created_at_s: float
    ended_at_s: float | None = None
    tiers: tuple[str, ...] = ()
    digest: str = ""
    duration_s: float = 0.0
    parent_id: str = ""
    data_json: str = ""
    reason: str = ""
    removed: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    run_id: str = ""
    generation: int = 0


class Checkpoints:
    def __init__(self, *, records_kept: int = 100_000) -> None:
        self.records_kept = records_kept
        self.records: dict[CheckpointId, CheckpointRecord] = {}
        """In the order in which they started."""
        self.revision = 0
        """How many facts there were: what a caller names to say which state it speaks about."""
        self._timelines: dict[JobId, dict[CheckpointId, None]] = {}
        """What a recovery of each job may use, in the order of completion."""
        self._with_data: dict[JobId, dict[CheckpointId, None]] = {}
        """Of those, the ones that say which data they were trained on, in the same order."""

    # --- questions ------------------------------------------------------------------------------------------

    def latest(self, job: JobId, *, run_id: str = "") -> CheckpointRecord | None:
        """The newest completed checkpoint of a job: the one that completed last, whatever its step. For a run with an
        identity, one of another run does not count, and in one of its generations steps only go up, whatever is reported last."""
        newest = (self.records[checkpoint_id] for checkpoint_id in reversed(self._timelines.get(job, {})))
        return next((record for record in newest if record.run_id in ("", run_id) or not run_id), None)

    def knows(self, job: JobId) -> bool:
        return bool(self._timelines.get(job))

    def position(self, job: JobId) -> CheckpointRecord | None:
        """The newest completed checkpoint that says which data it was trained on."""
        newest = next(reversed(self._with_data.get(job, {})), None)
        return self.records[newest] if newest is not None else None

    def job_of(self, event: CheckpointEvent) -> JobId:
        if isinstance(event, CheckpointRemoved):
            return self.records[event.checkpoint_id].job_id
        return event.job_id

    def shown(self) -> list[CheckpointRecord]:
        """Newest first, without those that retention removed."""
        return [r for r in reversed(self.records.values()) if not r.removed]

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_notice(self, command: NotifyCheckpoint, job: JobId, now: Instant) -> CheckpointEvent | None:
        """The fact this notice adds, or None when it is known already."""
        _check(command, job)
        known = self.records.get(command.checkpoint_id)
        if known is not None:
            self._must_agree(known, command, job)
        match command.status:
            case "removed":
                if known is None:
                    raise Unknown("checkpoint", command.checkpoint_id, hint="Nothing has to be removed.")
                if known.removed:
                    return None
                return CheckpointRemoved(
                    checkpoint_id=command.checkpoint_id,
                    reason=command.reason or "retention",
                    at_s=now.wall_s,
                )
            case "in_progress":
                if known is not None:
                    return None
                return CheckpointStarted(
                    checkpoint_id=command.checkpoint_id,
                    job_id=job,
                    worker_id=command.worker_id,
                    step=command.step,
                    epoch=command.epoch,
                    path=command.path,
                    size_bytes=command.size_bytes,
                    reason=f"'{command.worker_id}' is saving step {command.step}",
                    at_s=now.wall_s,
                    run_id=command.run_id,
                    generation=_generation(command),
                )
            case "failed":
                if known is not None and known.status == "failed":
                    return None
                return CheckpointFailed(
                    checkpoint_id=command.checkpoint_id,
                    job_id=job,
                    worker_id=command.worker_id,
                    step=command.step,
                    epoch=command.epoch,
                    path=command.path,
                    reason=command.reason or "no reason reported",
                    at_s=now.wall_s,
                    run_id=command.run_id,
                    generation=_generation(command),
                )
            case "completed":
                if known is not None and known.status == "completed":
                    return _decide_tiers(command, known, now)
                return self._decide_completed(command, job, known, now)

    def _decide_completed(
        self, command: NotifyCheckpoint, job: JobId, known: CheckpointRecord | None, now: Instant
    ) -> CheckpointCompleted:
        duration_s = command.duration_s
        if not duration_s and known is not None:
            duration_s = max(0.0, now.wall_s - known.created_at_s)
        tiers = tuple(dict.fromkeys(command.tiers))
        return CheckpointCompleted(
            checkpoint_id=command.checkpoint_id,
            job_id=job,
            worker_id=command.worker_id,
            step=command.step,
            epoch=command.epoch,
            path=command.path,
            size_bytes=command.size_bytes,
            tiers=tiers,
            digest=command.digest,
            duration_s=duration_s,
            parent_id=command.parent_id,
            data_json=command.data_json,
            metadata=dict(command.metadata),
            reason=command.reason if command.is_by_agent and command.reason else _saved_to(tiers),
            at_s=now.wall_s,
            run_id=command.run_id,
            generation=_generation(command),
            told_in=command.run_generation,
            succeeded_by=command.succeeded_by or self._newer(command, job),
        )

    def _newer(self, command: NotifyCheckpoint, job: JobId) -> str:
        """The next newer checkpoint of its run, where there is one. A copy of a notice may be so late that all else about its
        checkpoint is forgotten, and it must not count as the newest for that."""
        age = (_generation(command), command.step)
        newer = ""
        for checkpoint_id in reversed(self._timelines.get(job, {}) if command.run_id and age[0] else {}):
            record = self.records[checkpoint_id]
            if record.run_id == command.run_id:
                if _age(record) <= age:
                    break
                newer = checkpoint_id
        return newer

    def decide_reconcile(
        self, command: ReconcileCheckpoints, job: JobId, now: Instant
    ) -> tuple[list[CheckpointEvent], tuple[CheckpointId, ...]]:
        """What follows from what exists, and which of that is not known here."""
        _check_present(command, job)
        present = dict.fromkeys(command.present)
        mine = [r for r in self.records.values() if (r.job_id, r.run_id) == (job, command.run_id)]
        events: list[CheckpointEvent] = []
        for record in mine:
            if record.checkpoint_id in present or record.removed:
                continue
            if record.status == "completed":
                reason = "missing from every destination"
                events.append(
                    CheckpointRemoved(checkpoint_id=record.checkpoint_id, reason=reason, at_s=now.wall_s)
                )
            elif record.status == "in_progress" and record.generation < command.run_generation:
                reason = "its process ended before the checkpoint completed"
                events.append(replace(_failed(record), reason=reason, at_s=now.wall_s))
        usable, newer = self._timelines.get(job, {}), ""
        by_age = sorted(mine, key=_age)
        for record in reversed(
            by_age
        ):  # Whatever the order of the list, and that in which they were reported.
            if record.removed and record.status == "completed" and record.checkpoint_id in present:
                found = replace(_completed(record), reason="found again", at_s=now.wall_s)
                events.append(replace(found, succeeded_by=newer))
                newer = record.checkpoint_id
            elif record.checkpoint_id in usable and record.checkpoint_id in present:
                newer = record.checkpoint_id
        known = {record.checkpoint_id for record in self.records.values() if record.status == "completed"}
        return events, tuple(checkpoint_id for checkpoint_id in present if checkpoint_id not in known)

    def _must_agree(self, known: CheckpointRecord, command: NotifyCheckpoint, job: JobId) -> None:
        if known.job_id != job:
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' belongs to job '{known.job_id}'.",
                hint="Use a separate id for every checkpoint.",
            )
        if known.run_id and command.run_id and known.run_id != command.run_id:
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' belongs to run '{known.run_id}'.",
                hint="Use a separate id for every checkpoint.",
            )
        if command.status == "removed":
            return
        if (known.step, known.epoch) != (command.step, command.epoch):
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' is of step {known.step}, epoch {known.epoch}, "
                f"not of step {command.step}, epoch {command.epoch}.",
                hint="Use a separate id for every step.",
            )
        if known.status != "completed":
            return
        if command.status == "failed":
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' is completed and cannot fail any more.",
                hint="Use a new id for a new attempt.",
            )
        if command.status == "completed" and (known.digest, known.size_bytes) != (
            command.digest,
            command.size_bytes,
        ):
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' is completed with other contents "
                f"({known.size_bytes:,} bytes, digest '{known.digest}').",
                hint="A completed checkpoint never changes. Use a new id.",
            )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: CheckpointEvent) -> None:
        self.revision += 1
        known = self.records.get(event.checkpoint_id)
        if isinstance(event, CheckpointRemoved):
            assert known is not None
            self.records[event.checkpoint_id] = replace(known, removed=True, reason=event.reason)
            self._remove_from_timelines(known)
            return
        self.records[event.checkpoint_id] = _recorded(event, known)
        if isinstance(event, CheckpointCompleted):
            self._place(event)
        if len(self.records) > self.records_kept:
            self._drop_oldest()

    def _place(self, event: CheckpointCompleted) -> None:
        job, placed = event.job_id, event.checkpoint_id
        timeline = self._timelines.setdefault(job, {})
        with_data = self._with_data.setdefault(job, {})
        has_data = bool(self.records[placed].data_json)
        if placed in timeline:
            in_order = (
                placed in with_data
            ) == has_data  # It keeps its place: another tier does not make it newer.
        elif not event.succeeded_by:
            timeline[placed] = None
            if has_data:
                with_data[placed] = None
            in_order = True
        else:
            ids = list(timeline)
            # One whose successor was removed meanwhile goes first, where it cannot be taken for the newest.
            at = ids.index(CheckpointId(event.succeeded_by)) if event.succeeded_by in timeline else 0
            timeline = self._timelines[job] = dict.fromkeys([*ids[:at], placed, *ids[at:]])
            in_order = not has_data
        if not in_order:
            self._with_data[job] = {each: None for each in timeline if self.records[each].data_json}

    def _remove_from_timelines(self, record: CheckpointRecord) -> None:
        for order in (self._timelines, self._with_data):
            order.get(record.job_id, {}).pop(record.checkpoint_id, None)

    def _drop_oldest(self) -> None:
        latest = {next(reversed(timeline)) for timeline in self._timelines.values() if timeline}
        oldest = next((r for r in self.records.values() if r.checkpoint_id not in latest), None)
        if oldest is not None:
            del self.records[oldest.checkpoint_id]
            self._remove_from_timelines(oldest)

    def forget(self, checkpoints: Iterable[CheckpointId]) -> None:
        """Of what no recovery can use: nothing that exists has changed."""
        for checkpoint_id in checkpoints:
            self.records.pop(checkpoint_id, None)

    def compact(self) -> Iterator[Event]:
        """Every beginning in its order, then every end in its order. Jobs are in the order of their first, which may be
        removed."""
        timelines = [tuple(timeline) for _, timeline in sorted(self._timelines.items())]
        return _history(dict(self.records), timelines)


def _history(
    records: Mapping[CheckpointId, CheckpointRecord], timelines: Sequence[Sequence[CheckpointId]]
) -> Iterator[Event]:
    for r in records.values():
        yield CheckpointStarted(
            checkpoint_id=r.checkpoint_id,
            job_id=r.job_id,
            worker_id=r.worker_id,
            step=r.step,
            epoch=r.epoch,
            path=r.path,
            size_bytes=r.size_bytes,
            reason=r.reason,
            at_s=r.created_at_s,
            run_id=r.run_id,
            generation=r.generation,
        )
    usable = {checkpoint_id for timeline in timelines for checkpoint_id in timeline}
    for record in records.values():
        if record.checkpoint_id not in usable:
            yield from _ends(record)
    for timeline in timelines:
        for checkpoint_id in timeline:
            yield from _ends(records[checkpoint_id])


def _decide_tiers(
    command: NotifyCheckpoint, known: CheckpointRecord, now: Instant
) -> CheckpointCompleted | None:
    """A completed checkpoint reached further tiers: all else about it stays as it was."""
    new_tiers = [tier for tier in dict.fromkeys(command.tiers) if tier not in known.tiers]
    if known.removed or not new_tiers:
        return None
    tiers = (*known.tiers, *new_tiers)
    return replace(_completed(known), tiers=tiers, reason=_saved_to(tiers), at_s=now.wall_s)


def _saved_to(tiers: tuple[str, ...]) -> str:
    return f"saved to {', '.join(tiers) or 'storage'}"


def _recorded(
    event: CheckpointStarted | CheckpointCompleted | CheckpointFailed, known: CheckpointRecord | None
) -> CheckpointRecord:
    record = CheckpointRecord(
        checkpoint_id=event.checkpoint_id,
        job_id=event.job_id,
        worker_id=event.worker_id,
        step=event.step,
        epoch=event.epoch,
        path=event.path,
        size_bytes=known.size_bytes if known is not None else 0,
        status="in_progress",
        created_at_s=known.created_at_s if known is not None else event.at_s,
        reason=event.reason,
        run_id=event.run_id,
        generation=event.generation,
    )
    match event:
        case CheckpointStarted():
            return replace(record, size_bytes=event.size_bytes)
        case CheckpointFailed():
            return replace(record, status="failed", ended_at_s=event.at_s)
        case CheckpointCompleted():
            again = known is not None and known.status == "completed"
            return replace(
                record,
                status="completed",
                ended_at_s=known.ended_at_s if known is not None and again else event.at_s,
                size_bytes=event.size_bytes,
                tiers=event.tiers,
                digest=event.digest,
                duration_s=event.duration_s,
                parent_id=event.parent_id,
                data_json=event.data_json,
                metadata=event.metadata,
            )


def _completed(record: CheckpointRecord) -> CheckpointCompleted:
    return CheckpointCompleted(
        checkpoint_id=record.checkpoint_id,
        job_id=record.job_id,
        worker_id=record.worker_id,
        step=record.step,
        epoch=record.epoch,
        path=record.path,
        size_bytes=record.size_bytes,
        tiers=record.tiers,
        digest=record.digest,
        duration_s=record.duration_s,
        parent_id=record.parent_id,
        data_json=record.data_json,
        metadata=record.metadata,
        reason=record.reason,
        at_s=record.ended_at_s if record.ended_at_s is not None else record.created_at_s,
        run_id=record.run_id,
        generation=record.generation,
    )


def _failed(record: CheckpointRecord) -> CheckpointFailed:
    return CheckpointFailed(
        checkpoint_id=record.checkpoint_id,
        job_id=record.job_id,
        worker_id=record.worker_id,
        step=record.step,
        epoch=record.epoch,
        path=record.path,
        reason=record.reason,
        at_s=record.ended_at_s if record.ended_at_s is not None else record.created_at_s,
        run_id=record.run_id,
        generation=record.generation,
    )


def _ends(record: CheckpointRecord) -> Iterator[Event]:
    """What happened to a checkpoint after it had started."""
    ended_at_s = record.ended_at_s if record.ended_at_s is not None else record.created_at_s
    if record.status == "completed":
        yield _completed(record)
    elif record.status == "failed":
        yield _failed(record)
    if record.removed:
        yield CheckpointRemoved(checkpoint_id=record.checkpoint_id, reason=record.reason, at_s=ended_at_s)


def _age(record: CheckpointRecord) -> tuple[int, int]:
    """Within a run, older ones are less. What is reported late is recorded after what is newer; without a generation, though, steps may
    go back, and there is only the order in which they were recorded."""
    return (record.generation, record.step if record.generation else 0)


def _generation(command: NotifyCheckpoint) -> int:
    return command.run_generation if command.saved_generation is None else command.saved_generation


def _check_job(command: NotifyCheckpoint | ReconcileCheckpoints, job: JobId) -> None:
    checks.run(command.run_id, command.run_generation)
    if command.job_id and command.job_id != job:
        raise InvalidArgument(
            "job_id",
            f"is '{shorten(command.job_id)}', but worker '{command.worker_id}' belongs to job '{job}'.",
            hint="Leave it out, or register the worker with that job.",
        )


def _check_present(command: ReconcileCheckpoints, job: JobId) -> None:
    _check_job(command, job)
    checks.between("number of checkpoints", len(command.present), 0, PRESENT_LIMIT)
    for checkpoint_id in command.present:
        checks.name("present", checkpoint_id)


def _check(command: NotifyCheckpoint, job: JobId) -> None:
    checks.name("checkpoint_id", command.checkpoint_id)
    _check_job(command, job)
    if command.saved_generation is not None:
        checks.between("saved_generation", command.saved_generation, 0, checks.SAMPLES_LIMIT)
    checks.text("succeeded_by", command.succeeded_by, limit=checks.NAME_LIMIT)
    checks.between("step", command.step, 0, checks.SAMPLES_LIMIT)
    checks.between("epoch", command.epoch, 0, checks.SAMPLES_LIMIT)
    checks.between("size_bytes", command.size_bytes, 0, checks.SAMPLES_LIMIT)
    checks.between("duration_s", command.duration_s, 0.0, 30 * 86_400.0)
    checks.text("path", command.path)
    checks.text("digest", command.digest, limit=checks.NAME_LIMIT)
    checks.text("parent_id", command.parent_id, limit=checks.NAME_LIMIT)
    checks.text("reason", command.reason)
    checks.pairs("metadata", command.metadata)
    checks.between("number of tiers", len(command.tiers), 0, 16)
    for tier in command.tiers:
        checks.name("tiers", tier, limit=32)
    if command.status == "completed" and not command.path:
        raise InvalidArgument("path", "must not be empty.", hint="Pass the path or URL of the checkpoint.")
    checks.text("data_json", command.data_json, limit=DATA_LIMIT_BYTES)
    if command.data_json:
        try:
            _check_positions(data_commit(command.data_json))
        except (ValueError, RecursionError, LedgerError) as error:
            raise InvalidArgument(
                "data_json", f"is not a data record: {error}", hint="Send the manifest's 'data' record."
            ) from None


def _check_positions(data: DataCommit) -> None:
    for epoch in data.epochs:
        if max(epoch.last, epoch.total) > checks.SAMPLES_LIMIT:
            raise ValueError(
                f"epoch {epoch.epoch} of {shorten(epoch.dataset)!r} has an impossible number or total"
            )
        runs = [run for rank in epoch.ranks.values() for run in rank]
        ends = [run.start + (run.count - 1) * run.stride + run.length for run in runs]
        known = (epoch.before.covered, epoch.before.repeated, epoch.dropped)
        ends += [int(covered.bounds[-1, 1]) for covered in known if covered]
        if max(ends, default=0) > epoch.total:
            raise ValueError(
                f"a position lies beyond the {epoch.total:,} samples of {shorten(epoch.dataset)!r}"
            )


@functools.lru_cache(maxsize=16)
def data_commit(data_json: str) -> DataCommit:
    """The data position that a checkpoint committed with its weights. A notice is checked, and then applied: the same text twice."""
    return DataCommit.from_json(json.loads(data_json))
