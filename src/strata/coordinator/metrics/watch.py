"""Once a second: what every job's workers report, added up, remembered and judged.

From heartbeats come a job's metrics (loss, speed, step times), where its time went, and which of its ranks the others wait
for; a failure that was recorded becomes a line in the log. From the coordinator itself come its own metrics. All of it is
soft: read from state that is there anyway, kept in memory of fixed size; only goodput and what each job reported last are
written down, so that a restart does not forget them. Looking takes no more than a small part of the time, however large the
fleet.
"""

from __future__ import annotations

import logging
import math
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec

from strata.coordinator.engine import Engine, Unavailable
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.history import History
from strata.coordinator.metrics.instruments import CoordinatorMetrics
from strata.core import views
from strata.core.event_text import describe
from strata.core.faults.incident_lines import IncidentLine, IncidentLines
from strata.core.messages import (
    DEFAULT_JOB,
    EndHang,
    Event,
    JobId,
    Report,
    ReportSlow,
    StragglersMarked,
    WorkerId,
)
from strata.core.stream_events import publish_change
from strata.core.telemetry.goodput import Goodput
from strata.core.telemetry.run_metrics import DISK_FREE, DISK_TOTAL
from strata.core.telemetry.stragglers import Change, StepTime, Stragglers

log = logging.getLogger("strata.coordinator.watch")

REST = 30
"""How many times as long as looking at all workers took must pass until it is done again; the same for writing."""
KEEP_EVERY_S = 2.0
GOODPUT_NOTE = "goodput"
LAST_NOTE = "last_reported"
JOBS_KEPT = 200
MAKING_STEPS = ("training", "checkpointing")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetrics:
    """What the ranks of one job say, put together. None where none of them says it."""

    loss: float | None
    """Mean over the ranks."""
    tokens_per_second: float | None
    """Of the whole job, as its ranks see it: the median."""
    samples_per_second: float | None
    step_time_s: float | None
    """Median over the ranks; so are the next ones."""
    sync_wait_s: float | None
    step: int
    """Of the rank that is furthest."""
    workers: int
    slow_workers: int
    loss_is_nonfinite: bool = False
    """Whether a rank says that its loss is NaN or infinite."""
    disk_free_bytes: float | None = None
    """Of the disk of local checkpoints that has least, as far as ranks say."""
    disk_total_bytes: float | None = None
    """Of the same disk."""


