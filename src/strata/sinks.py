"""Where else a run's metrics go: TensorBoard, Weights & Biases, MLflow, each through its own client.

    with strata.elastic(..., sinks=[strata.sinks.TensorBoard("runs/a/tensorboard")]) as job:

A sink is written to by rank 0, on a thread of its own, so a slow or failing one costs training nothing; one that fails is left
out from then on, with a warning. Curves stay true after a rollback: TensorBoard hides what is trained again, and for tools that
cannot take a value back, values wait until a snapshot or checkpoint covers their step, so that a restart continues after them.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.telemetry import histograms
from strata.core.telemetry.histograms import HistogramBuckets
from strata.errors import StrataError


class MissingClient(StrataError):
    """A sink whose client is not installed."""

    code = "missing_client"

    def __init__(self, package: str) -> None:
        super().__init__(f"The package '{package}' is not installed.", hint=f"pip install {package}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRows:
    """Values that were logged together, by step."""

    names: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    times: npt.NDArray[np.float64]
    """Unix seconds."""
    values: npt.NDArray[np.float64]
    """A row for each step, a column for each name; a histogram has one for each of its parts (`core.telemetry.histograms`)."""

    def by_step(self) -> Iterator[tuple[int, float, dict[str, float], dict[str, HistogramBuckets]]]:
        """Step, time, the metrics that are numbers and those that are histograms."""
        of_histograms, of_numbers = histograms.split(self.names)
        for step, at_s, row in zip(self.steps.tolist(), self.times.tolist(), self.values, strict=True):
            found = {name: histograms.buckets(row[parts]) for name, parts in of_histograms.items()}
            yield (
                step,
                at_s,
                {self.names[index]: float(row[index]) for index in of_numbers},
                {name: buckets for name, buckets in found.items() if buckets is not None},
            )

    def where(self, which: npt.NDArray[np.bool_]) -> SinkRows:
        return replace(self, steps=self.steps[which], times=self.times[which], values=self.values[which])


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRun:
    """The run whose metrics are sent."""

    run: str
    job: str
    generation: int
    resumed_step: int
    """Training continues after this step; 0 where it begins."""


class Sink(ABC):
    """What a sink does. Called on one thread, in this order: `open`, `write` as often as there is something, `close`."""

    takes_uncommitted = False
    """Whether it can take back values of steps that are trained again; if not, it gets values once a save covers them."""

    def check(self) -> None:  # noqa: B027
        """Raise an error if something is missing, before training starts; by default nothing is."""

    @abstractmethod
    def open(self, run: SinkRun) -> None: ...

    @abstractmethod
    def write(self, rows: SinkRows) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Sink):
    """Event files in a folder, for `tensorboard --logdir`. A restart hides what it trains again (`purge_step`)."""

    takes_uncommitted = True

    def __init__(self, folder: str | os.PathLike[str], *, flush_s: int = 10) -> None:
        self._folder = os.fspath(folder)
        self._flush_s = flush_s
        self._writer: Any = None
        self._events: Any = None
        self._summaries: Any = None

    def check(self) -> None:
        _client("tensorboard.summary.writer.event_file_writer", package="tensorboard")

    def open(self, run: SinkRun) -> None:
        writing = _client("tensorboard.summary.writer.event_file_writer", package="tensorboard")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writing.EventFileWriter(
            self._folder, flush_secs=self._flush_s, filename_suffix=f".strata-{run.generation}"
        )
        if run.resumed_step or run.generation > 1:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            # Whatever other files have of this step and later ones is no longer shown.
            self._writer.add_event(self._events.Event(step=run.resumed_step + 1, session_log=started))

    def write(self, rows: SinkRows) -> None:
        value_of = self._summaries.Summary.Value
        for step, at_s, numbers, of_histograms in rows.by_step():
            values = [value_of(tag=name, simple_value=value) for name, value in numbers.items()]
            values += [
                value_of(tag=name, histo=self._histogram(found)) for name, found in of_histograms.items()
            ]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(self._events.Event(wall_time=at_s, step=step, summary=summary))

    def _histogram(self, found: HistogramBuckets) -> Any:
        made = importlib.import_module("tensorboard.compat.proto.histogram_pb2").HistogramProto
        return made(
            min=found.edges[0],
            max=found.edges[-1],
            num=found.count,
            sum=found.mean * found.count,
            sum_squares=(found.std**2 + found.mean**2) * found.count,
            bucket_limit=found.edges[1:].tolist(),
            bucket=found.counts.tolist(),
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Sink):
    """A run of Weights & Biases, continued by every restart. Takes what `wandb.init` takes; `WANDB_MODE=offline` works."""

    def __init__(self, project: str | None = None, **settings: object) -> None:
        self._settings: dict[str, object] = {"project": project, **settings}
        self._run: Any = None

    def check(self) -> None:
        _client("wandb", package="wandb")

    def open(self, run: SinkRun) -> None:
        wandb = _client("wandb", package="wandb")
        named = {"id": "".join(c if c.isalnum() or c in "-_" else "-" for c in run.run)[:64], "name": run.job}
        self._run = wandb.init(resume="allow", **{**named, **self._settings})
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")

    def write(self, rows: SinkRows) -> None:
        made = _client("wandb", package="wandb").Histogram
        for step, _, numbers, of_histograms in rows.by_step():
            drawn = {
                name: made(np_histogram=(found.counts.tolist(), found.edges.tolist()))
                for name, found in of_histograms.items()
            }
            self._run.log({"trainer/step": step, **numbers, **drawn})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow(Sink):
    """A run of MLflow, continued by every restart. It has no histograms: it gets their quantiles, as metrics of their own."""

    AT_ONCE = 1_000
    """What its server takes in one call."""

    def __init__(self, *, tracking_uri: str | None = None, experiment: str | None = None) -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._client: Any = None
        self._id = ""

    def check(self) -> None:
        _client("mlflow", package="mlflow")

    def open(self, run: SinkRun) -> None:
        mlflow = _client("mlflow", package="mlflow")
        self._client = mlflow.MlflowClient(self._tracking_uri)
        name = self._experiment or "Default"
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        quoted = run.run.replace("'", "")
        found = self._client.search_runs([experiment], f"tags.`strata.run` = '{quoted}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"strata.run": quoted}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.job).info.run_id

    def write(self, rows: SinkRows) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        names = [name.replace(histograms.MARK, "/") for name in rows.names]  # Which it does not take.
        values = [
            metric(name, value, int(at_s * 1000), step)
            for step, at_s, row in zip(
                rows.steps.tolist(), rows.times.tolist(), rows.values.tolist(), strict=True
            )
            for name, value in zip(names, row, strict=True)
        ]
        for at in range(0, len(values), self.AT_ONCE):
            self._client.log_batch(self._id, metrics=values[at : at + self.AT_ONCE])

    def close(self) -> None:
        if self._id:
            self._client.set_terminated(self._id)


def _client(module: str, *, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingClient(package) from error
