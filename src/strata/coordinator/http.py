"""The HTTP face: the API of the contract, its OpenAPI document, live events and Prometheus metrics.

Listings come from ready-made pages. Every error is JSON with a stable `code`, a `message` that says what
happened and a `hint` that says what to do; no input gives a traceback. Changing calls check Host and Origin.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Annotated, Any, Literal, cast

import orjson
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import strata
from strata.coordinator.auth import Forbidden, Gatekeeper
from strata.coordinator.logs import LogFilter
from strata.coordinator.pages import Page
from strata.coordinator.runtime import Runtime
from strata.coordinator.sampling import Previews, PreviewView, count_samples
from strata.core import checks, views
from strata.core.messages import (
    CreateTask,
    DatasetAccepted,
    DatasetId,
    DatasetSpec,
    InvalidArgument,
    JobId,
    RegisterDataset,
    StopTask,
    TaskId,
    TaskSpec,
    Unknown,
    WorkerId,
)
from strata.errors import StrataError

BODY_LIMIT_BYTES = 1 << 20
BODY_TIMEOUT_S = 20.0
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


class RegisterDatasetBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    dataset_id: str = Field(min_length=1, max_length=checks.NAME_LIMIT, examples=["imagenet-1k"])
    path: str = Field(min_length=1, max_length=checks.TEXT_LIMIT, examples=["/data/imagenet"])
    format: str = Field(min_length=1, max_length=64, examples=["parquet"])
    total_samples: int | None = Field(
        default=None, ge=1, le=checks.SAMPLES_LIMIT, description="Counted from the files when not given"
    )
    shard_size: int = Field(default=10_000, ge=1, le=checks.SAMPLES_LIMIT)
    shuffle: bool = False
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    metadata: dict[str, str] = Field(default={}, max_length=checks.PAIRS_LIMIT)


class CreateTaskBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=checks.NAME_LIMIT, examples=["imagenet-resnet50"])
    type: str = Field(min_length=1, max_length=64, examples=["training"])
    dataset_id: str | None = Field(default=None, min_length=1, max_length=checks.NAME_LIMIT)
    worker_count: int = Field(default=1, ge=1, le=100_000)
    config: dict[str, Any] = Field(default={}, examples=[{"learning_rate": 0.001, "batch_size": 32}])


class TaskCreatedBody(BaseModel):
    task_id: str


class TaskStoppedBody(BaseModel):
    task_id: str
    status: str
    reason: str


class HealthBody(BaseModel):
    status: Literal["ok"] = "ok"


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning}
    for status, meaning in {
        400: "The request is not well-formed",
        401: "A token is required",
        403: "Not allowed",
        408: "The body came too slowly",
        413: "The body is too large",
        422: "A value cannot be right",
        503: "Too much to do; try again",
    }.items()
}
_NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "No such thing"}}
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorBody, "description": "It exists already, and differs"}
}

Limit = Annotated[int, Query(ge=1, le=10_000)]
Level = Annotated[Literal["debug", "info", "warn", "error"] | None, Query(description="Least severe wanted")]
Words = Annotated[str | None, Query(max_length=checks.NAME_LIMIT)]
AfterId = Annotated[str | None, Query(pattern=r"^log_[0-9a-f]{1,16}$")]
NameInPath = Annotated[str, Path(max_length=checks.NAME_LIMIT)]


def create_app(runtime: Runtime, gatekeeper: Gatekeeper) -> ASGIApp:
    app = FastAPI(
        title="Strata coordinator",
        version=strata.__version__,
        description="Who is alive, who reads which data, which checkpoint is safe. Times are Unix seconds.",
        responses=_ERRORS,
        redoc_url=None,
    )
    engine, pages, logs = runtime.engine, runtime.pages, runtime.logs
    previews = Previews()

    async def page(name: str, request: Request) -> Response:
        return _page_response(await pages.get(name), request)

    @app.get("/api/health", tags=["coordinator"])
    async def health() -> HealthBody:
        return HealthBody()

    @app.get("/api/status", response_model=views.StatusView, tags=["coordinator"])
    async def status(request: Request) -> Response:
        return await page("status", request)

    @app.get("/api/workers", response_model=list[views.WorkerView], tags=["fleet"])
    async def workers(request: Request) -> Response:
        return await page("workers", request)

    @app.get("/api/datasets", response_model=list[views.DatasetView], tags=["data"])
    async def datasets(request: Request) -> Response:
        return await page("datasets", request)

    @app.post(
        "/api/datasets",
        response_model=views.DatasetView,
        status_code=201,
        responses={200: {"model": views.DatasetView, "description": "Registered already"}, **_CONFLICT},
        tags=["data"],
    )
    async def register_dataset(body: RegisterDatasetBody) -> Response:
        total, files = await count_samples(body.path, body.format, body.total_samples)
        spec = DatasetSpec(
            dataset_id=DatasetId(body.dataset_id),
            path=body.path,
            format=body.format,
            total_samples=total,
            shard_size=body.shard_size,
            shuffle=body.shuffle,
            seed=body.seed,
            metadata=body.metadata,
            files=files,
        )
        reply = cast(DatasetAccepted, await engine.submit(RegisterDataset(spec=spec)))
        cluster = await engine.settled()
        return _json(views.dataset(cluster, reply.spec), status=201 if reply.created else 200)

    @app.get(
        "/api/datasets/{dataset_id}/shards",
        response_model=views.ShardPlanView,
        responses=_NOT_FOUND,
        tags=["data"],
    )
    async def shards(
        dataset_id: NameInPath,
        epoch: Annotated[int | None, Query(ge=0, le=checks.SAMPLES_LIMIT)] = None,
        job_id: Words = None,
    ) -> Response:
        cluster = await engine.settled()
        spec = cluster.datasets.get(DatasetId(dataset_id))
        job = JobId(job_id) if job_id is not None else None
        key = views.find_plan(cluster, spec.dataset_id, job=job, epoch=epoch)
        if key is None:
            raise Unknown(
                "shard plan of dataset",
                dataset_id,
                hint="A plan exists once a worker has joined, and for the last epochs workers asked for.",
            )
        return _json(views.shard_plan(cluster, key))

    @app.get(
        "/api/datasets/{dataset_id}/preview", response_model=PreviewView, responses=_NOT_FOUND, tags=["data"]
    )
    async def preview(
        dataset_id: NameInPath, worker_id: Words = None, limit: Annotated[int, Query(ge=1, le=20)] = 5
    ) -> Response:
        """Real samples: those `worker_id` reads now, or the first of the dataset."""
        cluster = await engine.settled()
        spec = cluster.datasets.get(DatasetId(dataset_id))
        worker = WorkerId(worker_id) if worker_id is not None else None
        return _json(await previews.show(cluster, spec, worker, limit))

    @app.get("/api/checkpoints", response_model=list[views.CheckpointView], tags=["checkpoints"])
    async def checkpoints(request: Request) -> Response:
        return await page("checkpoints", request)

    @app.get("/api/barriers", response_model=list[views.BarrierView], tags=["fleet"])
    async def barriers(request: Request) -> Response:
        return await page("barriers", request)

    @app.get("/api/recoveries", response_model=list[views.RecoveryView], tags=["fleet"])
    async def recoveries(request: Request) -> Response:
        """Newest first, each with the seconds of its phases."""
        return await page("recoveries", request)

    @app.get("/api/metrics", response_model=views.MetricsView, tags=["metrics"])
    async def api_metrics(request: Request) -> Response:
        """MB/s of checkpoints completed lately, gRPC requests/s, workers, ms of barriers (p99) and of the last plan."""
        return await page("metrics", request)

    @app.get("/metrics", response_class=Response, tags=["metrics"])
    async def prometheus() -> Response:
        return Response(await runtime.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/api/logs", response_model=list[views.LogView], tags=["logs"])
    async def all_logs(
        limit: Limit = 100,
        level: Level = None,
        task_id: Words = None,
        worker_id: Words = None,
        q: Words = None,
        after: AfterId = None,
    ) -> Response:
        wanted = LogFilter(level=level, task_id=task_id, worker_id=worker_id, text=q, after=after)
        return _json(logs.newest(limit, wanted))

    @app.get("/api/tasks", response_model=list[views.TaskView], tags=["tasks"])
    async def tasks(request: Request) -> Response:
        return await page("tasks", request)

    @app.post("/api/tasks", status_code=201, responses={**_NOT_FOUND, **_CONFLICT}, tags=["tasks"])
    async def create_task(body: CreateTaskBody) -> TaskCreatedBody:
        try:
            json.dumps(body.config, allow_nan=False)  # orjson would make null of it.
            config_json = orjson.dumps(body.config).decode()
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument(
                "config", f"cannot be written as JSON: {error}.", hint="Use plain, finite values."
            ) from None
        spec = TaskSpec(
            task_id=TaskId(f"task-{secrets.token_hex(6)}"),
            name=body.name,
            type=body.type,
            dataset_id=DatasetId(body.dataset_id) if body.dataset_id is not None else None,
            worker_count=body.worker_count,
            config_json=config_json,
        )
        await engine.submit(CreateTask(spec=spec))
        return TaskCreatedBody(task_id=spec.task_id)

    @app.post("/api/tasks/{task_id}/stop", responses=_NOT_FOUND, tags=["tasks"])
    async def stop_task(task_id: NameInPath) -> TaskStoppedBody:
        await engine.submit(StopTask(task_id=TaskId(task_id), reason="asked to stop over the API"))
        task = (await engine.settled()).tasks.get(TaskId(task_id))
        return TaskStoppedBody(task_id=task_id, status=task.status, reason=task.reason)

    @app.get(
        "/api/tasks/{task_id}/logs", response_model=list[views.LogView], responses=_NOT_FOUND, tags=["tasks"]
    )
    async def task_logs(task_id: NameInPath, limit: Limit = 100, after: AfterId = None) -> Response:
        (await engine.settled()).tasks.get(TaskId(task_id))
        return _json(logs.newest(limit, LogFilter(task_id=task_id, after=after)))

    @app.get("/api/dashboard", response_model=views.DashboardView, tags=["coordinator"])
    async def dashboard(request: Request) -> Response:
        return await page("dashboard", request)

    @app.get(
        "/api/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
        tags=["coordinator"],
    )
    async def events(request: Request) -> StreamingResponse:
        """Everything that happens, as server-sent events. Resumes after `Last-Event-ID`; `resync` means: reload."""
        last = request.headers.get("last-event-id")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(runtime.feed.follow(last), media_type="text/event-stream", headers=headers)

    _install_error_handlers(app)
    return Door(app, gatekeeper)


class Door:
    """The outermost layer: who may come in, and how much they may carry."""

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
            response = _json(_error_body(refusal), status=refusal.status)
            await response(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > BODY_LIMIT_BYTES:
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
                raise HTTPException(413)
            return message

        await self._app(scope, limited, send)


def _install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(StrataError)
    async def strata_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, StrataError)
        return _json(_error_body(error), status=_STATUSES.get(error.code, 500))

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
        return _json(body.model_dump(), status=400 if malformed else 422)

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
        return _json(body.model_dump(), status=error.status_code, headers=headers)

    @app.exception_handler(RecursionError)
    async def too_deep(request: Request, error: Exception) -> Response:
        body = ErrorBody(
            code="malformed", message="The body is nested too deeply.", hint="Send plainer JSON."
        )
        return _json(body.model_dump(), status=400)


def _error_body(error: StrataError) -> dict[str, Any]:
    return ErrorBody(code=error.code, message=error.message, hint=error.hint).model_dump()


def _too_large() -> Response:
    body = ErrorBody(
        code="too_large",
        message=f"The body is larger than {BODY_LIMIT_BYTES // 1024} KiB.",
        hint="Send less: the API takes descriptions, not data.",
    )
    return _json(body.model_dump(), status=413, headers={"Connection": "close"})


def _too_slow() -> Response:
    body = ErrorBody(
        code="too_slow",
        message=f"The body did not come within {BODY_TIMEOUT_S:.0f} s.",
        hint="Send it in one go.",
    )
    return _json(body.model_dump(), status=408, headers={"Connection": "close"})


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _page_response(page: Page, request: Request) -> Response:
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(page.body) > 1024:
        headers["Content-Encoding"] = "gzip"
        return Response(page.gzip, media_type="application/json", headers=headers)
    return Response(page.body, media_type="application/json", headers=headers)
