"""The fleet over HTTP: its workers, the barriers they meet at, what failed and the recoveries they have made."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from strata.coordinator.http.dependencies import Limit, NameFilter, ThePrincipal, TheRuntime, page_response
from strata.coordinator.http.middleware import json_response
from strata.core import views
from strata.core.faults.incidents import IncidentView

router = APIRouter(tags=["fleet"])


@router.get("/api/workers", response_model=list[views.WorkerView])
async def workers(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "workers", request)


@router.get("/api/barriers", response_model=list[views.BarrierView])
async def barriers(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "barriers", request)


@router.get("/api/recoveries", response_model=list[views.RecoveryView])
async def recoveries(runtime: TheRuntime, request: Request) -> Response:
    """Recoveries, newest first, each with the seconds of its phases."""
    return await page_response(runtime, "recoveries", request)


@router.get("/api/incidents", response_model=list[IncidentView])
async def incidents(
    runtime: TheRuntime, principal: ThePrincipal, run: NameFilter = None, limit: Limit = 100
) -> Response:
    """What failed, who failed first and how, what was decided and what it cost; newest first. `run` is a job or a task."""
    cluster = await runtime.engine.settled()
    return json_response(cluster.incidents.shown(run, by_launch=principal.job is None)[:limit])
