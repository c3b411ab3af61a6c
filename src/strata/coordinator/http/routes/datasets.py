"""Datasets over HTTP: registered, and for each who reads which shard, what was trained, and what its samples look like."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import (
    NOT_FOUND,
    Limit,
    NameFilter,
    NameInPath,
    Responses,
    ThePrincipal,
    TheRuntime,
    page_response,
)
from strata.coordinator.http.middleware import ErrorBody, json_response
from strata.coordinator.inspection.datasets import PreviewView
from strata.core import checks, views
from strata.core.messages import (
    DatasetAccepted,
    DatasetId,
    DatasetSpec,
    JobId,
    RegisterDataset,
    RemoveDataset,
    Unknown,
    WorkerId,
)

router = APIRouter(prefix="/api/datasets", tags=["data"])

_REGISTERED: Responses = {
    200: {"model": views.DatasetView, "description": "Already registered, with the same values"},
    409: {"model": ErrorBody, "description": "It exists already, and differs"},
}
_IN_USE: Responses = {409: {"model": ErrorBody, "description": "A task reads it"}}
Epoch = Annotated[int | None, Query(ge=0, le=checks.SAMPLES_LIMIT)]


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


@router.get("", response_model=list[views.DatasetView])
async def datasets(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "datasets", request)


@router.post("", response_model=views.DatasetView, status_code=201, responses=_REGISTERED)
async def register_dataset(
    runtime: TheRuntime, principal: ThePrincipal, request: Request, body: RegisterDatasetBody
) -> Response:
    request.state.created = {"dataset_id": body.dataset_id}
    checks.identifier("dataset_id", body.dataset_id)
    total, files = await runtime.inspection.count(body.path, body.format, body.total_samples, principal)
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
    reply = cast(
        DatasetAccepted, await runtime.engine.submit(RegisterDataset(spec=spec), client=principal.client)
    )
    cluster = await runtime.engine.settled()
    return json_response(views.dataset(cluster, reply.spec), status=201 if reply.created else 200)


@router.delete("/{dataset_id}", status_code=204, responses={**NOT_FOUND, **_IN_USE})
async def remove_dataset(runtime: TheRuntime, principal: ThePrincipal, dataset_id: NameInPath) -> Response:
    """Unregister a dataset and its plans. Files are not touched."""
    command = RemoveDataset(dataset_id=DatasetId(dataset_id), reason=f"removed by {principal.name}")
    await runtime.engine.submit(command, client=principal.client)
    return Response(status_code=204)


@router.get("/{dataset_id}/shards", response_model=views.ShardPlanView, responses=NOT_FOUND)
async def shards(
    runtime: TheRuntime,
    dataset_id: NameInPath,
    epoch: Epoch = None,
    job_id: NameFilter = None,
    offset: Annotated[int, Query(ge=0, le=checks.SHARDS_LIMIT)] = 0,
    limit: Limit = 10_000,
) -> Response:
    """Which worker is assigned which range, ten thousand shards at a time."""
    cluster = await runtime.engine.settled()
    spec = cluster.datasets.get(DatasetId(dataset_id))
    job = JobId(job_id) if job_id is not None else None
    key = views.find_plan(cluster, spec.dataset_id, job=job, epoch=epoch)
    if key is None:
        raise Unknown(
            "shard plan of dataset",
            dataset_id,
            hint="A plan exists once a worker has joined, and only for the last epochs that were started.",
        )
    return json_response(views.shard_plan(cluster, key, offset=offset, limit=limit))


@router.get("/{dataset_id}/audit", response_model=list[views.AuditView], responses=NOT_FOUND)
async def audit(
    runtime: TheRuntime, dataset_id: NameInPath, epoch: Epoch = None, job_id: NameFilter = None
) -> Response:
    """Whether each sample of an epoch was trained exactly once, according to the completed checkpoints."""
    cluster = await runtime.engine.settled()
    job = JobId(job_id) if job_id is not None else None
    return json_response(views.audits(cluster, DatasetId(dataset_id), job=job, epoch=epoch))


@router.get("/{dataset_id}/preview", response_model=PreviewView, responses=NOT_FOUND)
async def preview(
    runtime: TheRuntime,
    principal: ThePrincipal,
    dataset_id: NameInPath,
    worker_id: NameFilter = None,
    limit: Annotated[int, Query(ge=1, le=20)] = 5,
) -> Response:
    """Samples that `worker_id` reads now, or the first ones of the dataset."""
    cluster = await runtime.engine.settled()
    spec = cluster.datasets.get(DatasetId(dataset_id))
    worker = WorkerId(worker_id) if worker_id is not None else None
    return json_response(await runtime.inspection.preview(cluster, spec, worker, limit, principal))
