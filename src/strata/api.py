"""Calling a coordinator's HTTP API: the command line and `strata.client` do it this way. Standard library only.

A coordinator that cannot be reached is `Unreachable`, one that refuses `ApiError`; nothing else is raised. The token is
`STRATA_TOKEN` where none is given.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from strata.errors import StrataError

DEFAULT_API = "http://127.0.0.1:3000"
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 45.0
"""A stream of events is never silent for longer than a third of this."""


class Unreachable(StrataError):
    """The coordinator does not answer."""

    code = "unreachable"


class ApiError(StrataError):
    """The coordinator answered with a refusal."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.answer_code = code


Answered = ApiError  # Its name in earlier versions.


def get(api: str, path: str, *, token: str = "") -> Any:
    return _call(api, path, token=token)


def get_rows(api: str, path: str, *, token: str = "") -> list[dict[str, Any]]:
    """A listing: whatever answers otherwise is not a coordinator."""
    found = get(api, path, token=token)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise _not_a_coordinator(api)
    return found


def get_facts(api: str, path: str, *, having: str, token: str = "") -> dict[str, Any]:
    """One record, known by a key it must have."""
    found = get(api, path, token=token)
    if not isinstance(found, dict) or having not in found:
        raise _not_a_coordinator(api)
    return found


def post(
    api: str, path: str, body: object | None = None, *, token: str = "", timeout_s: float | None = None
) -> Any:
    data = json.dumps(body if body is not None else {}).encode()
    return _call(api, path, data, token=token, timeout_s=timeout_s)


def post_facts(api: str, path: str, body: object, *, having: str, token: str = "") -> dict[str, Any]:
    """What was made, known by a key it must have."""
    made = post(api, path, body, token=token)
    if not isinstance(made, dict) or having not in made:
        raise _not_a_coordinator(api)
    return made


def delete(api: str, path: str, *, token: str = "") -> None:
    with _open(api, path, token=token, method="DELETE"):
        pass


def events(api: str, path: str, *, last_id: str = "") -> Iterator[tuple[str, Any]]:
    """Server-sent events, as (kind, data), until the coordinator ends the stream."""
    with _open(
        api, path, headers={"Last-Event-ID": last_id} if last_id else {}, timeout_s=STREAM_TIMEOUT_S
    ) as lines:
        try:
            kind = ""
            for line in lines:
                field, _, value = line.decode(errors="replace").rstrip("\n").partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    yield kind, json.loads(value)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise _silent(api, error) from None


def _call(
    api: str, path: str, data: bytes | None = None, *, token: str = "", timeout_s: float | None = None
) -> Any:
    with _open(api, path, data, token=token, timeout_s=timeout_s) as answer:
        try:
            return json.load(answer)
        except (http.client.HTTPException, OSError, ValueError) as error:
            raise _silent(api, error) from None


def _open(
    api: str,
    path: str,
    data: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    token: str = "",
    timeout_s: float | None = None,
    method: str | None = None,
) -> Any:
    try:
        url = api.rstrip("/") + path
        request = urllib.request.Request(url, data=data, headers=dict(headers or {}), method=method)
        if data is not None:
            request.add_header("Content-Type", "application/json")
        token = token or os.environ.get("STRATA_TOKEN", "")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        context = None
        if api.lower().startswith("https:"):
            from strata.rpc.tls import ssl_context

            context = ssl_context()
        return urllib.request.urlopen(request, timeout=timeout_s or TIMEOUT_S, context=context)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error) from None
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise _silent(api, error) from None


def _silent(api: str, error: Exception) -> Unreachable:
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    return Unreachable(
        f"No coordinator answers at {api or 'an empty address'}: {printable(str(reason))}.",
        hint="Start one with `strata serve`, or pass its address with --api (or STRATA_API_URL).",
    )


def _refusal(error: urllib.error.HTTPError) -> ApiError:
    try:
        body = json.load(error)
        return ApiError(body["code"], body["message"], body["hint"])
    except (ValueError, KeyError, TypeError, OSError):
        return ApiError("http_error", f"The coordinator answered {error.code}.", "")


def _not_a_coordinator(api: str) -> Unreachable:
    return Unreachable(
        f"What answers at {api} is not a coordinator.",
        hint="Pass the address that `strata serve` printed with --api (or STRATA_API_URL).",
    )


def printable(text: str, limit: int = 200) -> str:
    """Text from elsewhere, safe and short enough for a line of a message."""
    return "".join(c if c.isprintable() else "�" for c in text[:limit])
