"""The coordinator's metrics over OTLP, for those who run an OpenTelemetry collector. Optional.

What `/metrics` shows is sent, under the same names, every few seconds. The event loop takes a snapshot; a thread of the
SDK sends it, so a collector that is away costs nothing but its metrics. Of a histogram its count and sum are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from strata.errors import MissingDependency

EXPORT_EVERY_S = 10.0
EXPORT_TIMEOUT_S = 5.0


class OtelExport:
    """`refresh` about once a second, on the thread that owns the metrics; `close` sends what there is."""

    def __init__(self, registry: CollectorRegistry, *, endpoint: str = "", reader: Any = None) -> None:
        try:
            from opentelemetry.metrics import Observation
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.resources import Resource
        except ImportError:
            raise _missing("opentelemetry-sdk") from None
        self._registry = registry
        self._observation = Observation
        self._values: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.refresh()
        resource = Resource.create({"service.name": "strata-coordinator"})
        self._provider = MeterProvider([reader or _otlp_reader(endpoint)], resource=resource)
        meter = self._provider.get_meter("strata")
        for name, kind, about in self._instruments():
            make = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
            make(name, [self._observe(name)], description=about)

    def refresh(self) -> None:
        """Take the metrics as they are now."""
        values: dict[str, list[tuple[dict[str, str], float]]] = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    values.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
        self._values = values

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=int(EXPORT_TIMEOUT_S * 1000))

    def _instruments(self) -> Iterator[tuple[str, str, str]]:
        for metric in self._registry.collect():
            if metric.type == "histogram":
                yield f"{metric.name}_count", "counter", metric.documentation
                yield f"{metric.name}_sum", "counter", metric.documentation
            elif metric.type == "counter":
                yield f"{metric.name}_total", "counter", metric.documentation
            else:
                yield metric.name, "gauge", metric.documentation

    def _observe(self, name: str) -> Callable[[Any], Iterable[Any]]:
        def observe(options: Any) -> Iterable[Any]:
            return [self._observation(value, labels) for labels, value in self._values.get(name, ())]

        return observe


def _otlp_reader(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError:
        raise _missing("opentelemetry-exporter-otlp-proto-http") from None
    exporter = OTLPMetricExporter(f"{endpoint.rstrip('/')}/v1/metrics", timeout=EXPORT_TIMEOUT_S)
    return PeriodicExportingMetricReader(exporter, export_interval_millis=EXPORT_EVERY_S * 1000)


def _missing(package: str) -> MissingDependency:
    return MissingDependency(package, extra="otel", feature="OpenTelemetry export (otel_endpoint)")
