"""Quarantined machines over HTTP: listing them, adding one, and clearing it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import NOT_FOUND, ThePrincipal, TheRuntime
from strata.coordinator.http.middleware import json_response
from strata.core import checks
from strata.core.fleet.quarantine import REASON_LIMIT, QuarantineView
from strata.core.messages import ClearHost, QuarantineHost

router = APIRouter(prefix="/api/quarantine", tags=["fleet"])

HostInPath = Annotated[str, Path(max_length=checks.NAME_LIMIT)]


class QuarantineBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    host: str = Field(
        min_length=1, max_length=checks.NAME_LIMIT, description="As its workers show it", examples=["node-7"]
    )
    reason: str = Field(min_length=1, max_length=REASON_LIMIT, examples=["GPU 3 has ECC errors"])


@router.get("", response_model=list[QuarantineView])
async def quarantined(runtime: TheRuntime) -> Response:
    """Machines whose agents are refused by the rendezvous, in the order in which they were quarantined."""
    return json_response((await runtime.engine.settled()).quarantine.shown())


@router.post("", status_code=201, response_model=QuarantineView)
async def quarantine(runtime: TheRuntime, principal: ThePrincipal, body: QuarantineBody) -> Response:
    """Quarantine a machine: its agents save, leave and are refused. A machine that is already quarantined is not changed."""
    command = QuarantineHost(host=body.host, reason=body.reason, by=principal.name)
    await runtime.engine.submit(command, client=principal.client)
    shown = (await runtime.engine.settled()).quarantine.shown()
    return json_response(next(one for one in shown if one.host == body.host), status=201)


@router.delete("/{host}", status_code=204, responses=NOT_FOUND)
async def clear(runtime: TheRuntime, principal: ThePrincipal, host: HostInPath) -> Response:
    """Allow a machine to be used again: restart its agents."""
    await runtime.engine.submit(ClearHost(host=host, by=principal.name), client=principal.client)
    return Response(status_code=204)
