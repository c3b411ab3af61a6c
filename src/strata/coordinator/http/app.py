"""The HTTP API of the contract: one router per resource, put together, with its OpenAPI document and the dashboard.

Listings come from ready-made pages (`pages`). Who may call, how much they may send and what a refusal looks like is
decided by `middleware`, for all of them alike.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

import strata
from strata.coordinator.auth.audit_log import AuditLog
from strata.coordinator.auth.gatekeeper import Gatekeeper
from strata.coordinator.http import docs_page
from strata.coordinator.http.dashboard import Dashboard
from strata.coordinator.http.dependencies import Responses
from strata.coordinator.http.middleware import (
    AccessMiddleware,
    EdgeMiddleware,
    ErrorBody,
    install_error_handlers,
)
from strata.coordinator.http.routes import (
    access,
    checkpoints,
    coordinator,
    datasets,
    drains,
    fleet,
    logs,
    metrics,
    mixtures,
    notifications,
    quarantine,
    runs,
    tasks,
)
from strata.coordinator.runtime import Runtime
from strata.core import views

ROUTERS = (
    coordinator.router,
    fleet.router,
    datasets.router,
    checkpoints.router,
    metrics.router,
    runs.router,
    mixtures.router,
    notifications.router,
    quarantine.router,
    drains.router,
    tasks.router,
    logs.router,
    access.router,
    docs_page.router,
)

_ERRORS: Responses = {
    status: {"model": ErrorBody, "description": meaning}
    for status, meaning in {
        307: "This coordinator is a standby; send the call to the address in Location",
        400: "The request is not well-formed",
        401: "A token is required",
        403: "Not allowed",
        408: "The body arrived too slowly",
        413: "The body is too large",
        422: "A value is invalid",
        503: "Overloaded; try again",
        507: "The coordinator's disk is full; nothing was changed",
    }.items()
}


def create_app(runtime: Runtime, gatekeeper: Gatekeeper, audit_log: AuditLog) -> ASGIApp:
    app = FastAPI(
        title="Strata coordinator",
        version=strata.__version__,
        description="Workers, datasets, checkpoints, tasks and incidents of a training fleet. Times are Unix seconds.",
        responses=_ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.state.runtime = runtime
    app.state.gatekeeper = gatekeeper
    app.state.audit_log = audit_log
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    _document_units(app)
    api = AccessMiddleware(app, gatekeeper, audit_log, runtime.standing)
    return EdgeMiddleware(Dashboard(api), gatekeeper, audit_log, runtime.standing)


def _document_units(app: FastAPI) -> None:
    """The unit of every metric stands in the document, beside its name."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        properties = document["components"]["schemas"]["MetricsView"]["properties"]
        for f in fields(views.MetricsView):
            properties[f.name]["description"] = f"In {f.metadata['unit']}."
        return document

    app.openapi = openapi  # type: ignore[method-assign]
