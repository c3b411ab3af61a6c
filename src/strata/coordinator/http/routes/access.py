"""Access over HTTP: who the caller is, signing in and out, tokens, and the audit log.

A token is in an answer once, when it is created. The cookie of a sign-in is for browsers alone: no script can read it, no
other site can send it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.auth.audit_log import AuditEntry
from strata.coordinator.auth.principals import ROLES, Principal, Role
from strata.coordinator.auth.signing_in import LINK_S, SIGN_IN_S
from strata.coordinator.auth.tokens import parse_expiry
from strata.coordinator.http.dependencies import (
    NOT_FOUND,
    Limit,
    NameInPath,
    TheAuditLog,
    TheGatekeeper,
    ThePrincipal,
    Timestamp,
)
from strata.coordinator.http.middleware import cookie_name, json_response, session_cookie
from strata.core import checks
from strata.core.messages import InvalidArgument

router = APIRouter(prefix="/api", tags=["access"])


class SessionView(BaseModel):
    """The caller and its permissions."""

    name: str
    role: Role
    job_id: str | None = Field(description="The job this credential is bound to; null: all jobs")
    signed_in: bool = Field(
        description="Whether the caller signed in with a cookie, which signing out would end"
    )


class SignInBody(BaseModel):
    """A token or the code of a link; exactly one of them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: str | None = Field(default=None, min_length=1, max_length=4096)
    code: str | None = Field(default=None, min_length=1, max_length=256)


class LinkBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Role | None = Field(default=None, description="At most the caller's own, which is the default")


class LinkView(BaseModel):
    path: str = Field(description="To be appended to the coordinator's address", examples=["/sign-in#code=…"])
    expires_in: float = Field(description="In seconds")


class CreateTokenBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(default="unnamed", min_length=1, max_length=64, examples=["ci"])
    role: Role
    job_id: str | None = Field(default=None, min_length=1, max_length=checks.NAME_LIMIT)
    expires: str = Field(default="30d", max_length=16, description="Lifetime: 7d, 12h, 30m, or never")


class TokenView(BaseModel):
    id: str
    name: str
    role: Role
    job_id: str | None
    created_at: float
    expires_at: float | None
    created_by: str
    expired: bool


class CreatedTokenView(TokenView):
    token: str = Field(description="Shown now and never again")


@router.get("/session")
async def session(request: Request, gatekeeper: TheGatekeeper, principal: ThePrincipal) -> SessionView:
    cookie = session_cookie(request.headers.get("cookie", ""), request.scope)
    return _session(principal, signed_in=gatekeeper.signed_in(cookie) is not None)


@router.post("/session")
async def sign_in(
    request: Request, gatekeeper: TheGatekeeper, audit: TheAuditLog, body: SignInBody
) -> Response:
    """Sign a browser in: the answer sets a cookie that is valid for twelve hours, or until the token is revoked."""
    connection = request.state.connection
    if (body.token is None) == (body.code is None):
        raise InvalidArgument("token", "or code must be given, and not both.", hint="Send one of them.")
    if body.token is not None:
        cookie = gatekeeper.sign_in(body.token, connection)
    else:
        cookie = gatekeeper.sign_ins.redeem(body.code or "")
    principal = gatekeeper.signed_in(cookie)
    assert principal is not None
    audit.add(who=principal.name, role=principal.role, action="sign in", client=connection.client)
    response = json_response(_session(principal, signed_in=True).model_dump())
    _set_cookie(response, request, cookie, SIGN_IN_S)
    return response


@router.delete("/session", status_code=204)
async def sign_out(request: Request, gatekeeper: TheGatekeeper) -> Response:
    gatekeeper.sign_ins.end(session_cookie(request.headers.get("cookie", ""), request.scope))
    response = Response(status_code=204)
    _set_cookie(response, request, "", 0)
    return response


@router.post("/session/links", status_code=201)
async def create_link(gatekeeper: TheGatekeeper, principal: ThePrincipal, body: LinkBody) -> LinkView:
    """Create a link that signs a browser in, once and within ten minutes."""
    role = body.role or principal.role
    principal.require(role)
    code = gatekeeper.sign_ins.create_link(replace(principal, name=f"link of {principal.name}", role=role))
    return LinkView(path=f"/sign-in#code={code}", expires_in=LINK_S)


@router.get("/tokens")
async def tokens(gatekeeper: TheGatekeeper) -> list[TokenView]:
    """Tokens created at this coordinator, oldest first, without those of its configuration."""
    return [TokenView(**token.public(time.time())) for token in gatekeeper.tokens.all()]


@router.post("/tokens", status_code=201)
async def create_token(
    request: Request, gatekeeper: TheGatekeeper, principal: ThePrincipal, body: CreateTokenBody
) -> CreatedTokenView:
    secret, token = await asyncio.to_thread(
        gatekeeper.tokens.create,
        name=body.name,
        role=body.role,
        job=body.job_id,
        expires_s=parse_expiry(body.expires),
        created_by=principal.name,
    )
    request.state.created = {"token_id": token.id}
    return CreatedTokenView(**token.public(time.time()), token=secret)


@router.delete("/tokens/{token_id}", status_code=204, responses=NOT_FOUND)
async def revoke_token(gatekeeper: TheGatekeeper, token_id: NameInPath) -> Response:
    """Revoke a token. It stops working immediately; streams opened with it end within a second."""
    await asyncio.to_thread(gatekeeper.tokens.revoke, token_id)
    return Response(status_code=204)


@router.get(
    "/audit-log",
    response_model=list[AuditEntry],
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}},
)
async def audit_log(
    audit: TheAuditLog,
    limit: Limit = 100,
    q: Annotated[
        str, Query(max_length=256, description="Only entries that contain this text, ignoring case")
    ] = "",
    before: Timestamp = None,
    format: Literal["json", "ndjson"] = "json",
) -> Response:
    """Who did what, newest first. `ndjson` has one entry per line, for other tools."""
    found = await asyncio.to_thread(audit.newest, limit, text=q, before_s=before)
    if format == "ndjson":
        lines = b"".join(orjson.dumps(entry) + b"\n" for entry in found)
        return Response(lines, media_type="application/x-ndjson")
    return json_response(found)


def _session(principal: Principal, *, signed_in: bool) -> SessionView:
    assert principal.role in ROLES
    return SessionView(name=principal.name, role=principal.role, job_id=principal.job, signed_in=signed_in)


def _set_cookie(response: Response, request: Request, value: str, lasts_s: float) -> None:
    response.set_cookie(
        cookie_name(request.scope),
        value,
        max_age=int(lasts_s),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
