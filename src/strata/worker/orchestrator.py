"""`TrainingOrchestrator`: how a training process takes part in the fleet.

Synchronous first; every call that waits has an `_async` twin for those who await. Heartbeats run in the
background from `register_worker` on, whatever the caller does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from strata.core.faults.failures import Failure
from strata.core.messages import JobId, ReportFailure
from strata.core.types import WORKER_STATES
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc.tls import channel_credentials
from strata.rpc.wire import STATUS_NUMBERS, failure_report
from strata.worker.address import coordinator_address, is_secure
from strata.worker.errors import CoordinatorUnavailable, NotRegistered, SessionClosed
from strata.worker.outbox import MetricOutbox, ShippingHandler
from strata.worker.session import SessionThread, Topology
from strata.worker.values import (
    BarrierResult,
    CheckpointRecord,
    ShardAssignment,
    WorkerConfig,
    checkpoint_record,
    dataset_request,
    message,
    non_negative,
    one_of,
    shard_assignment,
)

T = TypeVar("T")

LONGEST_WAIT_S = 7 * 86_400.0
RECONCILE_ATTEMPTS = 20  # Each fails only if another checkpoint was reported between two calls.

CheckpointState = Literal["in_progress", "completed", "failed", "removed"]


class CheckpointFacts(TypedDict, total=False):
    """What `notify_checkpoint` takes besides id, step and epoch."""

    path: str
    size_bytes: int
    status: CheckpointState
    tiers: Sequence[str]
    digest: str
    duration_s: float
    parent_id: str
    data: Mapping[str, Any] | None
    reason: str
    metadata: Mapping[str, str] | None
    generation: int
    run_id: str
    run_generation: int
    saved_generation: int | None
    succeeded_by: str


class TrainingOrchestrator:
    """A worker's link to its coordinator. Use it as a context manager, or call `close`.

    `coordinator_url` is 'http://host:50051' or 'host:50051'; without it COORDINATOR_ADDR or COORDINATOR_URL are
    read. 'https://' or STRATA_TLS_CA asks for TLS. `ship_logs` sends this process's `logging` records to the coordinator as well.
    """

    def __init__(
        self,
        coordinator_url: str | None = None,
        *,
        job_id: str = "",
        timeout_s: float = 30.0,
        ship_logs: bool = False,
        on_topology: Callable[[Topology], None] | None = None,
        on_stale: Callable[[str], None] | None = None,
    ) -> None:
        self.job_id = job_id or os.environ.get("STRATA_JOB_ID", "")
        self._session = SessionThread(
            coordinator_address(coordinator_url),
            token=os.environ.get("STRATA_TOKEN", ""),
            credentials=channel_credentials(secure=is_secure(coordinator_url)),
            call_timeout_s=timeout_s,
        )
        if on_topology is not None:
            self._session.on_topology = on_topology
        if on_stale is not None:
            self._session.on_stale = on_stale
        self._ship_logs = ship_logs
        self._handler: ShippingHandler | None = None

    # --- membership -----------------------------------------------------------------------------------------

    def register_worker(
        self,
        worker_id: str | None = None,
        hostname: str | None = None,
        port: int = 0,
        gpu_count: int = 0,
        memory_bytes: int = 0,
        metadata: Mapping[str, str] | None = None,
        *,
        run_id: str = "",
        run_generation: int = 0,
    ) -> WorkerConfig:
        """Join the fleet. The same id again is a new incarnation, and the old one is fenced. Without an id it is
        `WORKER_ID`.

        With a `run_id`, the job's name belongs to that run while it is live: a worker of another one is refused, and so
        is one of an earlier generation of the run.
        """
        return self._wait(
            self._register(
                worker_id, hostname, port, gpu_count, memory_bytes, metadata or {}, run_id, run_generation
            )
        )

    async def register_worker_async(
        self,
        worker_id: str | None = None,
        hostname: str | None = None,
        port: int = 0,
        gpu_count: int = 0,
        memory_bytes: int = 0,
        metadata: Mapping[str, str] | None = None,
        *,
        run_id: str = "",
        run_generation: int = 0,
    ) -> WorkerConfig:
        return await self._await(
            self._register(
                worker_id, hostname, port, gpu_count, memory_bytes, metadata or {}, run_id, run_generation
            )
        )

    async def _register(
        self,
        worker_id: str | None,
        hostname: str | None,
        port: int,
        gpu_count: int,
        memory_bytes: int,
        metadata: Mapping[str, str],
        run_id: str,
        run_generation: int,
    ) -> WorkerConfig:
        request = message(
            pb.RegisterWorkerRequest,
            worker_id=os.environ.get("WORKER_ID", "") if worker_id is None else worker_id,
            hostname=hostname if hostname is not None else socket.gethostname(),
            port=port,
            gpu_count=gpu_count,
            memory_bytes=memory_bytes,
            metadata=dict(metadata),
            job_id=self.job_id,
            run_id=run_id,
            run_generation=run_generation,
        )
        answer = await self._session.register(request)
        self._install_log_shipping()
        return WorkerConfig(
            worker_id=answer.assigned_id,
            rank=answer.rank,
            world_size=answer.world_size,
            incarnation=answer.incarnation,
            generation=answer.generation,
            heartbeat_interval_s=answer.heartbeat_interval_ms / 1000,
            config=dict(answer.config),
        )

    def heartbeat(
        self,
        current_step: int | None = None,
        current_epoch: int | None = None,
        *,
        state: str | None = None,
        task: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Report the position of training. Returns at once: the next heartbeat carries it, if this worker is registered, and then
        the answer is True."""
        status = pb.WorkerStatus()
        status.CopyFrom(self._session.status)
        if current_step is not None:
            status.current_step = non_negative("current_step", current_step)
        if current_epoch is not None:
            status.current_epoch = non_negative("current_epoch", current_epoch)
        if state is not None:
            status.state = one_of("state", state, WORKER_STATES)
        if task is not None:
            status.current_task = task
        if metrics is not None:
            status.metrics.update(metrics)
        self._session.status = status
        self._session.must_be_current()
        return self.is_current

    @property
    def topology(self) -> Topology:
        """Rank, world size and generation, as last reported by the coordinator."""
        if self._session.topology is None:
            raise NotRegistered
        return self._session.topology

    @property
    def worker_id(self) -> str:
        """As the coordinator knows this worker; empty before `register_worker`."""
        return self._session.registration.assigned_id if self._session.registration is not None else ""

    @property
    def is_current(self) -> bool:
        """Whether a worker is registered, and its incarnation is still current as far as known."""
        return self._session.registration is not None and not self._session.stale_reason

    @property
    def stale_cause(self) -> str:
        """Why this worker's incarnation is over, in a word (see `StaleWorker`)."""
        return self._session.stale_cause

    @property
    def connected(self) -> bool:
        return self._session.connected.is_set()

    def wait_connected(self, timeout_s: float = 30.0) -> bool:
        return self._session.connected.wait(timeout_s)

    def flush_logs(self) -> None:
        """Wait briefly for recent log lines to be sent, before the process exits."""
        self._wait(self._session.flush_logs())

    def send_metrics(self, outbox: MetricOutbox) -> None:
        """From now on, send what is put there to the coordinator."""
        self._session.metrics = outbox

    def flush_metrics(self, timeout_s: float) -> None:
        """Wait until the coordinator has what was logged, for at most this long; not at all if it is unreachable."""
        self._wait(self._session.flush_metrics(timeout_s))

    def deregister(self, reason: str = "") -> None:
        """Leave the fleet; its shards go to the other workers at once."""
        self._wait(self._session.deregister(reason))

    async def deregister_async(self, reason: str = "") -> None:
        await self._await(self._session.deregister(reason))

    # --- data -----------------------------------------------------------------------------------------------

    def register_dataset(
        self,
        dataset_id: str,
        path: str,
        format: str,
        total_samples: int | None = None,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Register a dataset with the coordinator; returns its number of shards."""
        return self._wait(
            self._register_dataset(
                dataset_request(
                    dataset_id, path, format, total_samples, shard_size, shuffle, seed, metadata or {}
                )
            )
        )

    async def register_dataset_async(
        self,
        dataset_id: str,
        path: str,
        format: str,
        total_samples: int | None = None,
        shard_size: int = 10_000,
        shuffle: bool = False,
        seed: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        return await self._await(
            self._register_dataset(
                dataset_request(
                    dataset_id, path, format, total_samples, shard_size, shuffle, seed, metadata or {}
                )
            )
        )

    async def _register_dataset(self, request: pb.RegisterDatasetRequest) -> int:
        answer: pb.RegisterDatasetResponse = await self._session.call("RegisterDataset", request)
        return answer.total_shards

    def get_shards(
        self, dataset_id: str, epoch: int = 0, *, worker_rank: int | None = None, worker_id: str = ""
    ) -> list[ShardAssignment]:
        """Every shard assigned to this worker in `epoch`, or to the worker of the given rank or id; for these, this process need not
        be registered."""
        return self._wait(self._get_shards(dataset_id, epoch, worker_rank, worker_id))

    async def get_shards_async(
        self, dataset_id: str, epoch: int = 0, *, worker_rank: int | None = None, worker_id: str = ""
    ) -> list[ShardAssignment]:
        return await self._await(self._get_shards(dataset_id, epoch, worker_rank, worker_id))

    async def _get_shards(
        self, dataset_id: str, epoch: int, worker_rank: int | None, worker_id: str
    ) -> list[ShardAssignment]:
        me = self._session.registration
        if me is None and worker_rank is None and not worker_id:
            raise NotRegistered
        request = message(
            pb.GetDataShardRequest,
            worker_id=me.assigned_id if me is not None else "",
            dataset_id=dataset_id,
            epoch=epoch,
            incarnation=me.incarnation if me is not None else 0,
            worker_rank=worker_rank,
            of_worker_id=worker_id,
            job_id=self.job_id,
        )
        answer: pb.GetDataShardResponse = await self._session.call("GetDataShard", request)
        if worker_id and answer.worker_id != worker_id:
            raise StrataError(
                "The coordinator is of an earlier version, which does not give out other workers' shards by id.",
                hint="Ask by rank: get_shard(dataset_id, worker_rank=…); or upgrade the coordinator.",
            )
        return [shard_assignment(shard) for shard in answer.shards]

    def report_progress(self, dataset_id: str, epoch: int, shard_id: int, samples_done: int) -> None:
        """Report how far a shard is read. Shown at once, counted when a checkpoint commits it. Never blocks."""
        self._session.report_progress(
            dataset_id,
            non_negative("epoch", epoch),
            non_negative("shard_id", shard_id),
            non_negative("samples_done", samples_done),
        )

    # --- barriers -------------------------------------------------------------------------------------------

    def barrier(
        self,
        barrier_id: str,
        step: int = 0,
        *,
        participants: int | None = None,
        timeout_s: float | None = None,
    ) -> BarrierResult:
        """Wait until `participants` workers (by default all members) have arrived.

        Raises `BarrierBroken`, which names the missing workers, when one of them is lost or the time-out expires.
        """
        return self._wait(self._barrier(barrier_id, step, participants, timeout_s))

    async def barrier_async(
        self,
        barrier_id: str,
        step: int = 0,
        *,
        participants: int | None = None,
        timeout_s: float | None = None,
    ) -> BarrierResult:
        return await self._await(self._barrier(barrier_id, step, participants, timeout_s))

    async def _barrier(
        self, barrier_id: str, step: int, participants: int | None, timeout_s: float | None
    ) -> BarrierResult:
        self._me()
        if timeout_s is not None and not 0 < timeout_s <= LONGEST_WAIT_S:
            raise ValueError(f"timeout_s must be more than 0 and at most a week, got {timeout_s}")
        request = message(
            pb.WaitBarrierRequest,
            barrier_id=barrier_id,
            step=step,
            expected_participants=participants or 0,
            timeout_ms=max(1, int(timeout_s * 1000)) if timeout_s is not None else 0,
        )
        answer = await self._session.wait_barrier(request)
        return BarrierResult(
            participants=answer.participants,
            arrival_order=answer.arrival_order,
            generation=answer.generation,
        )

    # --- checkpoints ----------------------------------------------------------------------------------------

    def notify_checkpoint(
        self,
        checkpoint_id: str,
        step: int,
        epoch: int = 0,
        path: str = "",
        size_bytes: int = 0,
        *,
        status: CheckpointState = "completed",
        tiers: Sequence[str] = (),
        digest: str = "",
        duration_s: float = 0.0,
        parent_id: str = "",
        data: Mapping[str, Any] | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        generation: int = 0,
        run_id: str = "",
        run_generation: int = 0,
        saved_generation: int | None = None,
        succeeded_by: str = "",
    ) -> None:
        """Report the outcome of a checkpoint to the coordinator; returns once that is durable there.

        `generation` fences: a notice from a generation of the coordinator's members that is over is refused. So is one
        of an earlier `run_generation` of the run than the newest the coordinator knows. `saved_generation` and
        `succeeded_by` are for a checkpoint that is reported late, from its manifest: which generation of the run saved
        it, and which newer one there is.
        """
        me = self._me()
        one_of("status", status, STATUS_NUMBERS)
        request = message(
            pb.NotifyCheckpointRequest,
            worker_id=me.assigned_id,
            incarnation=me.incarnation,
            checkpoint_id=checkpoint_id,
            step=step,
            epoch=epoch,
            path=path,
            size_bytes=size_bytes,
            status=STATUS_NUMBERS[status],
            tiers=list(tiers),
            digest=digest,
            duration_s=duration_s,
            parent_id=parent_id,
            data_json=json.dumps(data) if data is not None else "",
            reason=reason,
            metadata=dict(metadata or {}),
            generation=generation,
            run_id=run_id,
            run_generation=run_generation,
            saved_generation=saved_generation,
            succeeded_by=succeeded_by,
        )
        self._wait(self._session.call("NotifyCheckpoint", request))

    def reconcile_checkpoints(
        self, present: Sequence[str], *, run_id: str = "", run_generation: int = 0
    ) -> tuple[str, ...]:
        """Report to the coordinator which checkpoints of a run exist: completed ones that are not among them become removed.
        Returns those that it does not know yet; report them with `notify_checkpoint`."""
        me = self._me()
        request = message(
            pb.ReconcileCheckpointsRequest,
            worker_id=me.assigned_id,
            incarnation=me.incarnation,
            run_id=run_id,
            run_generation=run_generation,
            present=list(present),
        )
        for _ in range(RECONCILE_ATTEMPTS):
            answer = self._wait(self._session.call("ReconcileCheckpoints", request))
            if answer.made:
                return tuple(answer.unknown)
            request.revision = answer.revision
        why = "its list of checkpoints changes faster than it can be reconciled"
        raise CoordinatorUnavailable(self._session.address, why)

    async def notify_checkpoint_async(
        self, checkpoint_id: str, step: int, epoch: int = 0, **facts: Unpack[CheckpointFacts]
    ) -> None:
        """`notify_checkpoint` for those who await; takes the same arguments."""
        await asyncio.to_thread(self.notify_checkpoint, checkpoint_id, step, epoch, **facts)

    def latest_checkpoint(self) -> CheckpointRecord | None:
        """The checkpoint a recovery should use, or None when the job has none."""
        return self._wait(self._latest_checkpoint())

    latest = latest_checkpoint

    async def latest_checkpoint_async(self) -> CheckpointRecord | None:
        return await self._await(self._latest_checkpoint())

    async def _latest_checkpoint(self) -> CheckpointRecord | None:
        me = self._me()
        request = pb.GetLatestCheckpointRequest(worker_id=me.assigned_id)
        answer: pb.RecoveryResponse = await self._session.call("GetLatestCheckpoint", request)
        return checkpoint_record(answer) if answer.has_checkpoint else None

    def report_recovery(
        self,
        phases_s: Mapping[str, float],
        *,
        resumed_step: int,
        lost_steps: int,
        tier: str,
        world_before: int,
        world_after: int,
        reason: str,
        survived: int = 0,
        lost: Sequence[str] = (),
        joined: Sequence[str] = (),
        cause: str = "",
        hosts: Sequence[str] = (),
    ) -> None:
        """Report the duration of a recovery, by phase; where processes have survived it, how many, which workers were lost and
        which are new, and why; and the machines that the run continued on."""
        me = self._me()
        request = message(
            pb.ReportRecoveryRequest,
            worker_id=me.assigned_id,
            incarnation=me.incarnation,
            phases_s=dict(phases_s),
            resumed_step=resumed_step,
            lost_steps=lost_steps,
            tier=tier,
            world_before=world_before,
            world_after=world_after,
            reason=reason,
            survived=survived,
            lost=list(lost),
            joined=list(joined),
            cause=cause,
            hosts=list(hosts),
        )
        self._wait(self._session.call("ReportRecovery", request))

    def report_failure(self, failure: Failure) -> None:
        """Report a problem of a worker that keeps running: it is an incident until the job completes steps again."""
        me = JobId(self.job_id) if self.job_id else None
        report = ReportFailure(failures=(failure,), launch="", job_id=me, decision="continue", reason="")
        self._wait(self._session.call("ReportFailure", failure_report(report)))

    # --- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the background thread. Without `deregister` the coordinator sees a lost connection."""
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler = None
        self._session.close()

    def __enter__(self) -> TrainingOrchestrator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.deregister()
        finally:
            self.close()

    # --- inside ---------------------------------------------------------------------------------------------

    def _me(self) -> pb.RegisterWorkerResponse:
        if self._session.registration is None:
            raise NotRegistered
        return self._session.registration

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._session.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except CancelledError:
            raise SessionClosed(self._session.address) from None

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._session.submit(work))

    def _install_log_shipping(self) -> None:
        if self._ship_logs and self._handler is None:
            self._handler = ShippingHandler(self._session.logs, level=logging.INFO)
            logging.getLogger().addHandler(self._handler)
