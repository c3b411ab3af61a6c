"""The log over HTTP: searched, and followed live as server-sent events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Literal

import orjson
from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse

from strata.coordinator.http.middleware import json_response
from strata.coordinator.http.params import NOT_FOUND, Limit, Moment, NameInPath, Words
from strata.coordinator.logs.archive import LogFilter
from strata.coordinator.logs.store import LogStore, Missed
from strata.coordinator.runtime import Runtime
from strata.core import views
from strata.core.messages import TaskId

ENTRY_ID = r"^log_[0-9a-f]{1,16}$"
EntryId = Annotated[str | None, Query(pattern=ENTRY_ID)]
Level = Annotated[Literal["debug", "info", "warn", "error"] | None, Query(description="Least severe wanted")]
Text = Annotated[
    str | None, Query(max_length=256, description="Text that must be in the message, in any case")
]


def wanted_entries(
    level: Level = None,
    worker_id: Words = None,
    q: Text = None,
    after: EntryId = None,
    before: EntryId = None,
    since: Moment = None,
    until: Moment = None,
) -> LogFilter:
    """`after` and `before` are ids of entries, `since` and `until` times."""
    return LogFilter(
        level=level,
        worker_id=worker_id,
        text=q or None,
        after=after,
        before=before,
        since_s=since,
        until_s=until,
    )


Wanted = Annotated[LogFilter, Depends(wanted_entries)]


def install_log_routes(app: FastAPI, runtime: Runtime) -> None:
    logs = runtime.logs

    @app.get("/api/logs", response_model=list[views.LogView], tags=["logs"])
    async def all_logs(wanted: Wanted, task_id: Words = None, limit: Limit = 100) -> Response:
        """Newest first."""
        return json_response(await logs.search(limit, replace(wanted, task_id=task_id)))

    @app.get(
        "/api/logs/live",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
        tags=["logs"],
    )
    async def live_logs(wanted: Wanted, request: Request, task_id: Words = None) -> StreamingResponse:
        """Entries as they come, as `log` events; `missed` says how many a slow reader was not told of.

        Resumes after `Last-Event-ID`, or after the entry `after`.
        """
        logs.check_followers()
        last = request.headers.get("last-event-id", "")
        after = last if re.fullmatch(ENTRY_ID, last) else wanted.after
        stream = _stream(logs, replace(wanted, task_id=task_id, after=after))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @app.get(
        "/api/tasks/{task_id}/logs", response_model=list[views.LogView], responses=NOT_FOUND, tags=["tasks"]
    )
    async def task_logs(task_id: NameInPath, wanted: Wanted, limit: Limit = 100) -> Response:
        """That task's entries, newest first."""
        (await runtime.engine.settled()).tasks.get(TaskId(task_id))
        return json_response(await logs.search(limit, replace(wanted, task_id=task_id)))


async def _stream(logs: LogStore, wanted: LogFilter) -> AsyncIterator[bytes]:
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
