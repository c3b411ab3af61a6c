"""Metrics that are counted elsewhere, handed to Prometheus when it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.coordinator.archive import Archive
from strata.coordinator.engine import Engine
from strata.coordinator.leadership import Standing
from strata.coordinator.logs.store import LogStore
from strata.coordinator.metrics.watch import JobMetrics, Watch
from strata.core import views
from strata.core.fleet.checkpoints import Checkpoints
from strata.core.telemetry.goodput import PARTS

JOBS_SHOWN = 32
"""Jobs with series of their own: those whose workers report, the first ones of them."""


class LogCollector(Collector):
    def __init__(self, logs: LogStore) -> None:
        self._logs = logs

    def collect(self) -> Iterator[Metric]:
        logs = self._logs
        lines = CounterMetricFamily("strata_log_lines", "Log lines received", labels=["level"])
        for level, count in logs.counts.items():
            lines.add_metric([level], count)
        yield lines
        dropped = CounterMetricFamily(
            "strata_log_lines_dropped",
            "Log lines dropped by the rate limit, or not written to disk (still in memory for a while)",
            labels=["why"],
        )
        dropped.add_metric(["rate"], logs.dropped_total)
        dropped.add_metric(["disk"], logs.archive.refused_total if logs.archive is not None else 0)
        yield dropped
        yield GaugeMetricFamily("strata_log_followers", "Readers that follow the log", value=logs.followers)


class StorageCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        space = self._engine.space
        yield GaugeMetricFamily(
            "strata_storage_full", "Whether changes are refused for lack of disk space", value=space.is_full
        )
        yield GaugeMetricFamily(
            "strata_storage_free_bytes", "Free on the disk of the journal", value=space.free_bytes
        )
        yield CounterMetricFamily(
            "strata_storage_refused",
            "Commands refused for lack of disk space",
            value=self._engine.refused_full_total,
        )
        sizes = self._engine.journal_sizes
        if sizes is not None:
            for name, about, size_bytes in (
                ("strata_journal_bytes", "The journal's files, or keys in etcd", sizes.file_bytes),
                ("strata_journal_events_bytes", "Events that the journal keeps", sizes.story_bytes),
                ("strata_journal_snapshot_bytes", "The newest snapshot in the journal", sizes.snapshot_bytes),
            ):
                yield GaugeMetricFamily(name, about, value=size_bytes)
            yield GaugeMetricFamily(
                "strata_journal_records",
                "Events that the journal keeps; in etcd, batches of them since the newest snapshot",
                value=sizes.records,
            )
        yield CounterMetricFamily(
            "strata_journal_compactions",
            "Compactions of the journal in the background",
            value=self._engine.compactions_total,
        )
        objects = GaugeMetricFamily(
            "strata_objects", "Objects that the coordinator keeps in memory", labels=["kind"]
        )
        for kind, count in views.objects(self._engine.cluster).items():
            objects.add_metric([kind], count)
        yield objects


class LeadershipCollector(Collector):
    """Which of several coordinators leads, as this one sees it. A single one leads, in term 0."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing

    def collect(self) -> Iterator[Metric]:
        standing = self._standing
        yield GaugeMetricFamily(
            "strata_leader", "Whether this coordinator leads", value=standing.role == "leader"
        )
        yield GaugeMetricFamily("strata_leader_term", "Term of the current leader", value=standing.term)
        yield CounterMetricFamily(
            "strata_elections",
            "Elections of a leader seen by this coordinator",
            value=standing.elections_total,
        )
        yield GaugeMetricFamily(
            "strata_standby_behind_records",
            "Records of the journal that a standby has not applied yet",
            value=standing.behind,
        )


class ArchiveCollector(Collector):
    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def collect(self) -> Iterator[Metric]:
        archive = self._archive
        yield GaugeMetricFamily(
            "strata_archive_lag_seconds",
            "Age of the oldest log line or metric that is not in the archive yet",
            value=archive.lag_s(),
        )
        yield GaugeMetricFamily(
            "strata_archive_waiting_bytes",
            "Bytes on disk that wait for the archive",
            value=archive.outbox.waiting_bytes,
        )
        for name, about, count in (
            ("strata_archive_uploads", "Objects written to the archive", archive.uploads_total),
            ("strata_archive_failures", "Times that the archive could not be used", archive.failures_total),
            (
                "strata_archive_lost",
                "Records of logs and metrics that are only on this disk: the backlog was full",
                archive.outbox.lost_total,
            ),
        ):
            yield CounterMetricFamily(name, about, value=count)


class JobCollector(Collector):
    """What jobs report. A job whose workers have left has no series: the last value of a gauge is not its present."""

    def __init__(self, watch: Watch, checkpoints: Checkpoints) -> None:
        self._watch = watch
        self._checkpoints = checkpoints

    def collect(self) -> Iterator[Metric]:
        jobs = dict(list(self._watch.jobs.items())[:JOBS_SHOWN])

        def gauge(name: str, about: str, value: Callable[[JobMetrics], float | None]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, about, labels=["job_id"])
            for job, found in jobs.items():
                number = value(found)
                if number is not None:
                    family.add_metric([job], number)
            return family

        yield gauge("strata_job_loss", "Mean loss over the ranks", lambda f: f.loss)
        yield gauge(
            "strata_job_tokens_per_second", "Tokens trained per second", lambda f: f.tokens_per_second
        )
        yield gauge(
            "strata_job_samples_per_second", "Samples trained per second", lambda f: f.samples_per_second
        )
        yield gauge(
            "strata_job_step_seconds", "Time of a step, median over the ranks", lambda f: f.step_time_s
        )
        yield gauge(
            "strata_job_sync_wait_seconds",
            "Share of a step spent waiting for other ranks, median over the ranks",
            lambda f: f.sync_wait_s,
        )
        yield gauge("strata_job_step", "Steps completed, by the furthest rank", lambda f: f.step)
        yield gauge("strata_job_workers", "Workers that report", lambda f: f.workers)
        yield gauge("strata_job_slow_workers", "Workers that the others wait for", lambda f: f.slow_workers)
        spent = CounterMetricFamily(
            "strata_job_time_seconds", "Worker-seconds by activity", labels=["job_id", "part"]
        )
        saved = GaugeMetricFamily(
            "strata_job_last_checkpoint_timestamp_seconds",
            "When the checkpoint that a recovery would use was completed",
            labels=["job_id"],
        )
        for job in jobs:
            view = self._watch.goodput.view(job)
            for part in PARTS:
                spent.add_metric([job, part], getattr(view, f"{part}_s"))
            latest = self._checkpoints.latest(job)
            if latest is not None:
                saved.add_metric([job], latest.ended_at_s or latest.created_at_s)
        yield spent
        yield saved
        yield GaugeMetricFamily(
            "strata_loop_lag_seconds",
            "Delay of the coordinator's own timer",
            value=self._watch.loop_lag_s,
        )
