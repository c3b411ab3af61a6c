"""What the event stream carries: every kind of event, the values readers get of it, and their types.

One table says both how an event is published and of which type it is then, so that the JSON Schema, the dashboard's
TypeScript and the bytes on the stream cannot differ. Events go out as the journal has them, with their sentence beside
them, less what only the coordinator needs and what grows with the fleet or the data. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from strata.core.event_text import Severity, describe
from strata.core.faults.notifications import Notification
from strata.core.fleet.recoveries import who_survived
from strata.core.fleet.tasks import percent, remaining_s
from strata.core.messages import (
    SOFT_EVENTS,
    BarrierBroken,
    BarrierReleased,
    CheckpointCompleted,
    CountersRestored,
    Event,
    IncidentReported,
    RecordsForgotten,
    RecoveryRecorded,
    ShardsMoved,
    TaskProgressed,
    ValueDropped,
    ValueSwapped,
    VersionsReserved,
)
from strata.core.telemetry.stragglers import Change
from strata.core.views import LogView, MetricsView


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsSkipped:
    """Log lines omitted from the stream because too many arrived at once; a search finds them."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Events between the last one that was read and this one are lost to this reader: fetch the state again."""

    reason: str


class _Field(NamedTuple):
    type: Any
    value: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How one kind of event is published: without some fields, with others changed or added."""

    without: frozenset[str] = frozenset()
    with_: Mapping[str, _Field] | None = None


_COUNTED = _Field(int, lambda event: len(event.arrived))
_FORMS: dict[type[Any], _Form] = {
    # Who got how many: a hundred thousand shard ids are for those who ask for the plan.
    ShardsMoved: _Form(
        without=frozenset({"base_epoch"}),
        with_={
            "workers": _Field(int, lambda event: len(event.workers)),
            "moved": _Field(dict[str, int], lambda event: {w: len(ids) for w, ids in event.moved.items()}),
        },
    ),
    # How many came: thousands of names at every step would fill the ring, and the browsers' connections.
    BarrierReleased: _Form(without=frozenset({"call_ids"}), with_={"arrived": _COUNTED}),
    BarrierBroken: _Form(without=frozenset({"call_ids"}), with_={"arrived": _COUNTED}),
    # Without the record of samples, which grows with the data and is for the audit.
    CheckpointCompleted: _Form(without=frozenset({"data_json"})),
    # Who failed first and how; tracebacks and the last words of all are for those who ask for the incident.
    IncidentReported: _Form(
        without=frozenset({"first"}),
        with_={
            "failures": _Field(int, lambda event: len(event.failures)),
            "rank": _Field(int | None, lambda event: event.first.rank if event.first else None),
            "host": _Field(str, lambda event: event.first.host if event.first else ""),
            "pid": _Field(int, lambda event: event.first.pid if event.first else 0),
            "gpu": _Field(str, lambda event: event.first.gpu if event.first else ""),
        },
    ),
    # With what the API shows of them, so that no client needs to ask.
    RecoveryRecorded: _Form(with_={"who_survived": _Field(str, who_survived)}),
    TaskProgressed: _Form(
        with_={
            "progress": _Field(float, lambda event: percent(event.step, event.total_steps)),
            "eta_s": _Field(
                float | None,
                lambda event: remaining_s(event.step, event.total_steps, event.steps_per_s),
            ),
        }
    ),
}
_UNPUBLISHED = (
    *SOFT_EVENTS,
    CountersRestored,
    RecordsForgotten,
    ValueSwapped,
    ValueDropped,
    VersionsReserved,
)

_KINDS: dict[type[Any], str] = {
    event: re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__).lower() for event in get_args(Event)
}
WORKER_SLOW, WORKER_CAUGHT_UP = "worker_slow", "worker_caught_up"


class Published(NamedTuple):
    kind: str
    data: dict[str, Any]


def publish(event: Event) -> Published | None:
    """The event as readers get it; None for one that is not theirs."""
    if isinstance(event, _UNPUBLISHED):
        return None
    severity, text = describe(event)
    form = _FORMS.get(type(event), _Form())
    data = {f.name: getattr(event, f.name) for f in fields(event) if f.name not in form.without}
    data |= {name: field.value(event) for name, field in (form.with_ or {}).items()}
    return Published(kind_of(type(event)), {**data, "severity": severity, "text": text})


def publish_change(change: Change, *, at_s: float) -> Published:
    """A rank that became slow, or is no longer."""
    severity, text = describe(change)
    data = {f.name: getattr(change, f.name) for f in fields(change)}
    kind = WORKER_SLOW if change.slow else WORKER_CAUGHT_UP
    return Published(kind, {**data, "at_s": at_s, "severity": severity, "text": text})


def kind_of(event: type[Event]) -> str:
    """`WorkerJoined` → `worker_joined`."""
    return _KINDS[event]


def stream_types() -> dict[str, Any]:
    """The type of `data` for every kind on the stream."""
    types = {kind_of(event): _published_type(event) for event in get_args(Event) if event not in _UNPUBLISHED}
    for kind, name in ((WORKER_SLOW, "WorkerSlow"), (WORKER_CAUGHT_UP, "WorkerCaughtUp")):
        types[kind] = _published_type(Change, name=name, more={"at_s": float})
    return {
        **types,
        "notification": Notification,
        "metrics": MetricsView,
        "logs": Sequence[LogView],
        "logs_skipped": LogsSkipped,
        "resync": Resync,
    }


def _published_type(event: type[Any], *, name: str = "", more: Mapping[str, Any] | None = None) -> type[Any]:
    form = _FORMS.get(event, _Form())
    hints = get_type_hints(event)
    types = {f.name: hints[f.name] for f in fields(event) if f.name not in form.without}
    types |= {field_name: field.type for field_name, field in (form.with_ or {}).items()}
    types |= {**(more or {}), "severity": Severity, "text": str}
    return make_dataclass(name or event.__name__, types.items(), frozen=True, kw_only=True)
