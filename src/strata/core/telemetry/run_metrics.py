"""Values that a training loop has logged, as they travel and as they are answered. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strata.core import checks
from strata.core.messages import InvalidArgument
from strata.core.telemetry.branches import Start
from strata.core.telemetry.run_details import RunDetails

NAME_LIMIT = 256
NAMES_PER_ROW = 4_096
STEP_LIMIT = 2**53
TIME = "_time"
"""When each step was logged: kept once for all metrics, beside them."""

DISK_FREE, DISK_TOTAL = "checkpoint_disk_free_bytes", "checkpoint_disk_total_bytes"
"""Under which names workers report the disk of their checkpoints."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """Rows of the same names."""

    names: tuple[str, ...]
    steps: Ints
    times: Floats
    """Unix seconds."""
    values: Floats
    """A row for each step, a column for each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricBatch:
    number: int
    start: Start
    rows: tuple[MetricRows, ...]
    dropped: int
    """Values that its sender could not keep."""
    details: RunDetails | None = None
    """How this start was made; in its first batch."""


def checked(batch: MetricBatch) -> MetricBatch:
    """The batch, if it may be kept; raises `InvalidArgument` otherwise."""
    start = batch.start
    for what, number in (
        ("number", batch.number),
        ("generation", start.generation),
        ("started_ms", start.started_ms),
        ("resumed_step", start.resumed_step),
        ("dropped", batch.dropped),
    ):
        checks.between(what, number, 0, STEP_LIMIT)
    for rows in batch.rows:
        checks.between("names of metrics", len(rows.names), 1, NAMES_PER_ROW)
        for name in rows.names:
            check_name(name)
        if len(set(rows.names)) != len(rows.names):
            raise InvalidArgument(
                "names", "holds a metric twice.", hint="Log each metric once in a step of one call."
            )
        if len(rows.steps) and not 0 <= int(rows.steps.min()) <= int(rows.steps.max()) <= STEP_LIMIT:
            raise InvalidArgument(
                "steps", "must not be negative or beyond 2^53.", hint="Log optimizer steps."
            )
        if not (np.isfinite(rows.times).all() and (np.abs(rows.times) < 1e12).all()):
            raise InvalidArgument("times", "must be Unix seconds.", hint="Check the clock of the sender.")
    return batch


def check_name(name: str) -> None:
    checks.name("name of a metric", name, limit=NAME_LIMIT)
    if name == TIME:
        raise InvalidArgument("name of a metric", f"must not be '{TIME}'.", hint="Choose another name.")


# --- as they are answered -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run that has logged something."""

    run: str
    jobs: list[str]
    """Under which names its workers were registered, the latest last."""
    created_at: float
    updated_at: float
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfoView(RunView):
    """A run with its tags, its notes and how it was last started."""

    notes: str
    details: RunDetails | None
    """Null where no start has said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartView:
    generation: int
    job_id: str
    started_at: float
    resumed_step: int
    committed_until: int | None
    """What this start logged for later steps is abandoned; null: nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricView:
    """One metric over the committed history."""

    name: str
    count: int
    nonfinite: int
    """How many of the values were NaN or infinite; they take no part in the least and the greatest."""
    last: float | None
    """Null where it is no finite number."""
    last_step: int
    min: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetricsView:
    run: str
    jobs: list[str]
    starts: list[StartView]
    """Oldest first."""
    metrics: list[MetricView]
    """By name."""
    dropped: int
    """Values that were logged and could not be kept, because the coordinator was away too long or there were too many names."""
    missing_batches: int = 0
    """Batches of values that never came here: another coordinator has kept them, and no archive has brought them yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveView:
    """Columns of equal length, by step. Where each point is one value, `low` and `high` are empty."""

    steps: list[int]
    """The last step of each point."""
    times: list[float]
    """Unix seconds."""
    values: list[float | None]
    """Means; null where no value was a finite number."""
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedView(CurveView):
    """What a start logged after the step that a later one resumed at."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCurvesView:
    name: str
    committed: CurveView
    abandoned: list[AbandonedView]
    """Oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurvesView:
    run: str
    series: list[MetricCurvesView]
