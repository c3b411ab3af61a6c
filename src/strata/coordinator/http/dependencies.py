"""What all routes share: the runtime they answer for, what parameters may be, and what refusals mean.

Roles are not asked for here: `permissions` knows them for every path there is, and `middleware` asks before a body is read.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response

from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import Gatekeeper
from strata.coordinator.auth.principals import Principal
from strata.coordinator.http.middleware import ErrorBody
from strata.coordinator.runtime import Runtime
from strata.core import checks

Responses = dict[int | str, dict[str, Any]]

NOT_FOUND: Responses = {404: {"model": ErrorBody, "description": "Not found"}}

Limit = Annotated[int, Query(ge=1, le=10_000)]
NameFilter = Annotated[str | None, Query(max_length=checks.NAME_LIMIT)]
NameInPath = Annotated[str, Path(max_length=checks.NAME_LIMIT)]
Timestamp = Annotated[float | None, Query(ge=0, le=1e11, description="Unix seconds")]


async def _runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


async def _principal(request: Request) -> Principal:
    return cast(Principal, request.state.principal)


async def _gatekeeper(request: Request) -> Gatekeeper:
    return cast(Gatekeeper, request.app.state.gatekeeper)


async def _audit_log(request: Request) -> AuditLog:
    return cast(AuditLog, request.app.state.audit_log)


TheRuntime = Annotated[Runtime, Depends(_runtime)]
ThePrincipal = Annotated[Principal, Depends(_principal)]
TheGatekeeper = Annotated[Gatekeeper, Depends(_gatekeeper)]
TheAuditLog = Annotated[AuditLog, Depends(_audit_log)]


async def page_response(runtime: Runtime, name: str, request: Request) -> Response:
    """A ready-made page, packed for those who take it so."""
    page = await runtime.pages.get(name)
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(page.body) > 1024:
        headers["Content-Encoding"] = "gzip"
        return Response(page.gzip, media_type="application/json", headers=headers)
    return Response(page.body, media_type="application/json", headers=headers)
