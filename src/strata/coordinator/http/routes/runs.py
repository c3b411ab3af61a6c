"""Runs over HTTP: what their training loops have logged, by step, at any resolution; how they were started, what people have
written about them, and what they have cost.

Reading and writing down an answer happen on the history's own threads: a reader that asks for much slows nobody else.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import NOT_FOUND, Limit, NameFilter, NameInPath, TheRuntime
from strata.coordinator.http.middleware import json_response
from strata.coordinator.metrics.run_history import LAST_STEP, Curve, RunHistory
from strata.coordinator.runtime import Runtime
from strata.core.faults.cost import CostView, cost
from strata.core.messages import InvalidArgument, JobId, Unknown
from strata.core.telemetry.logtext import clean
from strata.core.telemetry.run_details import NOTES_LIMIT, TAGS_LIMIT, check_tags
from strata.core.telemetry.run_metrics import (
    NAME_LIMIT,
    STEP_LIMIT,
    RunCurvesView,
    RunInfoView,
    RunMetricsView,
    RunView,
)

router = APIRouter(tags=["runs"])

POINTS_LIMIT = 200_000
"""In one answer, of all metrics together."""
PACKED_BYTES = 16_384
"""Larger answers are sent packed to those who take them so."""
SINGLE_LIMIT = 3e38

Name = Annotated[str, Query(max_length=NAME_LIMIT)]
Names = Annotated[list[Name], Query(min_length=1, max_length=200, description="Metrics; may be repeated")]
FirstStep = Annotated[int, Query(alias="from", ge=0, le=STEP_LIMIT, description="First step")]
LastStep = Annotated[int | None, Query(alias="to", ge=0, le=STEP_LIMIT, description="Last step, included")]
Price = Annotated[float | None, Query(ge=0, le=1e6, description="Price of a GPU-hour, or of a worker-hour")]
Points = Annotated[int, Query(ge=1, le=10_000, description="Maximum number of points per metric")]


class NotesBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tags: list[str] | None = Field(default=None, max_length=TAGS_LIMIT, examples=[["baseline", "lr-sweep"]])
    notes: str | None = Field(
        default=None, max_length=NOTES_LIMIT, examples=["Warm-up was too short; see the spike at step 1,200."]
    )


@router.get("/api/runs", response_model=list[RunView])
async def runs(runtime: TheRuntime, request: Request, limit: Limit = 100) -> Response:
    """Runs that have logged something, the latest first."""
    history = runtime.run_history
    if history is None:
        return Response(b"[]", media_type="application/json")
    return await _answered(history, request, lambda: history.runs(limit=limit))


@router.get("/api/runs/{run}", response_model=RunInfoView, responses=NOT_FOUND)
async def run_info(
    runtime: TheRuntime, request: Request, run: NameInPath, job_id: NameFilter = None
) -> Response:
    """How a run was last started (command, configuration, commit), and its tags and notes.

    `run` is the id of a run, or a job's name: then it is that job's latest run.
    """
    history = _history(runtime, run)
    return await _answered(
        history, request, lambda: history.info(history.resolve(run, job=job_id), job=job_id)
    )


@router.post("/api/runs/{run}/notes", response_model=RunInfoView, responses=NOT_FOUND)
async def annotate_run(
    runtime: TheRuntime, request: Request, run: NameInPath, body: NotesBody, job_id: NameFilter = None
) -> Response:
    """Replace the tags or the notes of a run; what is not given stays."""
    history = _history(runtime, run)
    tags = None if body.tags is None else check_tags(body.tags)
    notes = None if body.notes is None else clean(body.notes)

    def write() -> RunInfoView:
        found = history.resolve(run, job=job_id)
        history.annotate(found, job=job_id, tags=tags, notes=notes)
        return history.info(found, job=job_id)

    return await _answered(history, request, write)


@router.get("/api/runs/{run}/metrics", response_model=RunMetricsView, responses=NOT_FOUND)
async def run_metrics(
    runtime: TheRuntime, request: Request, run: NameInPath, job_id: NameFilter = None
) -> Response:
    """What a run has logged: every metric with its last, minimum and maximum value in the committed history, and every start
    of the run with the step it resumed at.

    `run` is the id of a run, or a job's name: then it is that job's latest run. `job_id` narrows the answer to what this job has reported.
    """
    history = _history(runtime, run)
    return await _answered(
        history, request, lambda: history.summary(history.resolve(run, job=job_id), job=job_id)
    )


@router.get("/api/runs/{run}/metrics/series", response_model=RunCurvesView, responses=NOT_FOUND)
async def run_series(
    runtime: TheRuntime,
    request: Request,
    run: NameInPath,
    name: Names,
    job_id: NameFilter = None,
    first: FirstStep = 0,
    last: LastStep = None,
    points: Points = 1_000,
) -> Response:
    """Metrics of a run by step: the committed history and, separately, the branches abandoned by rollbacks.

    A point is one value, or the mean of several with their minimum and maximum, so that no spike is lost.
    """
    if len(name) * points > POINTS_LIMIT:
        raise InvalidArgument(
            "points",
            f"is {points:,} for {len(name)} metrics; the limit for one answer is {POINTS_LIMIT:,} points in all.",
            hint="Request fewer points, or fewer metrics at a time.",
        )
    history = _history(runtime, run)

    def read() -> dict[str, Any]:
        found = history.resolve(run, job=job_id)
        curves = history.curves(
            found,
            list(dict.fromkeys(name)),
            job=job_id,
            first=first,
            last=LAST_STEP if last is None else last,
            points=points,
        )
        series = [
            {
                "name": each.name,
                "committed": _columns(each.committed),
                "abandoned": [
                    {**_columns(branch), "generation": branch.generation} for branch in each.abandoned
                ],
            }
            for each in curves
        ]
        return {"run": found, "series": series}

    return await _answered(history, request, read)


@router.get("/api/runs/{run}/cost", response_model=CostView, responses=NOT_FOUND)
async def run_cost(
    runtime: TheRuntime, run: NameInPath, job_id: NameFilter = None, price_per_gpu_hour: Price = None
) -> Response:
    """What a run has cost: spent, lost by cause, and saved compared with restarts from the newest durable checkpoint.

    `run` is the id of a run, a job or a task; `price_per_gpu_hour` overrides the configured one.
    """
    goodput, prices = runtime.watch.goodput, runtime.prices
    incidents = list((await runtime.engine.settled()).incidents.records.values())
    known = {*goodput.jobs(), *(each.reported.job_id for each in incidents)}
    jobs = [run] if run in known else await _jobs_of(runtime, run)
    jobs = [job for job in jobs if job in known and job_id in (None, job)]
    if not jobs:
        raise Unknown(
            "run", run, hint="The cost of a run is known once its workers report or one has failed."
        )
    price = price_per_gpu_hour if price_per_gpu_hour is not None else prices.of(run)
    if price is None:
        price = next(filter(None, map(prices.of, jobs)), None)
    return json_response(
        cost(
            run,
            spent=[goodput.view(JobId(job)) for job in jobs],
            incidents=[each for each in incidents if each.reported.job_id in jobs],
            gpus_per_worker=max(goodput.gpus_per_worker(JobId(job)) for job in jobs),
            price=price,
            currency=prices.currency,
        )
    )


async def _jobs_of(runtime: Runtime, run: str) -> list[str]:
    history = runtime.run_history
    if history is None:
        return []
    return await asyncio.get_running_loop().run_in_executor(history.readers, history.jobs_of, run)


def _history(runtime: Runtime, run: str) -> RunHistory:
    if runtime.run_history is None:
        raise Unknown("run", run, hint="This coordinator has no disk space for metrics; see its log.")
    return runtime.run_history


async def _answered(history: RunHistory, request: Request, read: Callable[[], Any]) -> Response:
    packs = "gzip" in request.headers.get("accept-encoding", "")

    def answer() -> tuple[bytes, bool]:
        body = orjson.dumps(read(), option=orjson.OPT_SERIALIZE_NUMPY)
        packed = packs and len(body) > PACKED_BYTES
        return gzip.compress(body, 1) if packed else body, packed

    body, packed = await asyncio.get_running_loop().run_in_executor(history.readers, answer)
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if packed:
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _columns(curve: Curve) -> dict[str, Any]:
    """As `CurveView` says. What is a mean is as precise as a picture needs; what is one value is that value."""
    points = curve.points
    is_exact = bool((points.count == 1).all())
    return {
        "steps": np.ascontiguousarray(points.last),
        "times": np.round(curve.times, 3),
        "values": np.ascontiguousarray(points.mean) if is_exact else _shown(points.mean),
        "low": [] if is_exact else _shown(points.low),
        "high": [] if is_exact else _shown(points.high),
    }


def _shown(column: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    finite = column[np.isfinite(column)]
    if len(finite) and float(np.abs(finite).max()) > SINGLE_LIMIT:
        return np.ascontiguousarray(column)
    return column.astype(np.float32)
