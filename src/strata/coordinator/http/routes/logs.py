"""The log over HTTP: searched, and followed live as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse

from strata.coordinator.http.dependencies import (
    Limit,
    NameFilter,
    TheGatekeeper,
    ThePrincipal,
    TheRuntime,
    Timestamp,
)
from strata.coordinator.http.middleware import json_response
from strata.coordinator.logs.archive import LogFilter
from strata.coordinator.logs.store import LogStore, Missed
from strata.core import views

router = APIRouter(tags=["logs"])

ENTRY_ID = r"^log_[0-9a-f]{1,16}$"
EntryId = Annotated[str | None, Query(pattern=ENTRY_ID)]
Level = Annotated[Literal["debug", "info", "warn", "error"] | None, Query(description="Minimum level")]
Text = Annotated[
    str | None, Query(max_length=256, description="Text that the message must contain, ignoring case")
]


async def _wanted(
    level: Level = None,
    worker_id: NameFilter = None,
    q: Text = None,
    after: EntryId = None,
    before: EntryId = None,
    since: Timestamp = None,
    until: Timestamp = None,
) -> LogFilter:
    """Search the log. `after` and `before` are ids of entries, `since` and `until` are times."""
    return LogFilter(
        level=level,
        worker_id=worker_id,
        text=q or None,
        after=after,
        before=before,
        since_s=since,
        until_s=until,
    )


Wanted = Annotated[LogFilter, Depends(_wanted)]


@router.get("/api/logs", response_model=list[views.LogView])
async def all_logs(
    runtime: TheRuntime, wanted: Wanted, task_id: NameFilter = None, limit: Limit = 100
) -> Response:
    """Newest first."""
    return json_response(await runtime.logs.search(limit, replace(wanted, task_id=task_id)))


@router.get(
    "/api/logs/live",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def live_logs(
    runtime: TheRuntime,
    gatekeeper: TheGatekeeper,
    principal: ThePrincipal,
    wanted: Wanted,
    request: Request,
    task_id: NameFilter = None,
) -> StreamingResponse:
    """Entries as they arrive, as `log` events; `missed` counts those that a slow reader has not received.

    Resumes after `Last-Event-ID`, or after the entry `after`.
    """
    last = request.headers.get("last-event-id", "")
    after = last if re.fullmatch(ENTRY_ID, last) else wanted.after
    found = _stream(runtime.logs, replace(wanted, task_id=task_id, after=after))
    return runtime.log_followers.respond(found, request, gatekeeper, principal)


async def _stream(logs: LogStore, wanted: LogFilter) -> AsyncGenerator[bytes]:
    yield b"retry: 1000\n\n"
    async for news in logs.follow(wanted):
        if isinstance(news, Missed):
            yield b"event: missed\ndata: %s\n\n" % orjson.dumps(news)
        elif news:
            yield b"".join(
                b"id: %s\nevent: log\ndata: %s\n\n" % (entry.id.encode(), orjson.dumps(entry))
                for entry in news
            )
        else:
            yield b": still here\n\n"
