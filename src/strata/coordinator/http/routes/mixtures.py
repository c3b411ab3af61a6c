"""The mixture that a job reads, over HTTP: its sources and weights, and requests to change them.

A request is journaled before it is answered; the job's ranks decide about it together, and its status says what they
decided (`strata.core.data.mixture_changes`).
"""

from __future__ import annotations

from typing import cast
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from strata.coordinator.http.dependencies import NOT_FOUND, NameInPath, Responses, ThePrincipal, TheRuntime
from strata.coordinator.http.middleware import ErrorBody, json_response
from strata.coordinator.runtime import Runtime
from strata.core import checks
from strata.core.data.mixture import MixtureError
from strata.core.data.mixture_changes import (
    Board,
    ChangeView,
    MixtureView,
    board_key,
    change_view,
    mixture_view,
)
from strata.core.fleet.values import Value
from strata.core.messages import Conflict, InvalidArgument, Swapped, SwapValue, Unknown

router = APIRouter(tags=["data"])

ATTEMPTS = 20
STEP_LIMIT = 2**53 - 1
_BUSY: Responses = {
    409: {"model": ErrorBody, "description": "Another caller is changing it at the same time"}
}


class ChangeWeightsBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    weights: dict[str, float] = Field(
        min_length=1,
        max_length=checks.PAIRS_LIMIT,
        examples=[{"code": 0.5}],
        description="New shares of some sources; the others divide the rest as they do now",
    )
    from_step: int = Field(
        ge=0, le=STEP_LIMIT, examples=[60_000], description="The first step with the new shares"
    )


@router.get("/api/jobs/{job_id}/mixture", response_model=MixtureView, responses=NOT_FOUND)
async def job_mixture(runtime: TheRuntime, job_id: NameInPath) -> Response:
    """The sources of a job's mixture, their weights by step, and every request to change them."""
    _, board, _ = await _board(runtime, job_id)
    return json_response(mixture_view(board))


@router.post(
    "/api/jobs/{job_id}/mixture", response_model=ChangeView, status_code=202, responses=NOT_FOUND | _BUSY
)
async def change_weights(
    runtime: TheRuntime, principal: ThePrincipal, job_id: NameInPath, body: ChangeWeightsBody
) -> Response:
    """Request other weights from a step on. The answer's `status` is `waiting`: poll for the ranks' decision."""
    for _ in range(ATTEMPTS):
        key, board, value = await _board(runtime, job_id)
        try:
            changed, request = board.asked(body.weights, body.from_step)
        except MixtureError as error:
            raise InvalidArgument("weights", f"{error}.") from error
        command = SwapValue(key=key, body=changed.to_bytes(), expected_version=value.version)
        reply = cast(Swapped, await runtime.engine.submit(command, client=principal.client))
        if reply.made:
            return json_response(change_view(request), status=202)
    raise Conflict("Another caller is changing the weights of this job at the same time.", hint="Retry.")


async def _board(runtime: Runtime, job: str) -> tuple[str, Board, Value]:
    """What the job has reported of its mixture, and where that is kept. A job with a credential of its own keeps its values
    under its name."""
    values = (await runtime.engine.settled()).values
    keys = (f"job/{quote(job, safe='')}/{board_key(job)}", board_key(job))
    found = [(key, value) for key in keys if (value := values.get(key)) is not None]
    if not found:
        raise Unknown(
            "mixture of job", job, hint="A job that reads a strata.Mixture is known here once it has started."
        )
    key, value = max(found, key=lambda each: each[1].at_s)
    try:
        return key, Board.from_bytes(value.body), value
    except MixtureError as error:
        raise Unknown(
            "mixture of job", job, hint=f"What the job reported cannot be read: {error}."
        ) from error
