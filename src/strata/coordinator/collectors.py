"""Figures that are counted elsewhere, handed to Prometheus when it asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata.coordinator.logs import LogStore


class LogCollector(Collector):
    def __init__(self, logs: LogStore) -> None:
        self._logs = logs

    def collect(self) -> Iterator[Metric]:
        logs = self._logs
        lines = CounterMetricFamily("strata_log_lines", "Log lines taken in", labels=["level"])
        for level, count in logs.counts.items():
            lines.add_metric([level], count)
        yield lines
        dropped = CounterMetricFamily(
            "strata_log_lines_dropped",
            "Log lines lost, to the rate that is kept or (still in memory for a while) to the disk",
            labels=["why"],
        )
        dropped.add_metric(["rate"], logs.dropped_total)
        dropped.add_metric(["disk"], logs.archive.refused_total if logs.archive is not None else 0)
        yield dropped
        yield GaugeMetricFamily("strata_log_followers", "Readers that follow the log", value=logs.followers)
