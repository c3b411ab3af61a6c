"""What each call of the HTTP API needs: a role, and whose job it is about.

Reading needs a viewer and changing an operator, unless the table says otherwise. A call about one job may be made by a caller
that is bound to it; all others need a credential that is bound to none. Asked before a body is read, for every path there is, so
that no caller learns without a credential which paths exist. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import QueryParams

from strata.coordinator.auth.principals import Principal, Role
from strata.core.messages import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    role: Role | None
    """None: no caller has to say who it is."""
    fleet: bool = True
    """Whether it shows or changes more than one job."""
    job: JobId | None = None

    def check(self, principal: Principal) -> None:
        if self.role is not None:
            principal.require(self.role)
        if self.job is not None:
            principal.require_job(self.job)
        elif self.fleet:
            principal.require_fleet()


OPEN = (("GET", "/api/health"), ("HEAD", "/api/health"), ("POST", "/api/session"))
"""For everyone: whether it is up, and signing in."""
HARMLESS = ("/api/recipes", "/docs", "/openapi.json", "/api/session", "/api/session/links")
"""Nothing of any job is in them."""
ADMINS = ("/api/tokens", "/api/audit-log")
READERS_CHANGE = ("/api/session", "/api/session/links")
"""What is no change to the cluster: signing out, and a link for oneself."""

_OF_A_JOB = re.compile(r"/api/(?:tasks|jobs)/([^/]+)(?:/.*)?")
_FILTERED = {
    "/api/logs": "task_id",
    "/api/logs/live": "task_id",
    "/api/metrics/history": "job_id",
    "/api/incidents": "run",
    "/api/notifications": "run",
}
_OF_A_RUN = re.compile(r"/api/runs/[^/]+(?:/.+)?")
"""Filtered by `job_id` as well: a run is known by what jobs say of it."""


def need_of(method: str, path: str, query: str) -> Need:
    if (method, path) in OPEN:
        return Need(role=None)
    reads = method in ("GET", "HEAD", "OPTIONS")
    role: Role = "viewer" if reads or path in READERS_CHANGE else "operator"
    if _is_under(path, ADMINS):
        return Need(role="admin")
    if path in HARMLESS:
        return Need(role=role, fleet=False)
    found = _OF_A_JOB.fullmatch(path)
    if found is not None:
        return Need(role=role, job=JobId(found[1]))
    by = "job_id" if _OF_A_RUN.fullmatch(path) else _FILTERED.get(path)
    if by is not None:
        named = QueryParams(query).getlist(by)  # As the route reads it.
        if len(named) == 1:
            return Need(role=role, job=JobId(named[0]))
    return Need(role=role)


def _is_under(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
