"""The fleet over HTTP: its workers, the barriers they meet at and the recoveries they have made."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from strata.coordinator.http.dependencies import TheRuntime, page_response
from strata.core import views

router = APIRouter(tags=["fleet"])


@router.get("/api/workers", response_model=list[views.WorkerView])
async def workers(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "workers", request)


@router.get("/api/barriers", response_model=list[views.BarrierView])
async def barriers(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "barriers", request)


@router.get("/api/recoveries", response_model=list[views.RecoveryView])
async def recoveries(runtime: TheRuntime, request: Request) -> Response:
    """Newest first, each with the seconds of its phases."""
    return await page_response(runtime, "recoveries", request)
