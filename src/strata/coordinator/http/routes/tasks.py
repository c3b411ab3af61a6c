"""Tasks over HTTP: which recipes there are, and tasks created, stopped and run again.

A request is checked against its recipe before anything is written down; what is refused has changed nothing.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import (
    NOT_FOUND,
    Limit,
    NameInPath,
    Responses,
    ThePrincipal,
    TheRuntime,
    page_response,
)
from strata.coordinator.http.middleware import ErrorBody, json_response
from strata.coordinator.http.routes.logs import Wanted
from strata.coordinator.http.routes.metrics import goodput_view
from strata.coordinator.runtime import Runtime
from strata.core import checks, views
from strata.core.fleet import task_views
from strata.core.fleet.tasks import ENDED, MAX_GPUS_PER_WORKER, MAX_RETRIES, MAX_WORKERS
from strata.core.messages import (
    CreateTask,
    DatasetId,
    InvalidArgument,
    JobId,
    Overloaded,
    RestartTask,
    StopTask,
    TaskId,
    TaskSpec,
)
from strata.core.telemetry.goodput import GoodputView
from strata.errors import StrataError
from strata.launch.recipes import Recipe

router = APIRouter(prefix="/api", tags=["tasks"])

_CONFLICT: Responses = {409: {"model": ErrorBody, "description": "Not possible in this state"}}


class CreateTaskBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=checks.NAME_LIMIT, examples=["imagenet-resnet50"])
    type: str = Field(min_length=1, max_length=64, description="Name of a recipe", examples=["training"])
    dataset_id: str | None = Field(default=None, min_length=1, max_length=checks.NAME_LIMIT)
    worker_count: int = Field(default=1, ge=1, le=MAX_WORKERS)
    config: dict[str, Any] = Field(
        default={},
        description="What the recipe's schema allows",
        examples=[{"learning_rate": 0.001, "batch_size": 32}],
    )
    gpus_per_worker: int | None = Field(
        default=None, ge=0, le=MAX_GPUS_PER_WORKER, description="The recipe's when not given"
    )
    max_retries: int = Field(
        default=3, ge=0, le=MAX_RETRIES, description="Failed attempts allowed before the task fails"
    )


class TaskCreatedBody(BaseModel):
    task_id: str


class TaskAnswer(BaseModel):
    task_id: str
    status: Literal["pending", "running", "completed", "failed", "stopped"]
    reason: str


class RecipeBody(BaseModel):
    """A recipe that tasks can run."""

    name: str
    description: str
    config_schema: dict[str, Any] = Field(alias="schema", description="JSON Schema of a task's config")
    needs_dataset: bool
    max_workers: int | None
    gpus_per_worker: int | None = Field(
        description="Default for tasks that do not set it; null: one per worker if there are enough"
    )
    built_in: bool


@router.get("/recipes", response_model=list[RecipeBody])
async def list_recipes(runtime: TheRuntime) -> Response:
    """The recipes that tasks can run, each with the JSON Schema of its `config`."""
    return json_response([_recipe(recipe) for recipe in runtime.recipes])


@router.get("/tasks", response_model=list[task_views.TaskView])
async def tasks(runtime: TheRuntime, request: Request) -> Response:
    return await page_response(runtime, "tasks", request)


@router.post("/tasks", status_code=201, responses={**NOT_FOUND, **_CONFLICT})
async def create_task(
    runtime: TheRuntime, principal: ThePrincipal, request: Request, body: CreateTaskBody
) -> TaskCreatedBody:
    _as_json(body.config)  # Before anybody looks into it.
    recipe = runtime.recipes.get(body.type)
    recipe.check(body.config, worker_count=body.worker_count, dataset_id=body.dataset_id)
    shown, kept = recipe.split_secrets(body.config)
    gpus = body.gpus_per_worker
    if gpus is None:
        here = runtime.tasks.capacity().gpus if runtime.tasks is not None else 0
        gpus = recipe.gpus_for(body.config, worker_count=body.worker_count, gpus=here)
    spec = TaskSpec(
        task_id=TaskId(f"task-{secrets.token_hex(6)}"),
        name=body.name,
        type=body.type,
        dataset_id=DatasetId(body.dataset_id) if body.dataset_id is not None else None,
        worker_count=body.worker_count,
        config_json=_as_json(shown),
        gpus_per_worker=gpus,
        max_retries=body.max_retries,
    )
    await _keep_secrets(runtime, spec.task_id, kept)
    try:
        await runtime.engine.submit(CreateTask(spec=spec), client=principal.client)
    except StrataError:
        if runtime.task_secrets is not None:
            runtime.task_secrets.forget(spec.task_id)
        raise
    request.state.created = {"task_id": spec.task_id}
    return TaskCreatedBody(task_id=spec.task_id)


@router.get("/tasks/{task_id}", response_model=task_views.TaskView, responses=NOT_FOUND)
async def one_task(runtime: TheRuntime, task_id: NameInPath) -> Response:
    task = (await runtime.engine.settled()).tasks.get(TaskId(task_id))
    return json_response(task_views.task(task, orjson.loads(task.spec.config_json)))


@router.post("/tasks/{task_id}/stop", responses=NOT_FOUND)
async def stop_task(
    runtime: TheRuntime,
    task_id: NameInPath,
    wait: Annotated[
        float, Query(ge=0, le=60, description="Seconds to wait until its processes have exited")
    ] = 0,
) -> TaskAnswer:
    """Stop a task: its workers save a final checkpoint and exit; those that do not are killed. Stopping twice is allowed."""
    await runtime.engine.submit(StopTask(task_id=TaskId(task_id), reason="stop requested over the API"))
    return await _answer(runtime, task_id, wait)


@router.post("/tasks/{task_id}/restart", responses={**NOT_FOUND, **_CONFLICT})
async def restart_task(runtime: TheRuntime, task_id: NameInPath) -> TaskAnswer:
    """Run a failed or stopped task again, from its latest intact checkpoint."""
    cluster = await runtime.engine.settled()
    saved = cluster.checkpoints.latest(JobId(task_id))
    begins = f"step {saved.step}" if saved is not None else "step 0: no checkpoint"
    reason = f"restart requested; resumes at {begins}"
    await runtime.engine.submit(RestartTask(task_id=TaskId(task_id), reason=reason))
    return await _answer(runtime, task_id, 0)


@router.get("/tasks/{task_id}/logs", response_model=list[views.LogView], responses=NOT_FOUND)
async def task_logs(runtime: TheRuntime, task_id: NameInPath, wanted: Wanted, limit: Limit = 100) -> Response:
    """The task's log entries, newest first."""
    (await runtime.engine.settled()).tasks.get(TaskId(task_id))
    return json_response(await runtime.logs.search(limit, replace(wanted, task_id=task_id)))


