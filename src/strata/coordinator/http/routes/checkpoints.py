"""Checkpoints over HTTP: listed, verified byte by byte, and where they are safe."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from strata.coordinator.http.dependencies import (
    NOT_FOUND,
    NameInPath,
    ThePrincipal,
    TheRuntime,
    page_response,
)
from strata.coordinator.http.middleware import json_response
from strata.coordinator.inspection.checkpoints import VerificationView
from strata.core import checks, views
from strata.core.jobs.safety import Safety
from strata.core.messages import CheckpointId, JobId, TaskId, Unknown

router = APIRouter(prefix="/api", tags=["checkpoints"])


@router.get("/jobs/{job_id}/safety", response_model=Safety, responses=NOT_FOUND)
async def job_safety(
    runtime: TheRuntime,
    job_id: NameInPath,
    step: Annotated[int | None, Query(ge=0, le=checks.SAMPLES_LIMIT)] = None,
) -> Response:
    """Where the copies of a step are (by default of the newest), which failures it survives, and what would be lost if a
    process, a machine or the site failed now."""
    cluster, job = await runtime.engine.settled(), JobId(job_id)
    is_here = job in cluster.membership.job_generations or TaskId(job) in cluster.tasks.tasks
    if not is_here and not cluster.checkpoints.knows(job):
        raise Unknown("job", job_id, hint="A job is known here once one of its workers registers or reports.")
    known = runtime.verifications.known
    return json_response(views.safety(cluster, job, step=step, now_s=time.time(), verified=known))


@router.get("/checkpoints", response_model=list[views.CheckpointView])
async def checkpoints(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "checkpoints", request)


@router.post(
    "/checkpoints/{checkpoint_id}/verify",
    response_model=VerificationView,
    responses={202: {"model": VerificationView, "description": "Verification is in progress"}, **NOT_FOUND},
)
async def verify_checkpoint(
    runtime: TheRuntime, principal: ThePrincipal, checkpoint_id: NameInPath
) -> Response:
    """Read every byte and compare it with the manifest. 202 while that is in progress: retry."""
    cluster = await runtime.engine.settled()
    found = await runtime.verifications.verify(cluster, CheckpointId(checkpoint_id), principal)
    return json_response(found, status=202 if found.status == "verifying" else 200)
