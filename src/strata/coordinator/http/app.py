"""The HTTP face: the API of the contract, its OpenAPI document, live events and Prometheus metrics.

Listings come from ready-made pages. Who may call, how much they may send and what a refusal looks like is the
door's business.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, cast

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp

import strata
from strata.coordinator.auth import Gatekeeper
from strata.coordinator.http.dashboard import Dashboard
from strata.coordinator.http.docs_page import install_docs_page
from strata.coordinator.http.event_models import StreamEvent
from strata.coordinator.http.logs import install_log_routes
from strata.coordinator.http.metrics import install_metric_routes
from strata.coordinator.http.middleware import Door, ErrorBody, install_error_handlers, json_response
from strata.coordinator.http.pages import Page
from strata.coordinator.http.params import NOT_FOUND, Limit, NameInPath, Words
from strata.coordinator.http.tasks import install_task_routes
from strata.coordinator.inspection.checkpoints import Verifications, VerificationView
from strata.coordinator.inspection.datasets import Previews, PreviewView, count_samples
from strata.coordinator.runtime import Runtime
from strata.core import checks, views
from strata.core.messages import (
    CheckpointId,
    DatasetAccepted,
    DatasetId,
    DatasetSpec,
    JobId,
    RegisterDataset,
    Unknown,
    WorkerId,
)
from strata.core.task_views import TaskView


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
_STREAM_EVENT = f"#/components/schemas/{StreamEvent.__name__}"
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorBody, "description": "It exists already, and differs"}
}


def create_app(runtime: Runtime, gatekeeper: Gatekeeper) -> ASGIApp:
    app = FastAPI(
        title="Strata coordinator",
        version=strata.__version__,
        description="Who is alive, who reads which data, which checkpoint is safe. Times are Unix seconds.",
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    engine, pages = runtime.engine, runtime.pages
    previews = Previews()
    verifications = Verifications()

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
        return json_response(views.dataset(cluster, reply.spec), status=201 if reply.created else 200)

    @app.get(
        "/api/datasets/{dataset_id}/shards",
        response_model=views.ShardPlanView,
        responses=NOT_FOUND,
        tags=["data"],
    )
    async def shards(
        dataset_id: NameInPath,
        epoch: Annotated[int | None, Query(ge=0, le=checks.SAMPLES_LIMIT)] = None,
        job_id: Words = None,
        offset: Annotated[int, Query(ge=0, le=checks.SHARDS_LIMIT)] = 0,
        limit: Limit = 10_000,
    ) -> Response:
        """Who holds which range, ten thousand shards at a time."""
        cluster = await engine.settled()
        spec = cluster.datasets.get(DatasetId(dataset_id))
        job = JobId(job_id) if job_id is not None else None
        key = views.find_plan(cluster, spec.dataset_id, job=job, epoch=epoch)
        if key is None:
            raise Unknown(
                "shard plan of dataset",
                dataset_id,
                hint="A plan exists once a worker has joined, and for the last epochs that were begun.",
            )
        return json_response(views.shard_plan(cluster, key, offset=offset, limit=limit))

    @app.get(
        "/api/datasets/{dataset_id}/audit",
        response_model=list[views.AuditView],
        responses=NOT_FOUND,
        tags=["data"],
    )
    async def audit(
        dataset_id: NameInPath,
        epoch: Annotated[int | None, Query(ge=0, le=checks.SAMPLES_LIMIT)] = None,
        job_id: Words = None,
    ) -> Response:
        """What the completed checkpoints prove: each sample of an epoch exactly once, or what is not."""
        cluster = await engine.settled()
        job = JobId(job_id) if job_id is not None else None
        return json_response(views.audits(cluster, DatasetId(dataset_id), job=job, epoch=epoch))

    @app.get(
        "/api/datasets/{dataset_id}/preview", response_model=PreviewView, responses=NOT_FOUND, tags=["data"]
    )
    async def preview(
        dataset_id: NameInPath, worker_id: Words = None, limit: Annotated[int, Query(ge=1, le=20)] = 5
    ) -> Response:
        """Real samples: those `worker_id` reads now, or the first of the dataset."""
        cluster = await engine.settled()
        spec = cluster.datasets.get(DatasetId(dataset_id))
        worker = WorkerId(worker_id) if worker_id is not None else None
        return json_response(await previews.show(cluster, spec, worker, limit))

    @app.get("/api/checkpoints", response_model=list[views.CheckpointView], tags=["checkpoints"])
    async def checkpoints(request: Request) -> Response:
        return await page("checkpoints", request)

    @app.post(
        "/api/checkpoints/{checkpoint_id}/verify",
        response_model=VerificationView,
        responses={202: {"model": VerificationView, "description": "It is being read"}, **NOT_FOUND},
        tags=["checkpoints"],
    )
    async def verify_checkpoint(checkpoint_id: NameInPath) -> Response:
        """Read every byte again and compare it with the manifest. 202 while that goes on: ask again."""
        found = await verifications.verify(await engine.settled(), CheckpointId(checkpoint_id))
        return json_response(found, status=202 if found.status == "verifying" else 200)

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

    @app.get("/api/tasks", response_model=list[TaskView], tags=["tasks"])
    async def tasks(request: Request) -> Response:
        return await page("tasks", request)

    @app.get("/api/dashboard", response_model=views.DashboardView, tags=["coordinator"])
    async def dashboard(request: Request) -> Response:
        return await page("dashboard", request)

    @app.get(
        "/api/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {"schema": {"$ref": _STREAM_EVENT}}}}},
        tags=["coordinator"],
    )
    async def events(request: Request) -> StreamingResponse:
        """Everything that happens, as server-sent events. Resumes after `Last-Event-ID`; `resync` means: reload."""
        last = request.headers.get("last-event-id")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(runtime.feed.follow(last), media_type="text/event-stream", headers=headers)

    @app.get("/api/events/recent", response_model=list[StreamEvent], tags=["coordinator"])
    async def recent_events() -> Response:
        """What happened lately, oldest first, with the ids the stream gave it: joins, losses, saves, recoveries, tasks."""
        return Response(
            runtime.feed.recent(), media_type="application/json", headers={"Cache-Control": "no-store"}
        )

    install_log_routes(app, runtime)
    install_task_routes(app, runtime)
    install_metric_routes(app, runtime)
    install_docs_page(app)
    install_error_handlers(app)
    _document_units(app)
    return Dashboard(Door(app, gatekeeper))


def _document_units(app: FastAPI) -> None:
    """The unit of every figure stands in the document, beside its name."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        properties = document["components"]["schemas"]["MetricsView"]["properties"]
        for f in fields(views.MetricsView):
            properties[f.name]["description"] = f"In {f.metadata['unit']}."
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _page_response(page: Page, request: Request) -> Response:
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(page.body) > 1024:
        headers["Content-Encoding"] = "gzip"
        return Response(page.gzip, media_type="application/json", headers=headers)
    return Response(page.body, media_type="application/json", headers=headers)