@router.get("/tasks/{task_id}/goodput", response_model=GoodputView, responses=NOT_FOUND)
async def task_goodput(runtime: TheRuntime, task_id: NameInPath) -> Response:
    task = (await runtime.engine.settled()).tasks.get(TaskId(task_id))
    return json_response(goodput_view(runtime, JobId(task_id), task))


async def _keep_secrets(runtime: Runtime, task_id: str, kept: dict[str, str]) -> None:
    """Before the task is known: it must not start without."""
    if not kept:
        return
    hint = "Check the data directory: is the disk full?"
    if runtime.task_secrets is None:
        raise Overloaded("This coordinator has no folder to store secrets in.", hint=hint)
    try:
        await runtime.task_secrets.keep(task_id, kept)
    except OSError as error:
        raise Overloaded(f"The task's secrets cannot be stored: {error.strerror}.", hint=hint) from None


async def _answer(runtime: Runtime, task_id: str, wait_s: float) -> TaskAnswer:
    task = (await runtime.engine.settled()).tasks.get(TaskId(task_id))
    if wait_s and runtime.tasks is not None and task.status not in ENDED:
        task = await runtime.tasks.ended(TaskId(task_id), timeout_s=wait_s)
    return TaskAnswer(task_id=task_id, status=task.status, reason=task.reason)


def _as_json(config: dict[str, Any]) -> str:
    try:
        json.dumps(config, allow_nan=False)  # orjson would make null of it.
        return orjson.dumps(config).decode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            "config", f"cannot be written as JSON: {error}.", hint="Use plain, finite values."
        ) from None


def _recipe(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "description": recipe.description,
        "schema": recipe.shown_schema,
        "needs_dataset": recipe.needs_dataset,
        "max_workers": recipe.max_workers,
        "gpus_per_worker": recipe.gpus_per_worker,
        "built_in": recipe.built_in,
    }
