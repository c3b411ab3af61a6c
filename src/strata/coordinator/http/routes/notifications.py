"""Notifications over HTTP: recent ones, their channels, and a test of these. No answer holds a secret."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import NOT_FOUND, Limit, NameFilter, TheRuntime
from strata.coordinator.http.middleware import json_response
from strata.coordinator.notify.notifier import DeliveryView, NotifyView
from strata.core import checks
from strata.core.faults.notifications import Notification

router = APIRouter(prefix="/api/notifications", tags=["notifications"])


class TestNotificationBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    channel: str | None = Field(
        default=None, max_length=checks.NAME_LIMIT, description="Its name; all channels when not given"
    )


@router.get("", response_model=list[Notification])
async def notifications(runtime: TheRuntime, run: NameFilter = None, limit: Limit = 100) -> Response:
    """Recent notifications, newest first. The event stream has each as `notification` when it happens."""
    return json_response(runtime.notifier.shown(run)[:limit])


@router.get("/channels", response_model=NotifyView)
async def channels(runtime: TheRuntime) -> Response:
    """The notification channels with their delivery state, and the rules."""
    return json_response(runtime.notifier.view())


@router.post("/test", response_model=list[DeliveryView], responses=NOT_FOUND)
async def test(runtime: TheRuntime, body: TestNotificationBody) -> Response:
    """Send a test notification to one channel or all; returns the outcome of one attempt each."""
    return json_response(await runtime.notifier.test(body.channel))
