"""Drains over HTTP: machines that are draining or drained and the outcome for their runs, machines that can be drained, draining
one and cancelling that; and the health checks of machines."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import NOT_FOUND, ThePrincipal, TheRuntime
from strata.coordinator.http.middleware import json_response
from strata.core import checks
from strata.core.fleet.drains import MAX_WITHIN_S, REASON_LIMIT, DrainView
from strata.core.fleet.health import HealthView
from strata.core.messages import CancelDrain, DrainHost

router = APIRouter(prefix="/api", tags=["fleet"])

HostInPath = Annotated[str, Path(max_length=checks.NAME_LIMIT)]


class DrainBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    host: str = Field(
        min_length=1, max_length=checks.NAME_LIMIT, description="As its workers show it", examples=["node-7"]
    )
    within_s: float = Field(
        ge=0, le=MAX_WITHIN_S, description="Seconds until the machine may be shut down", examples=[90]
    )
    reason: str = Field(default="", max_length=REASON_LIMIT, examples=["maintenance of rack 4"])


class MachineAgents(BaseModel):
    """A machine that can be drained."""

    host: str = Field(description="As its workers show it")
    agents: int = Field(description="Those connected to this coordinator")


@router.get("/agents", response_model=list[MachineAgents])
async def agents(runtime: TheRuntime) -> Response:
    """Machines whose agents are connected, by name: those that can be drained. A run with another rendezvous has none here."""
    found = runtime.agents.by_host()
    return json_response([{"host": host, "agents": found[host]} for host in sorted(found)])


@router.get("/drains", response_model=list[DrainView])
async def drains(runtime: TheRuntime) -> Response:
    """Machines that are draining or drained, and the outcome for the runs on them, in the order in which they were drained."""
    return json_response((await runtime.engine.settled()).drains.shown())


@router.post("/drains", status_code=201, response_model=DrainView)
async def drain(runtime: TheRuntime, principal: ThePrincipal, body: DrainBody) -> Response:
    """Drain a machine: its agents save, hand over and leave before the deadline, and are refused afterwards. Of two
    deadlines, the earlier one counts."""
    command = DrainHost(
        host=body.host,
        within_s=body.within_s,
        reason=body.reason,
        by=principal.name,
        agents=runtime.agents.count(body.host),
    )
    await runtime.engine.submit(command, client=principal.client)
    shown = (await runtime.engine.settled()).drains.shown()
    return json_response(next(one for one in shown if one.host == body.host), status=201)


@router.delete("/drains/{host}", status_code=204, responses=NOT_FOUND)
async def cancel(runtime: TheRuntime, principal: ThePrincipal, host: HostInPath) -> Response:
    """Allow a machine to be used again: restart its agents. Those that are already leaving still leave."""
    await runtime.engine.submit(CancelDrain(host=host, by=principal.name), client=principal.client)
    return Response(status_code=204)


@router.get("/machines", response_model=list[HealthView])
async def machines(runtime: TheRuntime) -> Response:
    """The newest health checks of each machine, made before its agent joined or after a failure."""
    return json_response((await runtime.engine.settled()).health.shown())
