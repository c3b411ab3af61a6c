"""Around every HTTP call: who may make it, how much it may send, and how every refusal looks.

Every error is JSON with a stable `code`, a `message` that says what happened and a `hint` that says what to do; no
input gives a traceback. Changing calls check Host and Origin. A body has a limit in bytes and in seconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.coordinator.auth import Forbidden, Gatekeeper
from strata.errors import StrataError

BODY_LIMIT_BYTES = 1 << 20
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
    "missing_dependency": 501,
    "data_error": 422,
}


class ErrorBody(BaseModel):
    """What every refused call answers."""

    code: str = Field(description="Stable, for programs", examples=["invalid_argument"])
    message: str = Field(description="What happened")
    hint: str = Field(description="What to do next")
    details: list[dict[str, str]] = Field(default=[], description="One entry for each wrong field")


class AccessMiddleware:
    """The outermost layer of the API: the role a call needs, and how much it may send."""

    def __init__(self, app: ASGIApp, gatekeeper: Gatekeeper) -> None:
        self._app = app
        self._gatekeeper = gatekeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        changes = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        try:
            if scope["path"] != "/api/health":
                self._gatekeeper.check_role(
                    headers.get("authorization", ""), "operator" if changes else "viewer"
                )
            if changes:
                self._gatekeeper.check_browser(headers.get("host", ""), headers.get("origin", ""))
        except Forbidden as refusal:
            response = json_response(_error_body(refusal), status=refusal.status)
            await response(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_LIMIT_BYTES:
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


async def _discard(receive: Receive) -> None:
    """Take the rest of a body that is too large, within bounds: whoever is still sending would not read the answer."""
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
            code="malformed", message="The body is nested too deeply.", hint="Send plainer JSON."
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
        hint="Send it in one go.",
    )
    return json_response(body.model_dump(), status=408, headers={"Connection": "close"})


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status_code=status, media_type="application/json", headers=headers)
