"""The registry of checkpoints: an index over manifests, from `in_progress` to `completed` or `failed`.

A completed checkpoint is final: a repeated notice of it is accepted, a different one under the same id is a
conflict. Removal by retention takes it out of what a recovery may use but leaves its data position in the
history, because the proof that every sample was trained exactly once needs the whole chain.
Pure. Bytes live elsewhere; what stands here can be rebuilt from the manifests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata.core import checks
from strata.core.ledger import DataCommit, LedgerError
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
    Unknown,
    WorkerId,
)

DATA_LIMIT_BYTES = 1 << 20

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
    metadata: Mapping[str, str] | None = None


class Checkpoints:
    def __init__(self, *, records_kept: int = 100_000) -> None:
        self.records_kept = records_kept
        self.records: dict[CheckpointId, CheckpointRecord] = {}
        self._latest: dict[JobId, CheckpointId] = {}

    # --- questions ------------------------------------------------------------------------------------------

    def latest(self, job: JobId) -> CheckpointRecord | None:
        """The newest completed checkpoint of a job: the one that completed last, whatever its step."""
        checkpoint_id = self._latest.get(job)
        return self.records[checkpoint_id] if checkpoint_id is not None else None

    def shown(self) -> list[CheckpointRecord]:
        """Newest first, without those that retention removed."""
        return [r for r in reversed(self.records.values()) if not r.removed]

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_notice(self, command: NotifyCheckpoint, job: JobId, now: Instant) -> CheckpointEvent | None:
        """The fact this notice adds, or None when it is known already."""
        _check(command)
        known = self.records.get(command.checkpoint_id)
        if known is not None and known.job_id != job:
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' belongs to job '{known.job_id}'.",
                hint="Use an id of its own for every checkpoint.",
            )
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
                    self._must_agree(known, command)
                    return None
                return CheckpointStarted(
                    checkpoint_id=command.checkpoint_id,
                    job_id=job,
                    worker_id=command.worker_id,
                    step=command.step,
                    epoch=command.epoch,
                    path=command.path,
                    size_bytes=command.size_bytes,
                    reason=f"'{command.worker_id}' saves step {command.step}",
                    at_s=now.wall_s,
                )
            case "failed":
                if known is not None and known.status == "failed":
                    return None
                if known is not None and known.status == "completed":
                    raise Conflict(
                        f"Checkpoint '{command.checkpoint_id}' is completed and cannot fail any more.",
                        hint="Use a new id for a new attempt.",
                    )
                return CheckpointFailed(
                    checkpoint_id=command.checkpoint_id,
                    job_id=job,
                    worker_id=command.worker_id,
                    step=command.step,
                    epoch=command.epoch,
                    path=command.path,
                    reason=command.reason or "the writer gave no reason",
                    at_s=now.wall_s,
                )
            case "completed":
                return self._decide_completed(command, job, known, now)

    def _decide_completed(
        self, command: NotifyCheckpoint, job: JobId, known: CheckpointRecord | None, now: Instant
    ) -> CheckpointCompleted | None:
        if known is not None:
            self._must_agree(known, command)
        new_tiers = set(command.tiers) - set(known.tiers if known is not None else ())
        if known is not None and known.status == "completed":
            if known.digest != command.digest or known.size_bytes != command.size_bytes:
                raise Conflict(
                    f"Checkpoint '{command.checkpoint_id}' is completed with other contents "
                    f"({known.size_bytes:,} bytes, digest '{known.digest}').",
                    hint="A completed checkpoint never changes. Use a new id.",
                )
            if not new_tiers:
                return None
        tiers = (*(known.tiers if known is not None else ()), *sorted(new_tiers))
        duration_s = command.duration_s
        if not duration_s and known is not None:
            duration_s = max(0.0, now.wall_s - known.created_at_s)
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
            reason=f"durable in {', '.join(tiers) or 'storage'}",
            at_s=now.wall_s,
        )

    def _must_agree(self, known: CheckpointRecord, command: NotifyCheckpoint) -> None:
        if (known.step, known.epoch) != (command.step, command.epoch):
            raise Conflict(
                f"Checkpoint '{command.checkpoint_id}' is of step {known.step}, epoch {known.epoch}, "
                f"not of step {command.step}, epoch {command.epoch}.",
                hint="Use an id of its own for every step.",
            )

    # --- facts ----------------------------------------------------------------------------------------------

    def apply(self, event: CheckpointEvent) -> None:
        known = self.records.get(event.checkpoint_id)
        match event:
            case CheckpointStarted():
                self.records[event.checkpoint_id] = CheckpointRecord(
                    checkpoint_id=event.checkpoint_id,
                    job_id=event.job_id,
                    worker_id=event.worker_id,
                    step=event.step,
                    epoch=event.epoch,
                    path=event.path,
                    size_bytes=event.size_bytes,
                    status="in_progress",
                    created_at_s=event.at_s,
                )
            case CheckpointCompleted():
                self.records[event.checkpoint_id] = CheckpointRecord(
                    checkpoint_id=event.checkpoint_id,
                    job_id=event.job_id,
                    worker_id=event.worker_id,
                    step=event.step,
                    epoch=event.epoch,
                    path=event.path,
                    size_bytes=event.size_bytes,
                    status="completed",
                    created_at_s=known.created_at_s if known is not None else event.at_s,
                    ended_at_s=event.at_s,
                    tiers=event.tiers,
                    digest=event.digest,
                    duration_s=event.duration_s,
                    parent_id=event.parent_id,
                    data_json=event.data_json,
                    reason=event.reason,
                    metadata=event.metadata,
                )
                if known is None or known.status != "completed":  # Another tier does not make it newer.
                    self._latest[event.job_id] = event.checkpoint_id
            case CheckpointFailed():
                self.records[event.checkpoint_id] = CheckpointRecord(
                    checkpoint_id=event.checkpoint_id,
                    job_id=event.job_id,
                    worker_id=event.worker_id,
                    step=event.step,
                    epoch=event.epoch,
                    path=event.path,
                    size_bytes=known.size_bytes if known is not None else 0,
                    status="failed",
                    created_at_s=known.created_at_s if known is not None else event.at_s,
                    ended_at_s=event.at_s,
                    reason=event.reason,
                )
            case CheckpointRemoved():
                assert known is not None
                self.records[event.checkpoint_id] = replace(known, removed=True, reason=event.reason)
                if self._latest.get(known.job_id) == event.checkpoint_id:
                    self._find_latest(known.job_id)
        while len(self.records) > self.records_kept:
            oldest = next(iter(self.records))
            if oldest in self._latest.values():
                break
            del self.records[oldest]

    def _find_latest(self, job: JobId) -> None:
        self._latest.pop(job, None)
        completed = [
            r for r in self.records.values() if r.job_id == job and r.status == "completed" and not r.removed
        ]
        if completed:
            self._latest[job] = max(completed, key=lambda r: r.ended_at_s or 0.0).checkpoint_id

    def compact(self) -> list[Event]:
        events: list[Event] = []
        for r in self.records.values():
            started = CheckpointStarted(
                checkpoint_id=r.checkpoint_id,
                job_id=r.job_id,
                worker_id=r.worker_id,
                step=r.step,
                epoch=r.epoch,
                path=r.path,
                size_bytes=r.size_bytes,
                reason=r.reason,
                at_s=r.created_at_s,
            )
            events.append(started)
            ended_at_s = r.ended_at_s if r.ended_at_s is not None else r.created_at_s
            if r.status == "completed":
                events.append(
                    CheckpointCompleted(
                        checkpoint_id=r.checkpoint_id,
                        job_id=r.job_id,
                        worker_id=r.worker_id,
                        step=r.step,
                        epoch=r.epoch,
                        path=r.path,
                        size_bytes=r.size_bytes,
                        tiers=r.tiers,
                        digest=r.digest,
                        duration_s=r.duration_s,
                        parent_id=r.parent_id,
                        data_json=r.data_json,
                        metadata=r.metadata or {},
                        reason=r.reason,
                        at_s=ended_at_s,
                    )
                )
            elif r.status == "failed":
                events.append(
                    CheckpointFailed(
                        checkpoint_id=r.checkpoint_id,
                        job_id=r.job_id,
                        worker_id=r.worker_id,
                        step=r.step,
                        epoch=r.epoch,
                        path=r.path,
                        reason=r.reason,
                        at_s=ended_at_s,
                    )
                )
            if r.removed:
                events.append(
                    CheckpointRemoved(checkpoint_id=r.checkpoint_id, reason=r.reason, at_s=ended_at_s)
                )
        return events


def _check(command: NotifyCheckpoint) -> None:
    checks.name("checkpoint_id", command.checkpoint_id)
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
        raise InvalidArgument("path", "must not be empty.", hint="Say where the checkpoint can be read.")
    checks.text("data_json", command.data_json, limit=DATA_LIMIT_BYTES)
    if command.data_json:
        try:
            data_commit(command.data_json)
        except (ValueError, RecursionError, LedgerError) as error:
            raise InvalidArgument(
                "data_json", f"is not a data record: {error}", hint="Send the manifest's 'data' record."
            ) from None


def data_commit(data_json: str) -> DataCommit:
    """The data position that a checkpoint committed with its weights."""
    return DataCommit.from_json(json.loads(data_json))
