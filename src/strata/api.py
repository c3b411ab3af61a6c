"""Calling a coordinator's HTTP API: the command line and `strata.client` do it this way. Standard library only.

A coordinator that cannot be reached is `Unreachable`, one that refuses `ApiError`; nothing else is raised. The token is
`STRATA_TOKEN` where none is given.

`api` is an address, or several between commas: the coordinator that leads is found among them (`strata.leader`). A standby answers
a call that changes something with who leads; the call goes there if the user has named that address, or if both are verified by
TLS. A token goes to no other place, whatever an answer says. A call that changes something and may have arrived is not repeated.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import IO, Any
from urllib.parse import urlsplit

from strata.backoff import Backoff
from strata.errors import StrataError
from strata.leader import LEADER_HEADER, ROLE_HEADER, Coordinators

DEFAULT_API = "http://127.0.0.1:3000"
TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 45.0
"""A stream of events is never silent for longer than a third of this."""
FIRST_RETRY_S, LONGEST_RETRY_S = 0.2, 1.0
SEARCH_S = 10.0
"""How long a call waits for a coordinator to lead."""

_found: dict[str, Coordinators] = {}
"""By what a caller has given as addresses: who led among them last."""


class Unreachable(StrataError):
    """The coordinator does not answer."""

    code = "unreachable"


class ApiError(StrataError):
    """The coordinator refused the request; `answer_code` is what the API calls the refusal, for programs."""

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
    coordinators = _coordinators(api)
    search = coordinators.search()
    backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, budget_s=SEARCH_S)
    changes = data is not None or method is not None
    try:
        token = token or os.environ.get("STRATA_TOKEN", "")
        given = {**(headers or {}), **({"Authorization": f"Bearer {token}"} if token else {})}
        if data is not None:
            given["Content-Type"] = "application/json"
        while True:
            request = urllib.request.Request(search.address + path, data=data, headers=given, method=method)
            try:
                answer = _opener(search.address).open(request, timeout=timeout_s or TIMEOUT_S)
            except urllib.error.HTTPError as error:
                with error:
                    said, leader = _standby(error)
                    if not said:
                        raise _refusal(error) from None
                is_next = search.failed(said, leader=leader)
            except urllib.error.URLError as error:  # It was not sent, or not all of it.
                if not coordinators.are_several:
                    raise
                is_next = search.failed(printable(str(error.reason)))
            except (http.client.HTTPException, OSError) as error:
                is_next = search.failed(printable(str(error) or type(error).__name__))
                if changes or not coordinators.are_several:
                    raise
            else:
                search.worked()
                return answer
            if is_next:
                continue
            if (pause_s := backoff.pause_s()) is None:
                raise _none_leads(api, search.report())
            time.sleep(pause_s)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise _silent(api, error) from None


def leader_url(api: str) -> str:
    """The address, of those in `api`, that answered last: for links that a browser opens."""
    return _coordinators(api).current


def _coordinators(api: str) -> Coordinators:
    if api not in _found:
        addresses = [each.strip().rstrip("/") for each in api.split(",") if each.strip()] or [api]
        verified = all(each.lower().startswith("https:") for each in addresses)
        _found[api] = Coordinators(addresses, follows_unlisted=verified)
    return _found[api]


def _standby(error: urllib.error.HTTPError) -> tuple[str, str]:
    """What a standby says that does not carry out a call, and who leads; empty where it is no standby's answer."""
    leader = error.headers.get(LEADER_HEADER, "").rstrip("/")
    if error.code == 307 and leader:
        parts = urlsplit(leader)
        return "it is a standby", leader if parts.scheme in ("http", "https") and parts.netloc else ""
    if error.code == 503 and error.headers.get(ROLE_HEADER, "") == "standby":
        return "it is a standby and knows no leader", ""
    return "", ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Those of a proxy in front of a coordinator are followed, without the token where they lead to another address."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        if headers.get(LEADER_HEADER):
            return None
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and _origin(following.full_url) != _origin(req.full_url):
            following.remove_header("Authorization")
        return following


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _opener(address: str) -> urllib.request.OpenerDirector:
    if not address.lower().startswith("https:"):
        return urllib.request.build_opener(_Redirects)
    from strata.rpc.tls import ssl_context

    return urllib.request.build_opener(_Redirects, urllib.request.HTTPSHandler(context=ssl_context()))


def _none_leads(api: str, report: str) -> Unreachable:
    return Unreachable(
        f"None of the coordinators leads: {report}.",
        hint="Check their logs, and pass all their addresses, separated by commas, with --api (or STRATA_API_URL).",
    )


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
        return ApiError("http_error", f"The coordinator returned HTTP {error.code}.", "")


def _not_a_coordinator(api: str) -> Unreachable:
    return Unreachable(
        f"The server at {api} is not a coordinator.",
        hint="Pass the address that `strata serve` printed with --api (or STRATA_API_URL).",
    )


def printable(text: str, limit: int = 200) -> str:
    """Text from elsewhere, safe and short enough for a line of a message."""
    return "".join(c if c.isprintable() else "�" for c in text[:limit])
