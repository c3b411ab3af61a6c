"""Who a run is, and which of its starts may write.

A **run** is named once, by a small object at its destinations. Every start of it claims the next **generation** there,
in an object that only one process can create. A claim that its holder renews is alive: a second job with the same
identity is refused while it is. A restart of the same launch takes over at once.

Pure: what was read, and for how long nothing has changed, arrive as values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strata.core.jobs.job import Fence
from strata.errors import StrataError

SCHEMA = 1
FENCES_KEPT = 16
RENEW_S = 5.0
"""How often a live claim changes."""
SILENT_S = 15.0
"""A claim that has not changed for so long is dead."""
ENDING_S = 3.0
"""A process on this machine may need so long to end."""


class RunRecordError(StrataError):
    """What stands where a run's identity or claim should be is neither."""

    code = "run_record"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run's identity."""

    run: str
    name: str = ""
    """What its user called it; empty where they did not."""
    created_at: float = 0.0

    def encode(self) -> bytes:
        return _encode({"run": self.run, "name": self.name, "created_at": self.created_at})

    @classmethod
    def decode(cls, raw: bytes, *, where: str) -> RunRecord:
        body = _decode(raw, where)
        try:
            return cls(run=_text(body, "run"), name=str(body["name"]), created_at=float(body["created_at"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RunRecordError(f"{where} is not a run's identity ({error}).") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One start of a run, as it stands at a destination."""

    generation: int
    launch: str
    """What started it: the same for all restarts of one launch."""
    holder: str
    """The process that renews it."""
    host: str = ""
    pid: int = 0
    count: int = 0
    """How often it was renewed."""
    step: int = 0
    """About how far training had come when it was last renewed."""
    ended: bool = False
    fences: tuple[Fence, ...] = ()
    """Of this and the generations before it, newest last."""

    @property
    def who(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown host'}"

    def encode(self) -> bytes:
        body = {
            name: getattr(self, name)
            for name in ("generation", "launch", "holder", "host", "pid", "count", "step", "ended")
        }
        return _encode({**body, "fences": [[f.generation, *f.seen] for f in self.fences]})

    @classmethod
    def decode(cls, raw: bytes, *, where: str) -> Claim:
        body = _decode(raw, where)
        try:
            return cls(
                generation=int(body["generation"]),
                launch=_text(body, "launch"),
                holder=_text(body, "holder"),
                host=str(body["host"]),
                pid=int(body["pid"]),
                count=int(body["count"]),
                step=int(body["step"]),
                ended=bool(body["ended"]),
                fences=tuple(Fence(generation=g, seen=(s, q)) for g, s, q in body["fences"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunRecordError(f"{where} is not a run's claim ({error}).") from error

    def with_fence(self, fence: Fence) -> Claim:
        if any(known.generation == fence.generation for known in self.fences):
            return self  # What was published since the first look was refused already.
        return replace(self, fences=(*self.fences, fence)[-FENCES_KEPT:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Claim this generation."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """See whether the claim changes."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InUse:
    claim: Claim


def judge(
    newest: Claim | None, *, launch: str, holder_has_ended: bool | None, changed: bool, unchanged_s: float
) -> Take | Watch | InUse:
    """What a start does about the newest claim there is.

    `holder_has_ended` is None where this machine cannot know; `changed` says that the claim was renewed while it was
    watched, `unchanged_s` for how long it was not.
    """
    if newest is None:
        return Take(generation=1, reason="the run starts")
    after = newest.generation + 1
    if newest.ended:
        return Take(generation=after, reason="the start before it has ended")
    if newest.launch == launch:
        return Take(generation=after, reason="a restart of the same launch")
    if holder_has_ended:
        return Take(generation=after, reason=f"{newest.who} is lost")
    if changed or (holder_has_ended is False and unchanged_s >= ENDING_S):
        return InUse(claim=newest)
    if unchanged_s >= SILENT_S:
        return Take(generation=after, reason=f"{newest.who} has been silent for {unchanged_s:.0f} s")
    return Watch(reason=f"{newest.who} may still be alive")


def is_superseded(generation: int, claimed: Sequence[int]) -> bool:
    """Whether a process of this generation may publish nothing any more, by the generations claimed at a destination."""
    return max(claimed, default=0) > generation


def identify(found: Mapping[str, RunRecord | None], *, name: str) -> RunRecord | None:
    """The run that these destinations belong to, by what each answered; None where all of them are new.

    Raises `RunRecordError` where they belong to different runs, or to one with another name.
    """
    known = {where: record for where, record in found.items() if record is not None}
    runs: Sequence[str] = list(dict.fromkeys(record.run for record in known.values()))
    if len(runs) > 1:
        listed = ", ".join(f"{where} (run {record.run})" for where, record in known.items())
        raise RunRecordError(
            f"The destinations belong to different runs: {listed}.",
            hint="Give each run destinations of its own, or empty the one that does not belong here.",
        )
    for where, record in known.items():
        if name and record.name and record.name != name:
            raise RunRecordError(
                f"{where} belongs to the run '{record.name}', and this job is called '{name}'.",
                hint=f"Give this job a destination of its own, or call it '{record.name}' to continue that run.",
            )
    return next(iter(known.values()), None)


def _encode(body: Mapping[str, Any]) -> bytes:
    return (json.dumps({"schema": SCHEMA, **body}, sort_keys=True) + "\n").encode()


def _decode(raw: bytes, where: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            raise ValueError("unknown schema")
    except ValueError as error:
        raise RunRecordError(
            f"{where} cannot be read ({error}).", hint="Another version of Strata may have written it."
        ) from error
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    if not isinstance(body[name], str) or not body[name]:
        raise ValueError(f"no {name}")
    return str(body[name])
