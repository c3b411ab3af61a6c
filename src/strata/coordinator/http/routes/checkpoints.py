"""Checkpoints over HTTP: listed, and verified byte by byte."""

from __future__ import annotations

from fastapi import APIRouter, Request
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
from strata.core import views
from strata.core.messages import CheckpointId

router = APIRouter(prefix="/api/checkpoints", tags=["checkpoints"])


@router.get("", response_model=list[views.CheckpointView])
async def checkpoints(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "checkpoints", request)


@router.post(
    "/{checkpoint_id}/verify",
    response_model=VerificationView,
    responses={202: {"model": VerificationView, "description": "It is being read"}, **NOT_FOUND},
)
async def verify_checkpoint(
    runtime: TheRuntime, principal: ThePrincipal, checkpoint_id: NameInPath
) -> Response:
    """Read every byte again and compare it with the manifest. 202 while that is under way: ask again."""
    cluster = await runtime.engine.settled()
    found = await runtime.verifications.verify(cluster, CheckpointId(checkpoint_id), principal)
    return json_response(found, status=202 if found.status == "verifying" else 200)
