"""Metrics over HTTP: now, for Prometheus, over time, and where the time of jobs and tasks went."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from strata.coordinator.http.dependencies import (
    NOT_FOUND,
    NameFilter,
    NameInPath,
    TheRuntime,
    Timestamp,
    page_response,
)
from strata.coordinator.http.middleware import json_response
from strata.coordinator.metrics.history import (
    FLEET_SERIES,
    JOB_SERIES,
    MINUTES,
    SECONDS,
    WORKER_POINTS,
    WORKER_SERIES,
    WORKER_STEP_S,
    HistoryView,
    Track,
    WorkerTrack,
)
from strata.coordinator.runtime import Runtime
from strata.core import views
from strata.core.cluster import Cluster
from strata.core.fleet.tasks import Task
from strata.core.messages import InvalidArgument, JobId, TaskId, Unknown, WorkerId
from strata.core.telemetry.goodput import GoodputView

router = APIRouter(tags=["metrics"])

SeriesNames = Annotated[
    str | None, Query(max_length=512, description="Names separated by commas; all by default")
]
Step = Annotated[
    Literal["1", "60"] | None,
    Query(description="Seconds between values; by default as fine as `since` allows"),
]


@router.get("/api/metrics", response_model=views.MetricsView)
async def api_metrics(runtime: TheRuntime, request: Request) -> Response:
    """Checkpoint throughput (MB/s), gRPC requests/s, workers, barrier latency (p99, ms) and time of the last plan (ms)."""
    return await page_response(runtime, "metrics", request)


@router.get("/metrics", response_class=Response)
async def prometheus(runtime: TheRuntime) -> Response:
    return Response(await runtime.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/api/metrics/history", response_model=HistoryView, responses=NOT_FOUND)
async def history(
    runtime: TheRuntime,
    series: SeriesNames = None,
    job_id: NameFilter = None,
    worker_id: NameFilter = None,
    since: Timestamp = None,
    step: Step = None,
) -> Response:
    """The last hour by second or the last day by minute, for the fleet or one job; or the last hour of one worker.

    Each series has its unit. Without `since`, the last hour is returned, or the last day if `step` is 60.
    """
    now_s = time.time()
    units = WORKER_SERIES if worker_id is not None else FLEET_SERIES if job_id is None else JOB_SERIES
    names = series.split(",") if series else list(units)
    for name in names:
        if name not in units:
            raise InvalidArgument(
                "series", f"'{name[:64]}' is not a series.", hint=f"Choose from {', '.join(units)}."
            )
    if worker_id is not None:
        return _of_worker(runtime, worker_id, names, now_s=now_s, since=since, job_id=job_id)
    track = runtime.watch.history.fleet if job_id is None else runtime.watch.history.jobs.get(job_id)
    if (
        track is None
        and job_id is not None
        and _is_known(runtime, await runtime.engine.settled(), JobId(job_id))
    ):
        track = Track(JOB_SERIES)  # It has reported nothing yet, or not since the coordinator has started.
    if track is None:
        raise Unknown(
            "history of job", job_id or "", hint="It exists once a worker of the job reports metrics."
        )
    by_minutes = step == "60" or (step is None and since is not None and now_s - since > SECONDS)
    if since is None:
        since = now_s - (MINUTES * 60 if by_minutes else SECONDS)
    found = track.view(names, now_s=now_s, since_s=since, step=60 if by_minutes else 1, job_id=job_id)
    return json_response(found)


def _of_worker(
    runtime: Runtime,
    worker_id: str,
    names: list[str],
    *,
    now_s: float,
    since: float | None,
    job_id: str | None,
) -> Response:
    member = runtime.engine.cluster.membership.members.get(WorkerId(worker_id))
    track = runtime.watch.history.workers.get(worker_id)
    is_others = member is not None and job_id is not None and member.spec.job_id != job_id
    if is_others or (member is None and (track is None or job_id is not None)):
        raise Unknown("worker", worker_id, hint="`strata workers` lists those that are known.")
    track = track or WorkerTrack()  # It has reported nothing yet.
    since_s = since if since is not None else now_s - WORKER_POINTS * WORKER_STEP_S
    return json_response(track.view(names, now_s=now_s, since_s=since_s, job_id=job_id))


@router.get("/api/goodput", response_model=list[GoodputView])
async def goodput(runtime: TheRuntime) -> Response:
    """Where the time of every known job went, in worker-seconds."""
    tasks = (await runtime.engine.settled()).tasks.tasks
    return json_response(
        [goodput_view(runtime, job, tasks.get(TaskId(job))) for job in runtime.watch.goodput.jobs()]
    )


@router.get("/api/jobs/{job_id}/goodput", response_model=GoodputView, responses=NOT_FOUND)
async def job_goodput(runtime: TheRuntime, job_id: NameInPath) -> Response:
    """Where the time of one job went. For a job that has not reported yet, `goodput` is null."""
    cluster = await runtime.engine.settled()
    tasks, job = cluster.tasks.tasks, JobId(job_id)
    if not _is_known(runtime, cluster, job):
        raise Unknown("job", job_id, hint="A job is known here once one of its workers registers or reports.")
    return json_response(goodput_view(runtime, JobId(job_id), tasks.get(TaskId(job_id))))


def _is_known(runtime: Runtime, cluster: Cluster, job: JobId) -> bool:
    """Whether there is, or was, such a job, whatever it has reported."""
    is_here = job in cluster.membership.job_generations or TaskId(job) in cluster.tasks.tasks
    return is_here or cluster.checkpoints.knows(job) or job in runtime.watch.goodput.jobs()


def goodput_view(runtime: Runtime, job: JobId, task: Task | None) -> GoodputView:
    """Where the time of one task went. Its workers are a job with the task's name."""
    if task is None:
        return runtime.watch.goodput.view(job)
    until_s = task.started_at_s or task.ended_at_s or time.time()
    queued_s = max(0.0, until_s - task.created_at_s)
    return runtime.watch.goodput.view(job, task_id=task.spec.task_id, queued_s=queued_s)
