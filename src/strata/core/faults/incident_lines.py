"""One line at level ERROR for each failure of a run, with all that is known about it.

The coordinator itself only notices that a connection ended; the agent reports how the process ended, shortly before or after.
Until then the line is a warning, and so is every line after the error. A failure without an explanation becomes an error after
`EXPLAINED_WITHIN_S`. Pure: time arrives as `now_s`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from strata.core.faults.incidents import is_lost
from strata.core.messages import Event, IncidentReported

EXPLAINED_WITHIN_S = 5.0
REMEMBERED = 1_000

Level = Literal["warning", "error"]


class IncidentLine(NamedTuple):
    level: Level
    event: IncidentReported


class IncidentLines:
    def __init__(self) -> None:
        self._written: dict[int, None] = {}
        """Incidents whose error line is written."""
        self._unexplained: dict[int, tuple[float, IncidentReported]] = {}
        """Deadline for an explanation, and the event."""

    def committed(self, events: Iterable[Event], *, now_s: float) -> list[IncidentLine]:
        reported = [e for e in events if isinstance(e, IncidentReported) and e.subject == "run"]
        return [self._line(event, now_s) for event in reported]

    def due(self, *, now_s: float) -> list[IncidentLine]:
        """Failures without an explanation in time."""
        late = [event for until_s, event in self._unexplained.values() if now_s >= until_s]
        return [self._error(event) for event in late]

    def _line(self, event: IncidentReported, now_s: float) -> IncidentLine:
        if event.failure_class == "preemption" or event.incident_id in self._written:
            return IncidentLine("warning", event)
        if event.failures and all(map(is_lost, event.failures)):
            until_s, _ = self._unexplained.get(event.incident_id, (now_s + EXPLAINED_WITHIN_S, event))
            self._unexplained[event.incident_id] = (until_s, event)
            return IncidentLine("warning", event)
        return self._error(event)

    def _error(self, event: IncidentReported) -> IncidentLine:
        self._unexplained.pop(event.incident_id, None)
        self._written[event.incident_id] = None
        if len(self._written) > REMEMBERED:
            del self._written[next(iter(self._written))]
        return IncidentLine("error", event)
