"""A caller that has been recognised: its name for the audit log, its role, and the job it is bound to.

Roles are ordered: each may do what the one before it may. A principal bound to a job acts for that job and sees nothing
of any other; one that is bound to none acts for all. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from strata.core.messages import JobId
from strata.errors import StrataError

Role = Literal["viewer", "worker", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)


class Forbidden(StrataError):
    """The call is understood and refused: no token, a wrong one, or one that may not do this."""

    code = "forbidden"

    def __init__(self, message: str, *, status: int, hint: str, retry_after_s: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    name: str
    """Who it is, for people: `token deploy-bot (3f2a91c0)`, `user alice (uid 1000)`, `certificate worker-3`."""
    role: Role
    job: JobId | None = None
    """The only job it acts for and sees; none: all of them."""
    credential: str = ""
    """What can be taken away from it: `token ID` or `task ID`."""
    by_link: bool = False
    """Whether it signed in with a link that another caller made."""

    @property
    def client(self) -> str:
        """Who shares a budget: all that is done for one job, or with one credential that is bound to none."""
        return f"job {self.job}" if self.job is not None else self.name

    def may(self, need: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(need)

    def require(self, need: Role) -> None:
        if not self.may(need):
            raise Forbidden(
                f"This credential has the role {self.role}; the call needs {need} or higher.",
                status=403,
                hint=f"Use one with that role: an admin creates it with `strata token create --role {need}`.",
            )

    def require_job(self, job: JobId) -> None:
        """Refuses a caller that is bound to another job; `job` may not exist."""
        if self.job is not None and job != self.job:
            raise Forbidden(
                f"This credential is bound to job '{self.job}'; the call is about another one.",
                status=403,
                hint="Use a credential of that job, or one that is not bound to a job.",
            )

    def require_fleet(self) -> None:
        """For what shows or changes more than one job."""
        if self.job is not None:
            raise Forbidden(
                f"This credential is bound to job '{self.job}'; the call is about the whole cluster.",
                status=403,
                hint=f"Ask about the job (/api/tasks/{self.job}), or use a credential that is not bound to a job.",
            )

    def require_incarnation(self, incarnation: int) -> None:
        """A worker says which registration it is. Operators, and plain clients of the coordinator's own user, need not."""
        if self.role == "worker" and not incarnation:
            raise Forbidden(
                "The call does not name the worker's incarnation.",
                status=403,
                hint="Send the `incarnation` that RegisterWorker returned.",
            )
