"""The gRPC face: decode, hand to the engine, encode. Refusals become statuses; nothing is decided here.

Unary calls answer any gRPC client; the `Session` stream has a module of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar, cast

import grpc
import grpc.aio

from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.engine import Engine
from strata.coordinator.grpc.middleware import Context, GrpcAccess, barrier_text, own_key, refuse, unreadable
from strata.coordinator.grpc.presence import Agents
from strata.coordinator.grpc.sessions import Sessions
from strata.coordinator.grpc.streams import Streams
from strata.coordinator.grpc.waits import Outcome
from strata.coordinator.inspection.datasets import DatasetInspection
from strata.coordinator.leadership import Alone, Standing
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.instruments import CoordinatorMetrics
from strata.coordinator.metrics.run_history import RunHistory
from strata.coordinator.quotas import CallQuotas
from strata.coordinator.tasks.secrets import TaskSecrets
from strata.core import checks
from strata.core.fleet.health import why_unfit
from strata.core.fleet.membership import Member
from strata.core.messages import (
    DEFAULT_JOB,
    DatasetAccepted,
    DatasetId,
    DrainHost,
    InvalidArgument,
    JobId,
    Overloaded,
    PlanEpoch,
    Reconciled,
    RegisterDataset,
    Registered,
    ShardsRequested,
    Swapped,
    SwapValue,
    Unknown,
    WorkerId,
)
from strata.core.telemetry.run_metrics import MetricBatch
from strata.errors import StrataError
from strata.rpc import coordinator_pb2 as pb
from strata.rpc import coordinator_pb2_grpc, wire
from strata.rpc.methods import Malformed

log = logging.getLogger("strata.coordinator.grpc")

SHARDS_AT_A_TIME = 1_000
BROKEN_HINT = b"Look at the missing workers' logs; then wait at the barrier again."

FOLLOWED = frozenset({"ListDatasets", "GetLatestCheckpoint", "AdmitHost"})
"""What a standby answers too, as soon as it has applied everything that was acknowledged before it was asked. Values are not
among them: the soft ones, and the versions that a new leader gives out, are known to the leader alone."""
READS = frozenset({"ReadValue", "Heartbeat"})
"""What is answered without being written first, by the leader alone."""
AUDITED = frozenset({"RegisterWorker", "DeregisterWorker", "RegisterDataset"})
"""What is written down when it is allowed; what is refused always is."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")