class Watch:
    def __init__(
        self,
        engine: Engine,
        metrics: CoordinatorMetrics,
        logs: LogStore,
        publish: Callable[[str, Any], None],
        fleet_metrics: Callable[[], views.MetricsView],
    ) -> None:
        self.history = History()
        self.goodput = Goodput()
        self.jobs: dict[JobId, JobMetrics] = {}
        self._last: dict[JobId, views.JobView] = {}
        self.loop_lag_s = 0.0
        self._engine = engine
        self._metrics = metrics
        self._logs = logs
        self._publish = publish
        self._fleet_metrics = fleet_metrics
        self._stragglers = Stragglers()
        self._incident_lines = IncidentLines()
        self._next_look_mono_s = 0.0
        self._next_keep_mono_s = 0.0
        self._due_mono_s: float | None = None
        self._counted: tuple[float, int, int, int] | None = None
        self._recall()

    def pulse(self, *, every_s: float = 1.0) -> None:
        now_mono_s, now_s = time.monotonic(), time.time()
        self.loop_lag_s = max(0.0, now_mono_s - self._due_mono_s) if self._due_mono_s is not None else 0.0
        self._due_mono_s = now_mono_s + every_s
        self._log_incidents(self._incident_lines.due(now_s=now_mono_s))
        if now_mono_s >= self._next_look_mono_s:
            # Of this thread: while others had the processor, nothing was spent on looking.
            began_s = time.thread_time()
            self._look()
            self._next_look_mono_s = now_mono_s + REST * (time.thread_time() - began_s)
        self.history.put(now_s, self._fleet(now_mono_s), {job: self._shown(job) for job in self.jobs})
        if now_mono_s >= self._next_keep_mono_s and self._logs.archive is not None:
            started_mono_s = time.monotonic()
            self._logs.archive.keep_note(GOODPUT_NOTE, self.goodput.dump())
            self._logs.archive.keep_note(LAST_NOTE, msgspec.json.encode(list(self._last.values())))
            duration_s = time.monotonic() - started_mono_s
            self._next_keep_mono_s = now_mono_s + max(KEEP_EVERY_S, REST * duration_s)

    # --- jobs -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now_s = time.time()
        membership = self._engine.cluster.membership
        by_job: dict[JobId, list[tuple[WorkerId, Report]]] = {}
        for member in membership.members.values():
            worker_id = member.spec.worker_id
            report = membership.reports.get(worker_id) if member.present else None
            if report is not None and report.metrics:
                by_job.setdefault(member.spec.job_id, []).append((worker_id, report))
                spec = member.spec
                self.goodput.take(spec.job_id, worker_id, report.metrics, gpus=spec.gpu_count)
                self.history.put_worker(now_s, worker_id, partial(_used, report))
        self._stragglers.keep_only(by_job)
        changes = [
            change
            for job, reports in by_job.items()
            for change in self._stragglers.judge(job, _step_times(reports))
        ]
        self._engine.observe(StragglersMarked(reasons=dict(self._stragglers.slow)))
        for change in changes:
            self._publish_change(change)
        self.jobs = {job: self._job_metrics(reports) for job, reports in by_job.items()}
        for job, metrics in self.jobs.items():
            self._remember(job, metrics, now_s)
        for job, step in self._engine.cluster.incidents.hanging().items():
            if job in self.jobs and self.jobs[job].step > step:
                with suppress(Unavailable):  # It is asked again a second later.
                    self._engine.post(EndHang(job_id=job, step=self.jobs[job].step), lambda answer: None)

    def last_reported(self) -> list[views.JobView]:
        """Of every job that is remembered, the one that reported last at the end."""
        return [replace(known, goodput=self.goodput.view(job).goodput) for job, known in self._last.items()]

    def _remember(self, job: JobId, metrics: JobMetrics, now_s: float) -> None:
        known = self._last.pop(job, None)
        if metrics.step == 0 and known is not None:
            metrics = replace(metrics, step=known.step)  # A process that has just started says 0.
        measured = {
            name: value
            for name in ("loss", "tokens_per_second", "samples_per_second", "step_time_s")
            if (value := getattr(metrics, name)) is not None
        }
        before = known or views.JobView(id=job, at=now_s, step=0)
        self._last[job] = replace(before, at=now_s, step=metrics.step, **measured)
        if len(self._last) > JOBS_KEPT:
            del self._last[next(iter(self._last))]

    def _job_metrics(self, reports: list[tuple[WorkerId, Report]]) -> JobMetrics:
        metrics = [report.metrics for _, report in reports]
        losses = _values(metrics, "loss")
        free_bytes, total_bytes = min(
            (
                (free, total)
                for each in metrics
                if 0 <= (free := each.get(DISK_FREE, -1.0)) <= (total := each.get(DISK_TOTAL, -1.0))
            ),
            default=(None, None),
        )
        return JobMetrics(
            loss=statistics.fmean(losses) if losses else None,
            tokens_per_second=_median(metrics, "tokens_per_second"),
            samples_per_second=_median(metrics, "samples_per_second"),
            step_time_s=_median(metrics, "step_time_s"),
            sync_wait_s=_median(metrics, "sync_wait_s"),
            step=max(report.step for _, report in reports),
            workers=len(reports),
            slow_workers=sum(worker_id in self._stragglers.slow for worker_id, _ in reports),
            loss_is_nonfinite=any(not math.isfinite(each.get("loss", 0.0)) for each in metrics),
            disk_free_bytes=free_bytes,
            disk_total_bytes=total_bytes,
        )

    def _shown(self, job: JobId) -> dict[str, float | None]:
        metrics = self.jobs[job]
        return {
            "loss": metrics.loss,
            "tokens_per_second": metrics.tokens_per_second,
            "samples_per_second": metrics.samples_per_second,
            "step_time": metrics.step_time_s,
            "sync_wait": metrics.sync_wait_s,
            "step": metrics.step,
            "workers": metrics.workers,
            "slow_workers": metrics.slow_workers,
            "goodput": self.goodput.view(job).goodput,
        }

    def _publish_change(self, change: Change) -> None:
        """A reason on the worker, an event for everyone who watches, and a line in the log."""
        kind, data = publish_change(change, at_s=time.time())
        level = logging.WARNING if change.slow else logging.INFO
        log.log(level, "%s", data["text"], extra={"worker_id": str(change.worker_id)})
        self._publish(kind, data)
        command = ReportSlow(
            job_id=change.job_id, worker_id=change.worker_id, slow=change.slow, reason=change.reason
        )
        with suppress(Unavailable):  # The event and the line have said it.
            self._engine.post(command, lambda answer: None)

    # --- incidents ------------------------------------------------------------------------------------------

    def committed(self, events: Sequence[Event]) -> None:
        """A failure is a line in the log too, however soon it is recovered from: a search for the rank finds it."""
        self._log_incidents(self._incident_lines.committed(events, now_s=time.monotonic()))

    def _log_incidents(self, lines: Sequence[IncidentLine]) -> None:
        for level, event in lines:
            rank = event.first.rank if event.first is not None else None
            extra = {
                "worker_id": f"{event.job_id}-rank{rank}" if rank is not None else None,
                # As lines of its workers have it: what is asked for of a job holds both.
                "task_id": event.job_id if event.job_id != DEFAULT_JOB else None,
            }
            severity = logging.ERROR if level == "error" else logging.WARNING
            log.log(severity, "%s", describe(event).text, extra=extra)

    # --- the coordinator itself -----------------------------------------------------------------------------

    def _fleet(self, now_mono_s: float) -> dict[str, float | None]:
        counts = (now_mono_s, self._logs.total, self._logs.dropped_total, self._metrics.events_total)
        before, self._counted = self._counted, counts
        rates: list[float | None] = [None, None, None]
        if before is not None and now_mono_s > before[0]:
            passed_s = now_mono_s - before[0]
            rates = [(now - then) / passed_s for now, then in zip(counts[1:], before[1:], strict=True)]
        lines, dropped, events = rates
        return {
            **asdict(self._fleet_metrics()),
            "log_lines": lines,
            "log_lines_dropped": dropped,
            "events": events,
            "loop_lag": self.loop_lag_s * 1000,
            "memory": _resident_bytes(),
        }

    def _recall(self) -> None:
        body = self._logs.archive.note(GOODPUT_NOTE) if self._logs.archive is not None else None
        if body is not None:
            try:
                self.goodput.load(body)
            except ValueError as error:
                log.warning("the goodput of earlier jobs is lost: %s", error)
        body = self._logs.archive.note(LAST_NOTE) if self._logs.archive is not None else None
        if body is not None:
            try:
                known = msgspec.json.decode(body, type=list[views.JobView])
            except msgspec.DecodeError as error:
                log.warning("the last reports of earlier jobs are lost: %s", error)
            else:
                self._last = {JobId(each.id): each for each in known}


