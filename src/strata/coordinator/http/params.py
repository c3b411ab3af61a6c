"""What parameters of the HTTP API may be, and what its refusals mean, said once for all routes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query

from strata.coordinator.http.middleware import ErrorBody
from strata.core import checks

NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "No such thing"}}

Limit = Annotated[int, Query(ge=1, le=10_000)]
Words = Annotated[str | None, Query(max_length=checks.NAME_LIMIT)]
NameInPath = Annotated[str, Path(max_length=checks.NAME_LIMIT)]
Moment = Annotated[float | None, Query(ge=0, le=1e11, description="Unix seconds")]