def _call(
    handler: Callable[[CoordinatorService, Request, Context, Principal], Awaitable[Answer]],
) -> Callable[[CoordinatorService, Request, Context], Awaitable[Answer]]:
    """Count the call, find out who makes it, and turn refusals into statuses, the same way for every unary method."""
    name = handler.__name__

    async def call(self: CoordinatorService, request: Request, context: Context) -> Answer:
        self.metrics.request(name)
        if wait_s := self.calls.delay_s(context.peer(), time.monotonic()):
            await asyncio.sleep(wait_s)
        caller: Principal | None = None
        try:
            caller = self.access.identify(context)
            if isinstance(request, Malformed):
                raise unreadable(request)
            await (self.standing.caught_up() if name in FOLLOWED else self.standing.confirmed())
            answer = await handler(self, request, context, caller)
            if name in READS:
                await self.standing.confirmed()  # It may have slept since: what was read may be old by now.
        except StrataError as error:
            if isinstance(error, Forbidden):
                self.access.audit(context, caller, name, target=_target(request), refusal=error.message)
            await refuse(context, error)
        if name in AUDITED:
            self.access.audit(context, caller, name, target=_target(request))
        return answer

    call.__name__ = name
    return call


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        agents: Agents,
        logs: LogStore,
        metrics: CoordinatorMetrics,
        access: GrpcAccess,
        inspection: DatasetInspection,
        run_history: RunHistory | None,
        secrets: TaskSecrets,
        *,
        heartbeat_interval_s: float,
        worker_config: dict[str, str],
        on_metrics: Callable[[JobId, MetricBatch], None],
        standing: Standing | None = None,
    ) -> None:
        self.standing = standing or Alone()
        self.calls = CallQuotas()
        self.engine = engine
        self.sessions = sessions
        self.logs = logs
        self.metrics = metrics
        self.access = access
        self.inspection = inspection
        self._secrets = secrets
        self.heartbeat_interval_ms = int(heartbeat_interval_s * 1000)
        self.worker_config = worker_config
        self._streams = Streams(
            engine,
            sessions,
            logs,
            metrics,
            access,
            run_history,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            on_metrics=on_metrics,
        )
        self._agents = agents

    # --- membership -----------------------------------------------------------------------------------------

    @_call
    async def RegisterWorker(
        self, request: pb.RegisterWorkerRequest, context: Context, caller: Principal
    ) -> pb.RegisterWorkerResponse:
        job = JobId(request.job_id) or DEFAULT_JOB
        caller.require_job(job)
        known = (await self.engine.settled()).membership.members.get(WorkerId(request.worker_id))
        if known is not None:
            self._check_owner(known, caller)
        reply = cast(
            Registered, await self.engine.submit(wire.register_worker(request), client=caller.client)
        )
        membership = (await self.engine.settled()).membership
        roster = membership.roster(job)
        return pb.RegisterWorkerResponse(
            assigned_id=reply.worker_id,
            rank=roster.get(reply.worker_id, 0),
            world_size=len(roster),
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            config=self.worker_config,
            incarnation=reply.incarnation,
            generation=membership.job_generations[job],
        )

    @_call
    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context, caller: Principal
    ) -> pb.HeartbeatResponse:
        self._check_worker(request.worker_id, request.incarnation, caller)
        # It counts now, and is answered when everything that the answer shows is durable.
        try:
            self.engine.observe(wire.heartbeat(request))
            job = self.engine.cluster.membership.members[WorkerId(request.worker_id)].spec.job_id
        finally:
            membership = (await self.engine.settled()).membership
        generation = membership.job_generations[job]
        response = pb.HeartbeatResponse(
            acknowledged=True, server_timestamp_ms=time.time_ns() // 1_000_000, generation=generation
        )
        if request.generation and request.generation != generation:
            response.pending_commands.add(
                command_id=f"topology-{generation}",
                kind="topology",
                arguments={"generation": str(generation)},
            )
        return response

    @_call
    async def DeregisterWorker(
        self, request: pb.DeregisterWorkerRequest, context: Context, caller: Principal
    ) -> pb.DeregisterWorkerResponse:
        self._check_worker(request.worker_id, request.incarnation, caller)
        await self.engine.submit(wire.deregister_worker(request), client=caller.client)
        return pb.DeregisterWorkerResponse(acknowledged=True)

    # --- data -----------------------------------------------------------------------------------------------

    @_call
    async def RegisterDataset(
        self, request: pb.RegisterDatasetRequest, context: Context, caller: Principal
    ) -> pb.RegisterDatasetResponse:
        checks.identifier("dataset_id", request.dataset_id)
        total, files = await self.inspection.count(
            request.path, request.format, request.total_samples or None, caller
        )
        command = RegisterDataset(spec=wire.dataset_spec(request, files, total, job=caller.job))
        reply = cast(DatasetAccepted, await self.engine.submit(command, client=caller.client))
        return pb.RegisterDatasetResponse(
            dataset_id=reply.spec.dataset_id,
            total_shards=reply.spec.shard_count,
            created=reply.created,
            total_samples=reply.spec.total_samples,
        )

    @_call
    async def ListDatasets(
        self, request: pb.ListDatasetsRequest, context: Context, caller: Principal
    ) -> pb.ListDatasetsResponse:
        datasets = (await self.engine.settled()).datasets
        return pb.ListDatasetsResponse(
            datasets=[
                wire.dataset(spec, datasets.registered_at_s[name])
                for name, spec in datasets.specs.items()
                if caller.job is None or spec.is_for(caller.job)
            ]
        )

    @_call
    async def GetDataShard(
        self, request: pb.GetDataShardRequest, context: Context, caller: Principal
    ) -> pb.GetDataShardResponse:
        cluster = await self.engine.settled()
        members, dataset_id = cluster.membership.members, DatasetId(request.dataset_id)
        if request.worker_id:
            self._check_worker(request.worker_id, request.incarnation, caller)
            member = cluster.membership.admit(
                WorkerId(request.worker_id), incarnation=request.incarnation, generation=request.generation
            )
            job = member.spec.job_id
            reader = _reader(request, cluster.membership.roster(job))
        else:  # One that takes no part, such as a registry with a connection of its own.
            job = JobId(request.job_id) or caller.job or DEFAULT_JOB
            caller.require_job(job)
            reader = _reader(request, cluster.membership.roster(job))
            member = members[reader]
        spec = cluster.datasets.get_for(job, dataset_id)
        key = (job, dataset_id, int(request.epoch))
        if key not in cluster.datasets.plans:
            await self.engine.submit(
                PlanEpoch(
                    worker_id=member.spec.worker_id,
                    incarnation=member.incarnation,
                    generation=request.generation,
                    dataset_id=dataset_id,
                    epoch=int(request.epoch),
                ),
                client=caller.client,
            )
            cluster = await self.engine.settled()
        datasets = cluster.datasets
        entry = datasets.plans.get(key)
        if entry is None:
            raise Overloaded(
                f"The plan of epoch {request.epoch} was replaced by plans of other epochs meanwhile.",
                hint="Retry.",
            )
        plan = entry.plan
        generation = cluster.membership.job_generations[job]
        if key[:2] not in datasets.read_by_shard:
            self.engine.observe(ShardsRequested(job_id=key[0], dataset_id=dataset_id))
        shards = []
        for number, shard in enumerate(datasets.shards_of(reader, key), 1):
            shards.append(wire.shard(shard, spec, key[2], datasets.files_of(spec, shard)))
            if number % SHARDS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # A worker with a hundred thousand shards is not the only one here.
        return pb.GetDataShardResponse(
            shards=shards,
            plan_version=plan.version,
            generation=generation,
            reason=plan.reason,
            worker_id=reader,
        )

    # --- barriers -------------------------------------------------------------------------------------------

    @_call
    async def WaitBarrier(
        self, request: pb.WaitBarrierRequest, context: Context, caller: Principal
    ) -> pb.WaitBarrierResponse:
        self._check_worker(request.worker_id, request.incarnation, caller)
        ended: asyncio.Future[tuple[Outcome, int]] = asyncio.get_running_loop().create_future()

        def deliver(outcome: Outcome, order: int) -> None:
            if not ended.done():
                ended.set_result((outcome, order))

        wait = self.sessions.waits.open(WorkerId(request.worker_id), deliver)
        try:
            await self.engine.submit(wire.arrive(request), then=wait.begin)
            outcome, order = await ended
        finally:
            wait.close()
        answer = wire.barrier_outcome(outcome, order)
        if not answer.released:
            trailers = (
                ("strata-code", "barrier_broken"),
                ("strata-hint-bin", BROKEN_HINT),
                ("strata-missing-bin", "\n".join(answer.missing).encode()),
            )
            await context.abort(grpc.StatusCode.ABORTED, barrier_text(request, answer.reason), trailers)
        return answer

    # --- checkpoints ----------------------------------------------------------------------------------------

    @_call
    async def NotifyCheckpoint(
        self, request: pb.NotifyCheckpointRequest, context: Context, caller: Principal
    ) -> pb.CheckpointAck:
        command = wire.notify_checkpoint(request)
        if not command.is_by_agent:
            self._check_worker(request.worker_id, request.incarnation, caller)
        if request.job_id or command.is_by_agent:
            caller.require_job(JobId(request.job_id))
        await self.engine.submit(command, client=caller.client)
        return pb.CheckpointAck(
            acknowledged=True,
            checkpoint_id=request.checkpoint_id,
            status=wire.STATUS_NUMBERS[command.status],  # type: ignore[arg-type]
        )

    @_call
    async def ReconcileCheckpoints(
        self, request: pb.ReconcileCheckpointsRequest, context: Context, caller: Principal
    ) -> pb.ReconcileCheckpointsResponse:
        self._check_worker(request.worker_id, request.incarnation, caller)
        if request.job_id:
            caller.require_job(JobId(request.job_id))
        reply = cast(
            Reconciled, await self.engine.submit(wire.reconcile_checkpoints(request), client=caller.client)
        )
        return pb.ReconcileCheckpointsResponse(
            made=reply.made, revision=reply.revision, removed=reply.removed, unknown=reply.unknown
        )

    @_call
    async def GetLatestCheckpoint(
        self, request: pb.GetLatestCheckpointRequest, context: Context, caller: Principal
    ) -> pb.RecoveryResponse:
        cluster = await self.engine.settled()
        worker_id = WorkerId(request.worker_id)
        job, run_id = JobId(request.job_id), ""
        if job:
            caller.require_job(job)
        else:
            self._check_worker(worker_id, 1, caller)
            spec = cluster.membership.admit(worker_id, incarnation=0).spec
            job, run_id = spec.job_id, spec.run_id
        record = cluster.checkpoints.latest(job, run_id=run_id)
        if record is None:
            # "None" lets training start anew, so it is not the answer to a name that is merely misspelt.
            jobs = {*cluster.membership.jobs(), *(r.job_id for r in cluster.checkpoints.records.values())}
            if job not in jobs:
                raise Unknown("job", job, hint=f"Known jobs: {', '.join(sorted(jobs)) or 'none'}.")
            return pb.RecoveryResponse(has_checkpoint=False)
        datasets = cluster.datasets
        shards = [
            wire.shard(
                shard, datasets.specs[key[1]], key[2], datasets.files_of(datasets.specs[key[1]], shard)
            )
            for key in datasets.plans
            if key[0] == job and key[2] == record.epoch
            for shard in datasets.shards_of(worker_id, key)
        ]
        return pb.RecoveryResponse(
            has_checkpoint=True,
            latest_checkpoint=wire.checkpoint(record),
            resume_step=record.step,
            resume_epoch=record.epoch,
            shard_assignments=shards,
        )

    @_call
    async def ReportRecovery(
        self, request: pb.ReportRecoveryRequest, context: Context, caller: Principal
    ) -> pb.ReportRecoveryResponse:
        self._check_worker(request.worker_id, request.incarnation, caller)
        await self.engine.submit(wire.report_recovery(request), client=caller.client)
        return pb.ReportRecoveryResponse(acknowledged=True)

    @_call
    async def ReportFailure(
        self, request: pb.ReportFailureRequest, context: Context, caller: Principal
    ) -> pb.ReportFailureResponse:
        if request.job_id:
            caller.require_job(JobId(request.job_id))
        command = wire.report_failure(request, bound=caller.job)
        if command.job_id is not None:
            conceal = await asyncio.to_thread(self._secrets.concealer, command.job_id)
            failures = tuple(map(conceal.in_failure, command.failures))
            command = replace(command, failures=failures, reason=conceal(command.reason))
        if command.quarantine and caller.job is not None:
            # A caller that speaks for one job takes only those machines out of use that this job is on.
            members = (await self.engine.settled()).membership.members.values()
            hosts = {member.spec.hostname for member in members if member.spec.job_id == caller.job}
            command = replace(command, quarantine=all(each.host in hosts for each in command.failures))
        await self.engine.submit(command, client=caller.client)
        return pb.ReportFailureResponse(acknowledged=True)

    @_call
    async def AdmitHost(
        self, request: pb.AdmitHostRequest, context: Context, caller: Principal
    ) -> pb.AdmitHostResponse:
        cluster = await self.engine.settled()
        cluster.quarantine.admit(request.host)
        cluster.drains.admit(request.host)
        return pb.AdmitHostResponse(admitted=True)

    @_call
    async def AnnounceDrain(
        self, request: pb.AnnounceDrainRequest, context: Context, caller: Principal
    ) -> pb.AnnounceDrainResponse:
        await self._speaks_for(request.host, caller)
        command = DrainHost(
            host=request.host,
            within_s=request.within_s,
            reason=request.reason,
            by=request.source,
            agents=self._agents.count(request.host),
        )
        await self.engine.submit(command, client=caller.client)
        left_s = (await self.engine.settled()).drains.left_s(request.host, self.engine.clock.now())
        return pb.AnnounceDrainResponse(within_s=request.within_s if left_s is None else left_s)

    @_call
    async def ReportHandover(
        self, request: pb.ReportHandoverRequest, context: Context, caller: Principal
    ) -> pb.ReportHandoverResponse:
        if request.job_id:
            caller.require_job(JobId(request.job_id))
        await self._speaks_for(request.host, caller)
        await self.engine.submit(wire.report_handover(request, bound=caller.job), client=caller.client)
        return pb.ReportHandoverResponse(acknowledged=True)

    @_call
    async def ReportHealth(
        self, request: pb.ReportHealthRequest, context: Context, caller: Principal
    ) -> pb.ReportHealthResponse:
        command = wire.report_health(request)
        if caller.job is not None:
            # Before it joins, no worker of the job is there yet. What such a caller says counts towards no median, and takes no
            # machine out of use: it says of itself what it is to do.
            examined = (await self.engine.settled()).health.decide_report(command, self.engine.clock.now())
            return pb.ReportHealthResponse(unfit=why_unfit(examined))
        await self.engine.submit(command, client=caller.client)
        known = (await self.engine.settled()).health.hosts.get(request.host)
        return pb.ReportHealthResponse(unfit=why_unfit(known) if known is not None else "")

    async def _speaks_for(self, host: str, caller: Principal) -> None:
        """A caller that speaks for one job says nothing about machines that this job is not on."""
        if caller.job is None:
            return
        members = (await self.engine.settled()).membership.members.values()
        if not any(each.spec.hostname == host for each in members if each.spec.job_id == caller.job):
            raise Forbidden(
                f"The job '{caller.job}' has no worker on the machine '{host}'.",
                status=403,
                hint="An agent may report only for its own machine, once its workers have registered.",
            )

    # --- values ---------------------------------------------------------------------------------------------

    @_call
    async def ReadValue(
        self, request: pb.ReadValueRequest, context: Context, caller: Principal
    ) -> pb.ValueResponse:
        value = (await self.engine.settled()).values.get(own_key(request.key, caller))
        if value is None:
            return pb.ValueResponse()
        return pb.ValueResponse(value=value.body, version=value.version)

    @_call
    async def SwapValue(
        self, request: pb.SwapValueRequest, context: Context, caller: Principal
    ) -> pb.ValueResponse:
        command = SwapValue(
            key=own_key(request.key, caller),
            body=request.value,
            expected_version=request.expected_version,
            soft=request.soft,
        )
        reply = cast(Swapped, await self.engine.submit(command, client=caller.client))
        return pb.ValueResponse(swapped=reply.made, value=reply.body, version=reply.version)

    async def Presence(self, request_iterator: object, context: Context) -> None:
        self.metrics.request("Presence")
        await self._require_leading(context)
        await self._agents.serve(context, self.access)

    # --- session --------------------------------------------------------------------------------------------

    async def Session(self, request_iterator: object, context: Context) -> None:
        await self._require_leading(context)
        await self._streams.serve(context)

    async def _require_leading(self, context: Context) -> None:
        """Streams are the leader's alone. A caller without access does not learn who leads."""
        try:
            if self.standing.role != "leader":
                self.access.identify(context)
            await self.standing.confirmed()
        except StrataError as error:
            await refuse(context, error)

    # --- whose ----------------------------------------------------------------------------------------------

    def _check_worker(self, worker_id: str, incarnation: int, caller: Principal) -> None:
        """A caller that is bound to a job speaks for workers of that job alone, and each worker for itself."""
        caller.require_incarnation(incarnation)
        member = self.engine.cluster.membership.members.get(WorkerId(worker_id))
        if member is not None:
            self._check_owner(member, caller)

    @staticmethod
    def _check_owner(member: Member, caller: Principal) -> None:
        if caller.job is not None and member.spec.job_id != caller.job:
            raise Forbidden(
                f"Worker '{member.spec.worker_id}' is not one of job '{caller.job}', which this credential is bound to.",
                status=403,
                hint="Choose another worker id: this one belongs to another job.",
            )


def _target(request: object) -> str:
    """The name of what a call is about."""
    if isinstance(request, Malformed):
        return ""
    return str(getattr(request, "dataset_id", "") or getattr(request, "worker_id", ""))


def _reader(request: pb.GetDataShardRequest, roster: Mapping[WorkerId, int]) -> WorkerId:
    """Whose shards are asked for: those of a rank, of a worker that is named, or the caller's own."""
    if request.HasField("worker_rank"):
        rank = request.worker_rank
        found = next((worker for worker, its_rank in roster.items() if its_rank == rank), None)
        if found is None:
            raise InvalidArgument(
                "worker_rank",
                f"is {rank}; there are {len(roster)} workers.",
                hint="Ranks count from 0 in the order in which workers joined.",
            )
        return found
    reader = WorkerId(request.of_worker_id or request.worker_id)
    if not reader:
        raise InvalidArgument("worker_id", "is missing.", hint="Register a worker, or name one by its rank.")
    if request.of_worker_id and reader not in roster:
        raise Unknown(
            "worker", reader, hint=f"Workers of this job: {', '.join(list(roster)[:10]) or 'none'}."
        )
    return reader