def _step_times(reports: Iterable[tuple[WorkerId, Report]]) -> list[StepTime]:
    """Of ranks that make steps and know how long they wait for each other."""
    return [
        StepTime(
            worker_id=worker_id,
            step=report.step,
            own_s=max(0.0, report.metrics["step_time_s"] - report.metrics["sync_wait_s"]),
        )
        for worker_id, report in reports
        if report.state in MAKING_STEPS and {"step_time_s", "sync_wait_s"} <= report.metrics.keys()
    ]


def _used(report: Report) -> dict[str, float | None]:
    used = report.resources
    gpus = used.gpus if used is not None else []
    return {
        "gpu_utilization": statistics.fmean(g.utilization_percent for g in gpus) if gpus else None,
        "gpu_memory": float(sum(g.memory_used_bytes for g in gpus)) if gpus else None,
        "cpu": used.cpu_percent if used is not None else None,
        "step_time": report.metrics.get("step_time_s"),
        "sync_wait": report.metrics.get("sync_wait_s"),
    }


def _values(metrics: Iterable[Mapping[str, float]], name: str) -> list[float]:
    return [value for m in metrics if (value := m.get(name)) is not None and abs(value) < float("inf")]


def _median(metrics: Iterable[Mapping[str, float]], name: str) -> float | None:
    values = _values(metrics, name)
    return statistics.median(values) if values else None


def _resident_bytes() -> float | None:
    try:
        with open("/proc/self/statm") as file:
            return float(int(file.read().split()[1]) * mmap.PAGESIZE)
    except (OSError, ValueError, IndexError):
        return None
