"""Machines that are out of use: none of their agents takes part in a rendezvous until an operator clears them.

A machine is put here by a person, or by a run whose policy says so (`gpu=quarantine`) when a device of it has failed. Known by
its host name, as agents and workers report it. Journaled: a restart of the coordinator changes nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.core import checks
from strata.core.messages import (
    ClearHost,
    Event,
    HostCleared,
    HostQuarantined,
    Instant,
    JobId,
    Overloaded,
    QuarantineHost,
    Refused,
    Unknown,
)

KEPT = 10_000
REASON_LIMIT = 1_000


class Quarantined(Refused):
    """A machine that is out of use wants to take part."""

    code = "quarantined"

    def __init__(self, known: HostQuarantined) -> None:
        super().__init__(
            f"The machine '{known.host}' is quarantined: {known.reason}.",
            hint=f"When it is fixed: strata quarantine clear {known.host}",
        )
        self.host = known.host


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineView:
    """One quarantined machine. Times are Unix seconds."""

    host: str
    reason: str
    by: str
    """Who has decided it: a person, or the policy of a run."""
    run: str
    """The run whose failure led to it; empty where a person has decided it."""
    since: float


class Quarantine:
    def __init__(self) -> None:
        self.hosts: dict[str, HostQuarantined] = {}
        """In the order in which they were put here."""

    def shown(self) -> list[QuarantineView]:
        return [
            QuarantineView(host=one.host, reason=one.reason, by=one.by, run=one.job_id or "", since=one.at_s)
            for one in self.hosts.values()
        ]

    def admit(self, host: str) -> None:
        """Raises `Quarantined` for a machine that is out of use."""
        known = self.hosts.get(host)
        if known is not None:
            raise Quarantined(known)

    # --- decisions ------------------------------------------------------------------------------------------

    def decide_add(
        self, command: QuarantineHost, now: Instant, *, job: JobId | None = None
    ) -> HostQuarantined | None:
        """None where it is out of use already, for the reason that it was first."""
        checks.name("host", command.host)
        checks.text("reason", command.reason, limit=REASON_LIMIT)
        checks.text("by", command.by, limit=checks.NAME_LIMIT)
        if command.host in self.hosts:
            return None
        if len(self.hosts) >= KEPT:
            raise Overloaded(f"{KEPT:,} machines are quarantined already.", hint="strata quarantine clear …")
        reason = command.reason.rstrip(".") or "no reason was given"
        return HostQuarantined(host=command.host, by=command.by, job_id=job, reason=reason, at_s=now.wall_s)

    def decide_clear(self, command: ClearHost, now: Instant) -> HostCleared:
        checks.name("host", command.host)
        if command.host not in self.hosts:
            known = ", ".join(list(self.hosts)[:10]) or "none"
            raise Unknown("quarantined machine", command.host, hint=f"Quarantined machines: {known}.")
        return HostCleared(host=command.host, reason=f"cleared by {command.by}", at_s=now.wall_s)

    # --- applying -------------------------------------------------------------------------------------------

    def apply(self, event: HostQuarantined | HostCleared) -> None:
        if isinstance(event, HostQuarantined):
            self.hosts[event.host] = event
        else:
            self.hosts.pop(event.host, None)

    def compact(self) -> Iterator[Event]:
        return iter(list(self.hosts.values()))
