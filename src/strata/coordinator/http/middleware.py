"""Around every HTTP call: who may make it, how much it may send, and how every refusal looks.

Every error is JSON with a stable `code`, a `message` that says what happened and a `hint` that says what to do; no
input gives a traceback. Every call checks Host, changing ones Origin too. A body has a limit in bytes and in seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import Connection, Gatekeeper
from strata.coordinator.auth.principals import Forbidden, Principal
from strata.coordinator.http.permissions import READERS_CHANGE, need_of
from strata.coordinator.leadership import Standby, Standing
from strata.errors import StrataError

BODY_LIMIT_BYTES = 1 << 20
NUMBER_DIGITS = 18
BODY_TIMEOUT_S = 20.0
DISCARD_BYTES = 64 << 20
DISCARD_S = 5.0
DISCARD_PAUSE_S = 0.2
_STATUSES = {
    "invalid_argument": 422,
    "not_found": 404,
    "conflict": 409,
    "stale": 409,
    "overloaded": 503,
    "unavailable": 503,
    "standby": 503,
    "storage_full": 507,
    "tokens": 503,
    "missing_dependency": 501,
    "data_error": 422,
}


class ErrorBody(BaseModel):
    """The body of every error response."""

    code: str = Field(description="Stable, for programs", examples=["invalid_argument"])
    message: str = Field(description="What happened")
    hint: str = Field(description="What to do next")
    details: list[dict[str, str]] = Field(default=[], description="One entry for each wrong field")


class EdgeMiddleware:
    """Around everything, files of the dashboard too: the name a call used, and what browsers must not make of an answer."""

    def __init__(self, app: ASGIApp, gatekeeper: Gatekeeper, audit_log: AuditLog, standing: Standing) -> None:
        self._app = app
        self._gatekeeper = gatekeeper
        self._audit_log = audit_log
        self._standing = standing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = connection_of(scope, self._gatekeeper)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                if b"x-content-type-options" not in names:
                    message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
                message["headers"] = [*message["headers"], (b"strata-role", self._standing.role.encode())]
            await send(message)

        try:
            self._gatekeeper.check_host(_header(scope, b"host"), connection)
        except Forbidden as refusal:
            _audit_refusal(self._audit_log, scope, connection, None, refusal)
            await _refusal(refusal)(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)


class AccessMiddleware:
    """Around the API: who is calling, whether they may, and how much they may send. Changes and refusals are written down."""

    def __init__(self, app: ASGIApp, gatekeeper: Gatekeeper, audit_log: AuditLog, standing: Standing) -> None:
        self._app = app
        self._gatekeeper = gatekeeper
        self._audit_log = audit_log
        self._standing = standing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        method, path = scope["method"], scope["path"]
        changes = method not in ("GET", "HEAD", "OPTIONS")
        connection = connection_of(scope, self._gatekeeper)
        scope.setdefault("state", {})["connection"] = connection
        principal: Principal | None = None
        try:
            need = need_of(method, path, scope["query_string"].decode("latin-1"))
            if need.role is not None:
                principal = self._gatekeeper.identify(
                    connection,
                    authorization=headers.get("authorization", ""),
                    cookie=session_cookie(headers.get("cookie", ""), scope),
                )
                scope["state"]["principal"] = principal
                need.check(principal)
            if changes:
                self._gatekeeper.check_origin(headers.get("host", ""), headers.get("origin", ""))
        except Forbidden as refusal:
            _audit_refusal(self._audit_log, scope, connection, principal, refusal)
            await _refusal(refusal)(scope, receive, send)
            return
        if changes and path not in READERS_CHANGE:
            try:
                await self._standing.confirmed()
            except Standby as refusal:
                await _discard(receive)
                await _redirect(refusal, scope)(scope, receive, send)
                return
        if changes and principal is not None:
            send = self._audited(scope, send, principal, connection)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > NUMBER_DIGITS or int(length) > BODY_LIMIT_BYTES:
            await _discard(receive)
            await _too_large()(scope, receive, send)
            return
        taken, complete = 0, False
        until_s = asyncio.get_running_loop().time() + BODY_TIMEOUT_S

        async def limited() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408) from None
            taken += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if taken > BODY_LIMIT_BYTES:
                if not complete:
                    await _discard(receive)
                raise HTTPException(413)
            return message

        await self._app(scope, limited, send)

    def _audited(self, scope: Scope, send: Send, principal: Principal, connection: Connection) -> Send:
        """Every call that was let through and changes something is written down when it is answered; one that is refused
        after all by `_audit_refusal`."""

        async def audited(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] not in (401, 403):
                status = message["status"]
                route = scope.get("route")
                names = scope.get("path_params") or scope["state"].get("created") or {}
                self._audit_log.add(
                    who=principal.name,
                    role=principal.role,
                    action=f"{scope['method']} {route.path if route is not None else scope['path'][:100]}",
                    target=" ".join(str(name) for name in names.values()),
                    outcome="allowed" if status < 400 else "failed",
                    reason="" if status < 400 else f"answered {status}",
                    client=connection.client,
                )
            await send(message)

        return audited


class MetricsOnly:
    """For a listener of its own: whether the coordinator is up and how it is doing, and nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/api/health", "/metrics"):
            body = ErrorBody(
                code="not_found",
                message="This port serves only /api/health and /metrics.",
                hint="Use the port of the API for everything else.",
            )
            await json_response(body.model_dump(), status=404)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _audit_refusal(
    audit_log: AuditLog,
    scope: Scope,
    connection: Connection,
    principal: Principal | None,
    refusal: Forbidden,
) -> None:
    audit_log.add(
        who=principal.name if principal is not None else "unknown",
        role=principal.role if principal is not None else "",
        action=f"{scope['method']} {scope['path'][:100]}",
        outcome="refused",
        reason=refusal.message,
        client=connection.client,
    )


def connection_of(scope: Scope, gatekeeper: Gatekeeper) -> Connection:
    """What `HttpConnection` knows about the other end; for an application without one, the addresses."""
    known = scope.get("strata.connection")
    if isinstance(known, Connection):
        return known
    client, server = scope.get("client"), scope.get("server")
    return Connection(tuple(client) if client else None, tuple(server) if server else None, gatekeeper.owners)


def cookie_name(scope: Scope) -> str:
    """Cookies know no ports: two coordinators on one machine must not sign each other out."""
    return f"strata_session_{scope['server'][1]}"


def session_cookie(header: str, scope: Scope) -> str:
    name = cookie_name(scope)
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name), "")


def _redirect(refusal: Standby, scope: Scope) -> Response:
    """To the coordinator that leads, with the same method and body; for later, where none does."""
    if refusal.leader is None:
        return json_response(_error_body(refusal), status=503, headers={"Retry-After": "1"})
    query = scope["query_string"].decode("latin-1")
    path = quote(scope["path"], safe="/%:@!$&'()*+,;=-._~")
    headers = {
        "Location": f"{refusal.leader.http}{path}" + (f"?{query}" if query else ""),
        "Strata-Leader": refusal.leader.http,
    }
    return json_response(_error_body(refusal), status=307, headers=headers)


def _refusal(refusal: Forbidden) -> Response:
    headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else None
    return json_response(_error_body(refusal), status=refusal.status, headers=headers)


async def _discard(receive: Receive) -> None:
    """Take the rest of a body that is too large, within bounds: a client that is still sending would not read the answer."""
    taken = 0
    until_s = asyncio.get_running_loop().time() + DISCARD_S
    with suppress(TimeoutError):
        while taken < DISCARD_BYTES:
            now_s = asyncio.get_running_loop().time()
            async with asyncio.timeout_at(min(until_s, now_s + DISCARD_PAUSE_S)):
                message = await receive()
            taken += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(StrataError)
    async def strata_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, StrataError)
        if isinstance(error, Forbidden):
            principal = getattr(request.state, "principal", None)
            audit_log, connection = request.app.state.audit_log, request.state.connection
            _audit_refusal(audit_log, request.scope, connection, principal, error)
            return _refusal(error)
        if isinstance(error, Standby):  # Since the call was let in.
            return _redirect(error, request.scope)
        return json_response(_error_body(error), status=_STATUSES.get(error.code, 500))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        details = [
            {"field": ".".join(str(part)[:80] for part in e["loc"]), "message": str(e["msg"])[:300]}
            for e in error.errors()[:50]
        ]
        malformed = any(e["type"] == "json_invalid" for e in error.errors())
        body = ErrorBody(
            code="malformed" if malformed else "invalid_argument",
            message="The body is not valid JSON."
            if malformed
            else "; ".join(f"{d['field']}: {d['message']}" for d in details[:5]),
            hint="GET /docs shows what this call takes.",
            details=details,
        )
        return json_response(body.model_dump(), status=400 if malformed else 422)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 413:
            return _too_large()
        if error.status_code == 408:
            return _too_slow()
        codes = {404: "not_found", 405: "method_not_allowed", 400: "malformed"}
        body = ErrorBody(
            code=codes.get(error.status_code, "http_error"),
            message=f"{request.method} {request.url.path[:200]}: {error.detail}",
            hint="GET /docs lists every call.",
        )
        headers = dict(error.headers) if error.headers else None
        return json_response(body.model_dump(), status=error.status_code, headers=headers)

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> Response:
        body = ErrorBody(
            code="internal",
            message="Internal error in the coordinator; nothing was changed.",
            hint="Its log has the details. Please report it.",
        )
        return json_response(body.model_dump(), status=500)

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, error: Exception) -> Response:
        body = ErrorBody(
            code="malformed", message="The body is nested too deeply.", hint="Send less deeply nested JSON."
        )
        return json_response(body.model_dump(), status=400)


def _error_body(error: StrataError) -> dict[str, Any]:
    details = getattr(error, "details", [])
    return ErrorBody(code=error.code, message=error.message, hint=error.hint, details=details).model_dump()


def _too_large() -> Response:
    body = ErrorBody(
        code="too_large",
        message=f"The body is larger than {BODY_LIMIT_BYTES // 1024} KiB.",
        hint="Send less: the API takes descriptions, not data.",
    )
    return json_response(body.model_dump(), status=413, headers={"Connection": "close"})


def _too_slow() -> Response:
    body = ErrorBody(
        code="too_slow",
        message=f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.",
        hint="Send it in one piece.",
    )
    return json_response(body.model_dump(), status=408, headers={"Connection": "close"})


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
