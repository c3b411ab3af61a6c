"""What metrics were lately: the last hour by the second, the last day by the minute, in memory of fixed size. Of each worker,
the last hour by the quarter of a minute.

A second nothing was measured in is a gap, not a zero; a minute is the mean of its seconds. Nothing is kept over a
restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SECONDS = 3_600
MINUTES = 1_440
JOBS_KEPT = 32
WORKERS_KEPT = 2_000
WORKER_STEP_S = 15
WORKER_POINTS = 240

FLEET_SERIES: dict[str, str] = {
    "active_workers": "workers",
    "total_workers": "workers",
    "coordinator_rps": "requests/s",
    "barrier_latency_p99": "ms",
    "shard_assignment_time": "ms",
    "checkpoint_throughput": "MB/s",
    "log_lines": "lines/s",
    "log_lines_dropped": "lines/s",
    "loop_lag": "ms",
    "memory": "bytes",
    "events": "events/s",
}
"""Of the coordinator and the fleet as a whole, with their units."""

JOB_SERIES: dict[str, str] = {
    "loss": "1",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "step_time": "s",
    "sync_wait": "s",
    "step": "steps",
    "workers": "workers",
    "slow_workers": "workers",
    "goodput": "1",
}
"""Of each job, with their units."""

WORKER_SERIES: dict[str, str] = {
    "gpu_utilization": "%",
    "gpu_memory": "bytes",
    "cpu": "%",
    "step_time": "s",
    "sync_wait": "s",
}
"""Of each worker, with their units: the last hour, one value every fifteen seconds."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesView:
    unit: str
    values: list[float | None]
    """Oldest first, one for each step from `start` on; null where nothing was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    start: float
    """Unix seconds of the first value."""
    step: int
    """Seconds from one value to the next: 1 for the last hour, 60 for the last day; 15 of a worker."""
    job_id: str | None
    series: dict[str, SeriesView]


class _Ring:
    """The newest values of several series, by number of the interval they belong to."""

    def __init__(self, series: int, length: int) -> None:
        self._values: Floats = np.full((series, length), np.nan)
        self._length = length
        self.last = -1

    def put(self, number: int, values: Floats) -> None:
        if number < self.last - self._length:
            self.last = -1  # The clock was set back by more than there is.
        if number < self.last:
            return
        gap = number - self.last if self.last >= 0 else self._length
        for skipped in range(max(self.last + 1, number - min(gap, self._length) + 1), number):
            self._values[:, skipped % self._length] = np.nan
        self._values[:, number % self._length] = values
        self.last = number

    def between(self, first: int, last: int) -> Floats:
        """From `first` to `last`, both included; what is not there is not a number."""
        found: Floats = np.full((len(self._values), last - first + 1), np.nan)
        low, high = max(first, self.last - self._length + 1), min(last, self.last)
        if self.last >= 0 and low <= high:
            found[:, low - first : high - first + 1] = self._values[
                :, np.arange(low, high + 1) % self._length
            ]
        return found


class WorkerTrack:
    """What one worker used: coarse, for there may be thousands."""

    def __init__(self) -> None:
        self._ring = _Ring(len(WORKER_SERIES), WORKER_POINTS)
        self.touched_s = 0.0

    def is_due(self, now_s: float) -> bool:
        return int(now_s) // WORKER_STEP_S != self._ring.last

    def put(self, now_s: float, values: Mapping[str, float | None]) -> None:
        self.touched_s = now_s
        self._ring.put(
            int(now_s) // WORKER_STEP_S, np.array([_number(values.get(name)) for name in WORKER_SERIES])
        )

    def view(self, names: Sequence[str], *, now_s: float, since_s: float, job_id: str | None) -> HistoryView:
        last = int(now_s) // WORKER_STEP_S
        first = min(last, max(int(since_s) // WORKER_STEP_S, last - WORKER_POINTS + 1))
        found = self._ring.between(first, last)
        return _view(names, WORKER_SERIES, found, start=first, step=WORKER_STEP_S, job_id=job_id)


class Track:
    """The history of a fixed set of series."""

    def __init__(self, units: Mapping[str, str]) -> None:
        self.units = units
        self._seconds = _Ring(len(units), SECONDS)
        self._minutes = _Ring(len(units), MINUTES)
        self.touched_s = 0.0

    def put(self, now_s: float, values: Mapping[str, float | None]) -> None:
        second = int(now_s)
        row = np.array([_number(values.get(name)) for name in self.units])
        self._seconds.put(second, row)
        of_minute = self._seconds.between(second - second % 60, second)
        counts = np.maximum(1, np.count_nonzero(~np.isnan(of_minute), axis=1))
        means = np.where(np.isnan(of_minute).all(axis=1), np.nan, np.nansum(of_minute, axis=1) / counts)
        self._minutes.put(second // 60, means)
        self.touched_s = now_s

    def view(
        self, names: Sequence[str], *, now_s: float, since_s: float, step: int, job_id: str | None
    ) -> HistoryView:
        ring, length = (self._seconds, SECONDS) if step == 1 else (self._minutes, MINUTES)
        last = int(now_s) // step
        first = min(last, max(int(since_s) // step, last - length + 1))
        return _view(names, self.units, ring.between(first, last), start=first, step=step, job_id=job_id)


def _view(
    names: Sequence[str],
    units: Mapping[str, str],
    found: Floats,
    *,
    start: int,
    step: int,
    job_id: str | None,
) -> HistoryView:
    order = list(units)
    return HistoryView(
        start=float(start * step),
        step=step,
        job_id=job_id,
        series={
            name: SeriesView(
                unit=units[name],
                values=[None if math.isnan(v) else v for v in found[order.index(name)].tolist()],
            )
            for name in names
        },
    )


class History:
    def __init__(self) -> None:
        self.fleet = Track(FLEET_SERIES)
        self.jobs: dict[str, Track] = {}
        self.workers: dict[str, WorkerTrack] = {}

    def put(
        self,
        now_s: float,
        fleet: Mapping[str, float | None],
        jobs: Mapping[str, Mapping[str, float | None]],
    ) -> None:
        self.fleet.put(now_s, fleet)
        for job, values in jobs.items():
            track = self.jobs.get(job)
            if track is None:
                if len(self.jobs) >= JOBS_KEPT:
                    del self.jobs[min(self.jobs, key=lambda name: self.jobs[name].touched_s)]
                track = self.jobs[job] = Track(JOB_SERIES)
            track.put(now_s, values)

    def put_worker(
        self, now_s: float, worker_id: str, values: Callable[[], Mapping[str, float | None]]
    ) -> None:
        """`values` are asked for only when they are wanted."""
        track = self.workers.get(worker_id)
        if track is None:
            if len(self.workers) >= WORKERS_KEPT:
                del self.workers[min(self.workers, key=lambda name: self.workers[name].touched_s)]
            track = self.workers[worker_id] = WorkerTrack()
        if track.is_due(now_s):
            track.put(now_s, values())


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan
