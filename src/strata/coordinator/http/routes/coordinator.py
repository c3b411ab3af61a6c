"""The coordinator itself over HTTP: its health and status, the dashboard's first page, and everything that happens."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from strata.coordinator.http.dependencies import (
    TheGatekeeper,
    ThePrincipal,
    TheRuntime,
    page_response,
)
from strata.coordinator.http.event_models import StreamEvent
from strata.core import views

router = APIRouter(tags=["coordinator"])

_STREAM_EVENT = f"#/components/schemas/{StreamEvent.__name__}"


class HealthBody(BaseModel):
    status: Literal["ok"] = "ok"


@router.get("/api/health")
async def health() -> HealthBody:
    return HealthBody()


@router.get("/api/status", response_model=views.StatusView)
async def status(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "status", request)


@router.get("/api/dashboard", response_model=views.DashboardView)
async def dashboard(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "dashboard", request)


@router.get(
    "/api/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"$ref": _STREAM_EVENT}}}}},
)
async def events(
    runtime: TheRuntime, gatekeeper: TheGatekeeper, principal: ThePrincipal, request: Request
) -> StreamingResponse:
    """All events, as server-sent events. Resumes after `Last-Event-ID`; after `resync`, reload the state."""
    last = request.headers.get("last-event-id")
    return runtime.event_readers.respond(runtime.feed.follow(last), request, gatekeeper, principal)


@router.get("/api/events/recent", response_model=list[StreamEvent])
async def recent_events(runtime: TheRuntime) -> Response:
    """Recent events, oldest first, with their ids in the stream: joins, losses, saves, recoveries, tasks."""
    headers = {"Cache-Control": "no-store"}
    return Response(runtime.feed.recent(), media_type="application/json", headers=headers)
