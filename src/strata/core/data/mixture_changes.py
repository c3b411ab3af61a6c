"""How the weights of a running job change: requests that are written down once, and what ranks decide about them.

A **board** is what the coordinator keeps for a job, journaled: what its mixture is, and every request to change it. Anyone may
add a request; nothing is ever removed. The job's ranks look at the board together, at a step that they have reached
together, and `decide` says on each of them the same: a request for a step that has not started is adopted, one for an
earlier step is refused with the first step that is possible. From then on the change is part of the mixture's record in every
checkpoint, so that a resume replays it without the board; and a resume from a checkpoint that was made before it finds
it on the board. A request that is on the board as adopted is adopted again, whatever else has been asked meanwhile.

Pure: who reads and writes the board, and when ranks meet, is for others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from strata.core.data.mixture import Change, Definition, MixtureError, MixturePlan

Status = Literal["waiting", "adopted", "refused"]
STATUSES: tuple[Status, ...] = ("waiting", "adopted", "refused")
MAX_REQUESTS = 1_000


def board_key(job: str) -> str:
    """What the board of a job is called among the coordinator's values."""
    return f"mixture/{job}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A user wants other weights from a step on."""

    number: int
    """From 1, in the order they were made."""
    weights: Mapping[str, float]
    from_step: int
    status: Status = "waiting"
    reason: str = ""
    """Why it was refused."""

    @property
    def change(self) -> Change:
        return Change(step=self.from_step, weights=self.weights, number=self.number)

    @classmethod
    def adopted(cls, change: Change) -> Request:
        """The request that has led to a change."""
        return cls(number=change.number, weights=change.weights, from_step=change.step, status="adopted")

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "weights": dict(self.weights),
            "from_step": self.from_step,
            "status": self.status,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Request:
        if value["status"] not in STATUSES:
            raise ValueError(f"{value['status']!r} is not a status")
        return cls(
            number=int(value["number"]),
            weights={str(name): float(weight) for name, weight in dict(value["weights"]).items()},
            from_step=int(value["from_step"]),
            status=value["status"],
            reason=str(value["reason"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What is known of the mixture of one run of a job."""

    run: str
    definition: Definition
    global_batch_size: int
    requests: tuple[Request, ...] = ()

    @property
    def adopted(self) -> tuple[Change, ...]:
        return tuple(request.change for request in self.requests if request.status == "adopted")

    @property
    def plan(self) -> MixturePlan:
        """The mixture as it is to be read."""
        return MixturePlan(
            definition=self.definition, changes=self.adopted, global_batch_size=self.global_batch_size
        )

    def find(self, number: int) -> Request | None:
        return next((request for request in self.requests if request.number == number), None)

    def asked(self, weights: Mapping[str, float], from_step: int) -> tuple[Board, Request]:
        """With one more request. Raises `MixtureError` where it could never be adopted."""
        if len(self.requests) >= MAX_REQUESTS:
            raise MixtureError(
                f"the weights of this run were changed {MAX_REQUESTS:,} times, which is the limit"
            )
        number = max((request.number for request in self.requests), default=0) + 1
        request = Request(number=number, weights=dict(weights), from_step=from_step)
        self.definition.check_change(request.change)
        return replace(self, requests=(*self.requests, request)), request

    def decided(self, decisions: Iterable[Request]) -> Board:
        """With what the ranks have decided; what they say of requests that are not here is no request."""
        by_number = {request.number: request for request in decisions}
        return replace(
            self, requests=tuple(by_number.get(request.number, request) for request in self.requests)
        )

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "run": self.run,
                "definition": self.definition.to_json(),
                "global_batch_size": self.global_batch_size,
                "requests": [request.to_json() for request in self.requests],
            }
        ).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Board:
        """Raises `MixtureError` where it is none."""
        try:
            value = json.loads(body)
            return cls(
                run=str(value["run"]),
                definition=Definition.from_json(value["definition"]),
                global_batch_size=int(value["global_batch_size"]),
                requests=tuple(map(Request.from_json, value["requests"])),
            )
        except MixtureError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MixtureError(f"not what is known of a mixture ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What the ranks of a job make of a board, each for itself and all alike."""

    changes: tuple[Change, ...] = ()
    """To be made now, in this order."""
    requests: tuple[Request, ...] = field(default=())
    """Whose outcome is to be written on the board."""


def unsettled(requests: Sequence[Request], plan: MixturePlan) -> list[Request]:
    """Those that a job with this plan has to decide about."""
    known = {change.number for change in plan.changes}
    return [
        request
        for request in requests
        if request.status != "refused" and not (request.status == "adopted" and request.number in known)
    ]


def decide(requests: Sequence[Request], plan: MixturePlan, *, next_step: int, lead: int = 0) -> Decided:
    """What to do about a board, before `next_step` is read. `lead`: so many steps may pass until ranks look again."""
    known = {change.number for change in plan.changes}
    changes: list[Change] = []
    outcomes: list[Request] = []
    for request in sorted(unsettled(requests, plan), key=lambda each: each.number):
        if request.number in known:  # The report of it was lost.
            outcomes.append(replace(request, status="adopted", reason=""))
            continue
        reason = _objection(request, plan, next_step, lead)
        if reason:
            outcomes.append(replace(request, status="refused", reason=reason))
        else:
            changes.append(request.change)
            if request.status != "adopted":
                outcomes.append(replace(request, status="adopted"))
    return Decided(changes=tuple(changes), requests=tuple(outcomes))


def _objection(request: Request, plan: MixturePlan, next_step: int, lead: int) -> str:
    try:
        plan.definition.check_change(request.change)
    except MixtureError as error:
        return str(error)
    if request.from_step >= next_step:
        return ""
    if request.status == "adopted":
        return f"training was rolled back before step {request.from_step:,} and repeated it while the coordinator was unreachable"
    return f"step {request.from_step:,} has already started; the first possible step is {next_step + lead:,}"


# What the API shows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeView:
    number: int
    weights: dict[str, float]
    from_step: int
    status: Status
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    name: str
    """Of a nested mixture's source with the mixture's name before it: `code/python`."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsView:
    from_step: int
    weights: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureView:
    run: str
    seed: int
    global_batch_size: int
    sources: list[SourceView]
    weights: list[WeightsView]
    """By the step that they are set from: as defined, scheduled and changed."""
    changes: list[ChangeView]


def change_view(request: Request) -> ChangeView:
    return ChangeView(
        number=request.number,
        weights=dict(request.weights),
        from_step=request.from_step,
        status=request.status,
        reason=request.reason,
    )


def mixture_view(board: Board) -> MixtureView:
    plan = board.plan
    names = [source.name for source in board.definition.sources]
    return MixtureView(
        run=board.run,
        seed=board.definition.seed,
        global_batch_size=board.global_batch_size,
        sources=[SourceView(name=leaf.name, size=leaf.size) for leaf in plan.leaves],
        weights=[
            WeightsView(
                from_step=start // board.global_batch_size,
                weights={name: float(weight) for name, weight in zip(names, weights, strict=True)},
            )
            for start, weights in plan.settings()
        ],
        changes=[change_view(request) for request in board.requests],
    )
