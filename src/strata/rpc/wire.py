"""The one place that translates between protobuf messages and the core's vocabulary.

Decoding checks only what the wire can get wrong (types are protobuf's job); what a value may be is decided by
the core. Nothing here keeps state or talks to anyone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal

import numpy as np

from strata.core.faults.failures import Failure, WorkerError
from strata.core.fleet.checkpoints import CheckpointRecord
from strata.core.fleet.datasets import SHARDS_PER_PROGRESS, Shard
from strata.core.messages import (
    DEFAULT_JOB,
    ArriveAtBarrier,
    ArriveTogether,
    BarrierBroken,
    BarrierReleased,
    CheckpointId,
    DatasetId,
    DatasetSpec,
    DeregisterWorker,
    FileSpan,
    FoldedBeat,
    Gpu,
    Heartbeat,
    InvalidArgument,
    JobId,
    NotifyCheckpoint,
    ProgressReported,
    ReconcileCheckpoints,
    Refused,
    RegisterWorker,
    Report,
    ReportFailure,
    ReportHandover,
    ReportHealth,
    ReportRecovery,
    Resources,
    ShardProgress,
    WorkerId,
    WorkerSpec,
)
from strata.core.telemetry.branches import Start
from strata.core.telemetry.run_details import unpacked
from strata.core.telemetry.run_metrics import MetricBatch, MetricRows, checked
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb

DEFAULT_SHARD_SIZE = 10_000

NoticeStatus = Literal["in_progress", "completed", "failed", "removed"]
STATUS_NAMES: dict[int, NoticeStatus] = {
    pb.CHECKPOINT_STATUS_UNSPECIFIED: "completed",
    pb.CHECKPOINT_STATUS_IN_PROGRESS: "in_progress",
    pb.CHECKPOINT_STATUS_COMPLETED: "completed",
    pb.CHECKPOINT_STATUS_FAILED: "failed",
    pb.CHECKPOINT_STATUS_REMOVED: "removed",
}
STATUS_NUMBERS = {name: number for number, name in STATUS_NAMES.items() if number}


# --- from the wire --------------------------------------------------------------------------------------------


def register_worker(m: pb.RegisterWorkerRequest) -> RegisterWorker:
    spec = WorkerSpec(
        worker_id=WorkerId(m.worker_id),
        job_id=JobId(m.job_id or DEFAULT_JOB),
        hostname=m.hostname,
        port=m.port,
        gpu_count=m.gpu_count,
        memory_bytes=m.memory_bytes,
        metadata=dict(m.metadata),
        run_id=m.run_id,
        run_generation=m.run_generation,
    )
    return RegisterWorker(spec=spec, registration_id=m.registration_id[:32].hex())


def deregister_worker(m: pb.DeregisterWorkerRequest) -> DeregisterWorker:
    return DeregisterWorker(worker_id=WorkerId(m.worker_id), incarnation=m.incarnation, reason=m.reason)


def heartbeat(m: pb.HeartbeatRequest) -> Heartbeat:
    return Heartbeat(worker_id=WorkerId(m.worker_id), incarnation=m.incarnation, report=report(m))


def folded_beat(worker_id: WorkerId, incarnation: int, m: pb.Report | None) -> FoldedBeat:
    return FoldedBeat(worker_id, incarnation, partial(report, m) if m is not None else None)


def report(m: pb.HeartbeatRequest | pb.Report) -> Report:
    status = m.status
    return Report(
        state=status.state,
        step=status.current_step,
        epoch=status.current_epoch,
        task=status.current_task,
        resources=resources(m.resources) if m.HasField("resources") else None,
        metrics=dict(status.metrics),
    )


def progress(m: pb.Progress, worker_id: WorkerId, incarnation: int) -> ProgressReported:
    # One more than is allowed is enough to be refused: a flood is not decoded first.
    shards = m.shards[: SHARDS_PER_PROGRESS + 1]
    return ProgressReported(
        worker_id=worker_id,
        incarnation=incarnation,
        generation=m.generation,
        shards=tuple(
            ShardProgress(DatasetId(s.dataset_id), int(s.epoch), int(s.shard_id), int(s.samples_done))
            for s in shards
        ),
    )


def metric_batch(m: pb.MetricBatch) -> MetricBatch:
    start = Start(generation=m.generation, started_ms=m.started_ms, resumed_step=m.resumed_step)
    rows = tuple(metric_rows(each) for each in m.rows)
    return checked(
        MetricBatch(number=m.number, start=start, rows=rows, dropped=m.dropped, details=unpacked(m.details))
    )


def metric_rows(m: pb.MetricRows) -> MetricRows:
    if len(m.times) != len(m.steps) or len(m.values) != 8 * len(m.steps) * len(m.names):
        raise InvalidArgument(
            "rows", "has columns of different lengths.", hint="Send a time and every value for each step."
        )
    return MetricRows(
        names=tuple(m.names),
        steps=np.array(m.steps, np.int64),
        times=np.array(m.times, np.float64),
        values=np.frombuffer(m.values, "<f8").reshape(len(m.steps), len(m.names)),
    )


def resources(m: pb.ResourceUsage) -> Resources:
    gpus = tuple(
        Gpu(
            index=g.index,
            utilization_percent=g.utilization_percent,
            memory_used_bytes=g.memory_used_bytes,
            memory_total_bytes=g.memory_total_bytes,
        )
        for g in m.gpu_usage[:64]
    )
    return Resources(
        cpu_percent=m.cpu_percent,
        memory_used_bytes=m.memory_used_bytes,
        gpus=gpus,
        disk_read_bytes=m.disk_read_bytes,
        disk_write_bytes=m.disk_write_bytes,
        network_rx_bytes=m.network_rx_bytes,
        network_tx_bytes=m.network_tx_bytes,
    )


def dataset_spec(
    m: pb.RegisterDatasetRequest, files: tuple[FileSpan, ...], total: int, *, job: JobId | None = None
) -> DatasetSpec:
    """`job`: the only one that has it; none: everybody does."""
    return DatasetSpec(
        dataset_id=DatasetId(m.dataset_id),
        path=m.path,
        format=m.format,
        total_samples=total,
        shard_size=m.shard_size or DEFAULT_SHARD_SIZE,
        shuffle=m.shuffle,
        seed=m.seed,
        metadata=dict(m.metadata),
        files=files,
        jobs=(job,) if job is not None else (),
    )


def arrive(m: pb.WaitBarrierRequest) -> ArriveAtBarrier:
    return ArriveAtBarrier(
        worker_id=WorkerId(m.worker_id),
        incarnation=m.incarnation,
        generation=m.generation,
        barrier_id=m.barrier_id,
        step=m.step,
        expected=m.expected_participants,
        call_id=m.call_id[:32].hex(),
        timeout_s=m.timeout_ms / 1000,
    )


def arrive_together(
    m: pb.WaitBarrierRequest, callers: Iterable[tuple[WorkerId, int, bytes]]
) -> ArriveTogether:
    """Of each: the worker, its incarnation, and its call."""
    generation, barrier_id, step = m.generation, m.barrier_id, m.step
    expected, timeout_s = m.expected_participants, m.timeout_ms / 1000
    return ArriveTogether(
        arrivals=tuple(
            ArriveAtBarrier(
                worker_id=worker_id,
                incarnation=incarnation,
                generation=generation,
                barrier_id=barrier_id,
                step=step,
                expected=expected,
                call_id=call_id[:32].hex(),
                timeout_s=timeout_s,
            )
            for worker_id, incarnation, call_id in callers
        )
    )


def notify_checkpoint(m: pb.NotifyCheckpointRequest) -> NotifyCheckpoint:
    return NotifyCheckpoint(
        worker_id=WorkerId(m.worker_id),
        incarnation=m.incarnation,
        generation=m.generation,
        job_id=JobId(m.job_id),
        checkpoint_id=CheckpointId(m.checkpoint_id),
        step=m.step,
        epoch=m.epoch,
        path=m.path,
        size_bytes=m.size_bytes,
        status=_status(m.status),
        tiers=tuple(m.tiers),
        digest=m.digest,
        duration_s=m.duration_s,
        parent_id=m.parent_id,
        data_json=m.data_json,
        reason=m.reason,
        metadata=dict(m.metadata),
        run_id=m.run_id,
        run_generation=m.run_generation,
        saved_generation=m.saved_generation if m.HasField("saved_generation") else None,
        succeeded_by=m.succeeded_by,
    )


def reconcile_checkpoints(m: pb.ReconcileCheckpointsRequest) -> ReconcileCheckpoints:
    return ReconcileCheckpoints(
        worker_id=WorkerId(m.worker_id),
        incarnation=m.incarnation,
        job_id=JobId(m.job_id),
        run_id=m.run_id,
        run_generation=m.run_generation,
        present=tuple(CheckpointId(checkpoint_id) for checkpoint_id in m.present),
        revision=m.revision,
    )


def _status(number: int) -> NoticeStatus:
    name = STATUS_NAMES.get(number)
    if name is None:
        raise InvalidArgument("status", f"{number} is not a status.", hint="Use a CheckpointStatus.")
    return name


def report_recovery(m: pb.ReportRecoveryRequest) -> ReportRecovery:
    return ReportRecovery(
        worker_id=WorkerId(m.worker_id),
        incarnation=m.incarnation,
        phases_s=dict(m.phases_s),
        resumed_step=m.resumed_step,
        lost_steps=m.lost_steps,
        tier=m.tier,
        world_before=m.world_before,
        world_after=m.world_after,
        reason=m.reason,
        survived=m.survived,
        lost=tuple(map(WorkerId, m.lost)),
        joined=tuple(map(WorkerId, m.joined)),
        cause=m.cause,
        hosts=tuple(m.hosts),
    )


def report_failure(m: pb.ReportFailureRequest, *, bound: JobId | None = None) -> ReportFailure:
    """`bound` is the only job that the caller may speak for, if there is one."""
    return ReportFailure(
        failures=tuple(_failure(each) for each in m.failures),
        launch=m.launch,
        job_id=bound or (JobId(m.job_id) if m.job_id else None),
        decision="stop" if m.stops else "restart",
        reason=m.reason,
        quarantine=m.quarantine,
    )


def report_handover(m: pb.ReportHandoverRequest, *, bound: JobId | None = None) -> ReportHandover:
    """`bound` is the only job that the caller may speak for, if there is one."""
    return ReportHandover(
        host=m.host,
        node=m.node,
        launch=m.launch,
        job_id=bound or (JobId(m.job_id) if m.job_id else None),
        saved_step=m.saved_step if m.HasField("saved_step") else None,
        lost_steps=m.lost_steps if m.HasField("lost_steps") else None,
        where=m.where,
        reason=m.reason,
    )


def report_health(m: pb.ReportHealthRequest) -> ReportHealth:
    return ReportHealth(
        host=m.host,
        kind=m.kind,
        measured=dict(m.measured),
        failed=dict(m.failed),
        clock_s=m.clock,
        seconds=m.seconds,
        reason=m.reason,
    )


def _failure(m: pb.WorkerFailure) -> Failure:
    error = m.error
    return Failure(
        rank=m.rank if m.HasField("rank") else None,
        host=m.host,
        pid=m.pid,
        gpu=m.gpu,
        at_s=m.at,
        exit_code=m.exit_code if m.HasField("exit_code") else None,
        error=WorkerError(
            type=error.type,
            message=error.message,
            where=tuple(error.where),
            step=error.step if error.HasField("step") else None,
            traceback=error.traceback,
            at_s=m.at,
        )
        if m.HasField("error")
        else None,
        oom_killed=m.oom_killed,
        device_faults=tuple(m.device_faults),
        last_lines=tuple(m.last_lines),
        replaced=m.replaced,
    )


# --- to the wire ----------------------------------------------------------------------------------------------


def dataset(spec: DatasetSpec, registered_at_s: float) -> pb.Dataset:
    return pb.Dataset(
        dataset_id=spec.dataset_id,
        path=spec.path,
        format=spec.format,
        total_samples=spec.total_samples,
        shard_size=spec.shard_size,
        total_shards=spec.shard_count,
        shuffle=spec.shuffle,
        seed=spec.seed,
        metadata=dict(spec.metadata),
        registered_at=registered_at_s,
    )


def shard(shard: Shard, spec: DatasetSpec, epoch: int, files: list[str]) -> pb.ShardAssignment:
    return pb.ShardAssignment(
        shard_id=shard.shard_id,
        start_index=shard.start,
        end_index=shard.stop,
        file_paths=files,
        samples_done=shard.done,
        dataset_id=spec.dataset_id,
        epoch=epoch,
        total_shards=spec.shard_count,
    )


def barrier_outcome(outcome: BarrierReleased | BarrierBroken, order: int) -> pb.WaitBarrierResponse:
    return pb.WaitBarrierResponse(
        released=isinstance(outcome, BarrierReleased),
        participants=len(outcome.arrived),
        arrival_order=order,
        missing=() if isinstance(outcome, BarrierReleased) else outcome.missing,
        reason=outcome.reason,
        generation=outcome.generation,
    )


def checkpoint(record: CheckpointRecord) -> pb.Checkpoint:
    return pb.Checkpoint(
        checkpoint_id=record.checkpoint_id,
        step=record.step,
        epoch=record.epoch,
        path=record.path,
        size_bytes=record.size_bytes,
        status=STATUS_NUMBERS[record.status],  # type: ignore[arg-type]
        worker_id=record.worker_id,
        created_at=record.created_at_s,
        tiers=record.tiers,
        digest=record.digest,
        metadata=dict(record.metadata or {}),
        data_json=record.data_json,
        job_id=record.job_id,
        run_id=record.run_id,
        generation=record.generation,
    )


def failure_report(command: ReportFailure) -> pb.ReportFailureRequest:
    return pb.ReportFailureRequest(
        failures=[_failure_message(failure) for failure in command.failures],
        launch=command.launch,
        job_id=command.job_id or "",
        stops=command.decision == "stop",
        reason=command.reason,
        quarantine=command.quarantine,
    )


def handover_report(command: ReportHandover) -> pb.ReportHandoverRequest:
    return pb.ReportHandoverRequest(
        host=command.host,
        node=command.node,
        launch=command.launch,
        job_id=command.job_id or "",
        saved_step=command.saved_step,
        lost_steps=command.lost_steps,
        where=command.where,
        reason=command.reason,
    )


def health_report(command: ReportHealth) -> pb.ReportHealthRequest:
    return pb.ReportHealthRequest(
        host=command.host,
        kind=command.kind,
        measured=dict(command.measured),
        failed=dict(command.failed),
        clock=command.clock_s,
        seconds=command.seconds,
        reason=command.reason,
    )


def _failure_message(failure: Failure) -> pb.WorkerFailure:
    error = failure.error
    return pb.WorkerFailure(
        rank=failure.rank,
        host=failure.host,
        pid=failure.pid,
        gpu=failure.gpu,
        at=failure.at_s,
        exit_code=failure.exit_code,
        error=pb.WorkerError(
            type=error.type,
            message=error.message,
            where=error.where,
            step=error.step,
            traceback=error.traceback,
        )
        if error is not None
        else None,
        oom_killed=failure.oom_killed,
        device_faults=failure.device_faults,
        last_lines=failure.last_lines,
        replaced=failure.replaced,
    )


def stale(refusal: StrataError) -> pb.CoordinatorMessage:
    """To a session that is over: why."""
    cause = refusal.cause if isinstance(refusal, Refused) else ""
    return pb.CoordinatorMessage(stale=pb.Stale(reason=str(refusal), cause=cause))
