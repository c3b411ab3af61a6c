"""Figures over time, and where the time of jobs and tasks went, over HTTP."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import FastAPI, Query
from fastapi.responses import Response

from strata.coordinator.http.middleware import json_response
from strata.coordinator.http.params import NOT_FOUND, Moment, NameInPath, Words
from strata.coordinator.metrics.history import FLEET_SERIES, JOB_SERIES, MINUTES, SECONDS, HistoryView
from strata.coordinator.runtime import Runtime
from strata.core.goodput import GoodputView
from strata.core.messages import InvalidArgument, JobId, TaskId, Unknown
from strata.core.tasks import Task

SeriesNames = Annotated[
    str | None, Query(max_length=512, description="Names separated by commas; all by default")
]
Step = Annotated[
    Literal["1", "60"] | None,
    Query(description="Seconds between values; by default as fine as `since` allows"),
]


def install_metric_routes(app: FastAPI, runtime: Runtime) -> None:
    watch = runtime.watch

    @app.get("/api/metrics/history", response_model=HistoryView, responses=NOT_FOUND, tags=["metrics"])
    async def history(
        series: SeriesNames = None, job_id: Words = None, since: Moment = None, step: Step = None
    ) -> Response:
        """The last hour by the second or the last day by the minute, of the fleet or of one job.

        Each series says its unit. Without `since` the last hour is answered, or the last day where `step` is 60.
        """
        now_s = time.time()
        units = FLEET_SERIES if job_id is None else JOB_SERIES
        names = series.split(",") if series else list(units)
        for name in names:
            if name not in units:
                raise InvalidArgument(
                    "series", f"'{name[:64]}' is not one.", hint=f"There are {', '.join(units)}."
                )
        track = watch.history.fleet if job_id is None else watch.history.jobs.get(job_id)
        if track is None:
            raise Unknown(
                "history of job", job_id or "", hint="It begins when a worker of the job reports figures."
            )
        by_minutes = step == "60" or (step is None and since is not None and now_s - since > SECONDS)
        if since is None:
            since = now_s - (MINUTES * 60 if by_minutes else SECONDS)
        found = track.view(names, now_s=now_s, since_s=since, step=60 if by_minutes else 1, job_id=job_id)
        return json_response(found)

    @app.get("/api/goodput", response_model=list[GoodputView], tags=["metrics"])
    async def goodput() -> Response:
        """Where the time of every known job went, in worker-seconds."""
        tasks = (await runtime.engine.settled()).tasks.tasks
        return json_response([_view(runtime, job, tasks.get(TaskId(job))) for job in watch.goodput.jobs()])

    @app.get("/api/jobs/{job_id}/goodput", response_model=GoodputView, responses=NOT_FOUND, tags=["metrics"])
    async def job_goodput(job_id: NameInPath) -> Response:
        if JobId(job_id) not in watch.goodput.jobs():
            raise Unknown("job", job_id, hint="A job is known here once one of its workers reports figures.")
        tasks = (await runtime.engine.settled()).tasks.tasks
        return json_response(_view(runtime, JobId(job_id), tasks.get(TaskId(job_id))))

    @app.get("/api/tasks/{task_id}/goodput", response_model=GoodputView, responses=NOT_FOUND, tags=["tasks"])
    async def task_goodput(task_id: NameInPath) -> Response:
        task = (await runtime.engine.settled()).tasks.get(TaskId(task_id))
        return json_response(_view(runtime, JobId(task_id), task))


def _view(runtime: Runtime, job: JobId, task: Task | None) -> GoodputView:
    """A task's workers are a job of the task's name."""
    if task is None:
        return runtime.watch.goodput.view(job)
    until_s = task.started_at_s or task.ended_at_s or time.time()
    queued_s = max(0.0, until_s - task.created_at_s)
    return runtime.watch.goodput.view(job, task_id=task.spec.task_id, queued_s=queued_s)
