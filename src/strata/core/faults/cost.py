"""What a run has cost: spent, lost by cause, and what recoveries have saved. Every number is a sum of measured seconds times a price.

    device-seconds = worker-seconds × GPUs of a worker (× 1 where it has none: then workers are counted)
    cost           = device-seconds / 3,600 × price of a GPU-hour
    spent          = training + checkpoint + recovery + waiting, as workers have accounted for them (`core.telemetry.goodput`)
    lost           = checkpoint + waiting + what each incident has lost + recoveries without an incident
    an incident    = (seconds of its recovery + steps lost × time of a step) × workers × GPUs of a worker (`core.faults.incidents`)
    unexplained    = recovery − what incidents that were recovered from have lost, where that is positive
    saved          = steps between the newest durable checkpoint and the step that a recovery resumed at × time of a step × workers ×
                     GPUs of a worker: what a restart from that checkpoint would have trained again

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from strata.core.faults.failures import CLASSES, FailureClass
from strata.core.faults.incidents import Incident
from strata.core.telemetry.goodput import GoodputView

HOUR_S = 3_600.0
Cause = FailureClass | Literal["checkpoint", "recovery", "waiting"]
Device = Literal["gpu", "worker"]

MEANINGS: Mapping[Cause, str] = {
    "checkpoint": "training paused for saves",
    "recovery": "recoveries without an incident",
    "waiting": "waiting for data or other ranks, and startup",
    **{kind: f"incidents of class {kind}" for kind in CLASSES},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """What an hour of a GPU costs, by pattern of runs; the first that fits."""

    default: float = 0.0
    """0: not known."""
    by_run: Mapping[str, float] = field(default_factory=dict)
    currency: str = "USD"

    def of(self, run: str) -> float | None:
        for pattern, price in self.by_run.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), run):
                return price
        return self.default or None


@dataclass(frozen=True, slots=True, kw_only=True)
class AmountView:
    hours: float
    """Of GPUs, or of workers where there are none."""
    cost: float | None
    """Null where no price is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    cause: Cause
    meaning: str
    incidents: int
    """0 for what is no failure."""
    hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedView:
    """Compared with restarting from the newest durable checkpoint each time."""

    recoveries: int
    """Those that resumed further than that."""
    steps: int
    hours: float
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """What a run has cost so far. `hours` are of GPUs, or of workers where there are none (`counted`)."""

    run: str
    jobs: list[str]
    currency: str
    price_per_gpu_hour: float | None
    counted: Device
    gpus_per_worker: int
    spent: AmountView
    training: AmountView
    lost: AmountView
    lost_by_cause: list[LossView]
    """The greatest first."""
    saved: SavedView


def cost(
    run: str,
    *,
    spent: Sequence[GoodputView],
    incidents: Iterable[Incident],
    gpus_per_worker: int,
    price: float | None,
    currency: str,
) -> CostView:
    """`spent` is the time of the jobs of the run; `incidents` are theirs."""
    devices = max(1, gpus_per_worker)

    def money(seconds: float) -> float | None:
        return None if price is None else seconds / HOUR_S * price

    def amount(seconds: float) -> AmountView:
        return AmountView(hours=seconds / HOUR_S, cost=money(seconds))

    closed = [each.closed for each in incidents if each.is_about_run and each.closed is not None]
    kinds = {each.reported.incident_id: each.reported.failure_class for each in incidents}
    lost_s: dict[Cause, float] = {}
    numbers: dict[Cause, int] = {}
    explained_s = 0.0
    for each in closed:
        kind = kinds[each.incident_id]
        numbers[kind] = numbers.get(kind, 0) + 1
        lost_s[kind] = lost_s.get(kind, 0.0) + (each.lost_gpu_s or 0.0)
        explained_s += (each.lost_gpu_s or 0.0) if each.outcome == "recovered" else 0.0
    lost_s["checkpoint"] = devices * sum(view.checkpoint_s for view in spent)
    lost_s["waiting"] = devices * sum(view.waiting_s for view in spent)
    lost_s["recovery"] = max(0.0, devices * sum(view.recovery_s for view in spent) - explained_s)
    saving = [each for each in closed if each.saved_steps]
    saved_s = sum(each.saved_gpu_s or 0.0 for each in saving)
    return CostView(
        run=run,
        jobs=[view.job_id for view in spent],
        currency=currency,
        price_per_gpu_hour=price,
        counted="gpu" if gpus_per_worker else "worker",
        gpus_per_worker=gpus_per_worker,
        spent=amount(devices * sum(view.total_s for view in spent)),
        training=amount(devices * sum(view.training_s for view in spent)),
        lost=amount(sum(lost_s.values())),
        lost_by_cause=[
            LossView(
                cause=cause,
                meaning=MEANINGS[cause],
                incidents=numbers.get(cause, 0),
                hours=seconds / HOUR_S,
                cost=money(seconds),
            )
            for cause, seconds in sorted(lost_s.items(), key=lambda item: -item[1])
        ],
        saved=SavedView(
            recoveries=len(saving),
            steps=sum(each.saved_steps or 0 for each in saving),
            hours=saved_s / HOUR_S,
            cost=money(saved_s),
        ),
    )
