"""What a loop logs is in the run's history, over the end of everything, and true after a rollback."""

from __future__ import annotations

import importlib
import json
import math
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strata.core.messages import InvalidArgument
from strata.core.telemetry.histograms import PARTS, PERCENTS, buckets
from strata.rpc import coordinator_pb2 as pb
from strata.sinks import MLflow, Sink, SinkRows, SinkRun, TensorBoard, WeightsAndBiases
from strata.training.metrics.histogram import SAMPLED, Histogram
from strata.training.metrics.metric_log import MetricLog
from strata.worker import outbox as outbox_module
from strata.worker.outbox import MetricOutbox
from tests.support import Coordinator, eventually
from tests.training.loops import Loop

RUN = SinkRun(run="r", job="j", generation=1, resumed_step=0)


class Collected(Sink):
    """What a sink was sent."""

    def __init__(self, *, takes_uncommitted: bool = False) -> None:
        self.takes_uncommitted = takes_uncommitted
        self.opened: list[SinkRun] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = threading.Event()

    def open(self, run: SinkRun) -> None:
        self.opened.append(run)

    def write(self, rows: SinkRows) -> None:
        for step, values in zip(rows.steps.tolist(), rows.values.tolist(), strict=True):
            self.rows.append((step, dict(zip(rows.names, values, strict=True))))

    def close(self) -> None:
        self.closed.set()

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.rows if name in values]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    server = Coordinator(tmp_path / "coordinator").start()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.output), "".join(server.output)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that ends waits a few seconds for its sinks and its coordinator, and one that fails a second. On a busy machine they may
    take longer, and what is told here is what they have in the end."""
    for limit in (
        *("training.metrics.metric_log.CLOSE_S", "training.metrics.metric_log.CRASH_S"),
        *("training.link.CLOSE_S", "training.link.CRASH_S", "training.link.METRICS_S"),
        *("training.link.JOIN_TIMEOUT_S", "worker.session.LAST_METRICS_S", "worker.session.GOODBYE_S"),
    ):
        monkeypatch.setattr(f"strata.{limit}", 100.0)


class Failure(Exception):
    """Of the script."""


def series(coordinator: Coordinator, run: str, name: str, query: str = "") -> dict[str, Any]:
    found = coordinator.get(f"/api/runs/{run}/metrics/series?name={name}{query}")
    curves: dict[str, Any] = found["series"][0]
    return curves


def cli(*arguments: str) -> str:
    command = [sys.executable, "-m", "strata.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def train(loop: Loop, *, fail_at: int | None = None, once: threading.Event | None = None) -> str:
    with loop.job as job:
        for batch in job:
            if job._manager is not None:
                job._manager.wait_pending(60)
            loop.train(batch)
            job.log(
                {
                    "mine": float(job.generation * 1000 + job.step + 1),
                    "eval": {"nan": math.nan},
                    "spread": Histogram(range(10)),
                }
            )
            if fail_at == job.step + 1:
                assert once is None or once.wait(60)
                # Who was never connected has nobody to tell the last values to.
                assert job._link is None or job._link._orchestrator.wait_connected(60)
                raise Failure
        job.log({"at_the_end": 1})
        return job.run
    raise AssertionError("unreachable")


def test_history_outlives_everything_and_a_rollback_leaves_a_branch(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    where = str(tmp_path / "checkpoints")
    with pytest.raises(Failure):
        # A save every 4 steps, none in memory: what comes after step 4 is lost with the process.
        train(Loop(where, coordinator=coordinator.address, snapshot_every=0), fail_at=7)
    coordinator.kill()
    coordinator.start()
    loop = Loop(where, coordinator=coordinator.address, snapshot_every=0)
    run = train(loop)
    last = loop.job.step
    found = series(coordinator, run, "mine")
    assert found["committed"]["steps"] == list(range(1, last + 1))
    values = found["committed"]["values"]
    assert values == [*(1000.0 + n for n in range(1, 5)), *(2000.0 + n for n in range(5, last + 1))]
    (branch,) = found["abandoned"]
    assert (branch["generation"], branch["steps"]) == (1, [5, 6, 7])
    assert branch["values"] == [1005.0, 1006.0, 1007.0]
    summary = coordinator.get(f"/api/runs/{run}/metrics")
    metrics = {each["name"]: each for each in summary["metrics"]}
    assert {"mine", "eval/nan", "at_the_end", "lr", "step_time_s", "samples_per_second"} <= metrics.keys()
    assert (metrics["eval/nan"]["count"], metrics["eval/nan"]["nonfinite"]) == (last, last)
    assert metrics["lr"]["last"] == 0.05
    assert metrics["at_the_end"]["last_step"] == last
    assert [(s["generation"], s["resumed_step"]) for s in summary["starts"]] == [(1, 0), (2, 4)]
    assert summary["dropped"] == 0
    details = coordinator.get(f"/api/runs/{run}")["details"]
    assert (details["world_size"], details["options"]["snapshot_every"]) == (1, 0)
    assert details["options"]["checkpoints"]
    assert "pytest" in details["command"]
    status, info = coordinator.post(
        f"/api/runs/{run}/notes", {"tags": ["baseline"], "notes": "first attempt"}
    )
    assert (status, info["tags"], info["notes"]) == (200, ["baseline"], "first attempt")
    assert coordinator.post(f"/api/runs/{run}/notes", {"tags": [""]})[0] == 422
    coordinator.kill()
    coordinator.start()
    assert coordinator.get("/api/runs")[0]["tags"] == ["baseline"]
    assert coordinator.post("/api/runs/nobody/notes", {"notes": ""})[0] == 404
    assert [each["run"] for each in coordinator.get("/api/runs")] == [run]
    assert series(coordinator, loop.job.name, "mine", "&from=3&to=5")["committed"]["steps"] == [3, 4, 5]
    shown = cli("metrics", run, "mine", "--csv", "--api", f"http://127.0.0.1:{coordinator.http_port}")
    assert [line.split(",")[1] for line in shown.splitlines()[1:]] == [str(n) for n in range(1, last + 1)]
    listed = cli("metrics", "--api", f"http://127.0.0.1:{coordinator.http_port}")
    assert run in listed


def test_values_logged_while_the_coordinator_is_away_arrive_once(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    loop = Loop(str(tmp_path / "checkpoints"), coordinator=coordinator.address, epochs=None, max_steps=30)
    with loop.job as job:
        for batch in job:
            loop.train(batch)
            if job.step == 9:
                eventually(lambda: bool(coordinator.get("/api/runs")), within_s=60, what="something was kept")
                coordinator.kill()
            if job.step == 20:
                coordinator.start()
                eventually(
                    lambda: any(worker["connected"] for worker in coordinator.get("/api/workers")),
                    within_s=60,
                    what="it is connected again",
                )
            job.log({"n": job.step + 1})
    assert series(coordinator, job.run, "n")["committed"]["values"] == [float(n) for n in range(1, 31)]


def test_sinks_get_committed_steps_only(tmp_path: Path) -> None:
    where = str(tmp_path / "checkpoints")
    held, early = Collected(), Collected(takes_uncommitted=True)
    with pytest.raises(Failure):
        train(Loop(where, sinks=[held, early], snapshot_every=0), fail_at=7)
    assert held.closed.is_set()
    assert [step for step, _ in held.of("mine")] == [1, 2, 3, 4]
    assert [step for step, _ in early.of("mine")] == [1, 2, 3, 4, 5, 6, 7]
    again = Collected()
    loop = Loop(where, sinks=[again], snapshot_every=0)
    train(loop)
    assert [(each.generation, each.resumed_step) for each in again.opened] == [(2, 4)]
    assert [step for step, _ in again.of("mine")] == list(range(5, loop.job.step + 1))


def test_a_sink_that_fails_costs_training_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Collected):
        def write(self, rows: SinkRows) -> None:
            raise OSError("the tracker is away")

    good = Collected()
    loop = Loop(str(tmp_path / "checkpoints"), sinks=[Failing(), good])
    train(loop)
    assert len(good.of("mine")) == loop.job.step
    assert "the tracker is away" in caplog.text


# --- the log itself -------------------------------------------------------------------------------------------


@pytest.fixture
def collected() -> Iterator[tuple[MetricLog, Collected]]:
    sink = Collected(takes_uncommitted=True)
    made = MetricLog(run=RUN, outbox=None, sinks=[sink], step=lambda: 0)
    yield made, sink
    made.close(failed=False)


def test_nested_names_and_every_kind_of_number(collected: tuple[MetricLog, Collected]) -> None:
    metric_log, sink = collected
    loss = torch.tensor(2.5, requires_grad=True) * 2
    metric_log.log(
        {
            "loss": loss,
            "eval": {"top": {"1": np.float32(0.5)}, "n": True},
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
            "whole": torch.tensor(7),
            "inf": -math.inf,
        },
        3,
    )
    metric_log.close(failed=False)
    expected = {"loss": 5.0, "eval/top/1": 0.5, "eval/n": 1.0, "half": 1.5, "whole": 7.0, "inf": -math.inf}
    assert sink.rows == [(3, expected)]


def test_a_tensor_is_read_as_it_was_when_it_was_logged(collected: tuple[MetricLog, Collected]) -> None:
    metric_log, sink = collected
    total = torch.tensor(4.0)
    metric_log.log({"total": total}, 1)
    total.zero_()
    metric_log.close(failed=False)
    assert sink.of("total") == [(1, 4.0)]


def test_kinds_and_shapes_of_tensors_may_change_under_the_same_names(
    collected: tuple[MetricLog, Collected],
) -> None:
    metric_log, sink = collected
    rows = [
        (torch.tensor(1.5), torch.tensor(2)),
        (torch.tensor(1.5), torch.tensor(2**53 - 1)),
        (torch.tensor([0.25], dtype=torch.bfloat16), torch.tensor(True)),
        (torch.tensor(4.0), 5.0),
    ]
    for step, (one, other) in enumerate(rows):
        metric_log.log({"one": one, "other": other}, step)
    for bad in (torch.zeros(2), torch.tensor(1j)):
        with pytest.raises(InvalidArgument, match="other"):
            metric_log.log({"one": torch.tensor(1.0), "other": bad}, 9)
    metric_log.close(failed=False)
    assert [value for _, value in sink.of("one")] == [1.5, 1.5, 0.25, 4.0]
    assert [value for _, value in sink.of("other")] == [2.0, 2.0**53 - 1, 1.0, 5.0]


@pytest.mark.parametrize(
    "bad", [{"a": "text"}, {"a": None}, {"a": 10**400}, {"": 1.0}, {3: 1.0}, {"_time": 1.0}]
)
def test_what_is_no_metric_is_refused_with_its_name(
    collected: tuple[MetricLog, Collected], bad: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        collected[0].log(bad, 1)


def rows(values: int) -> pb.MetricRows:
    return pb.MetricRows(names=["a"], steps=range(values), times=[0.0] * values, values=bytes(8 * values))


def test_an_outbox_repeats_what_is_not_answered_and_counts_what_it_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox_module, "METRICS_KEPT_BYTES", 80)
    outbox = MetricOutbox(generation=1, started_ms=5, resumed_step=0)
    outbox.put(rows(5))
    first = outbox.take()
    assert first is not None
    assert outbox.take() is None, "it is under way"
    outbox.reconnected()
    assert outbox.take() is first
    for _ in range(4):
        outbox.put(rows(5))
    outbox.answered(pb.MetricsKept(number=99, started_ms=5))
    assert outbox.take() is None, "that was another one"
    outbox.answered(pb.MetricsKept(number=1, started_ms=5))
    second = outbox.take()
    assert second is not None
    assert (second.number, len(second.rows), second.dropped) == (2, 2, 10)
    outbox.answered(pb.MetricsKept(number=2, started_ms=5, refused="no space"))
    assert (outbox.is_empty, outbox.dropped_total, outbox.refused) == (True, 20, "no space")


# --- histograms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(101.0).flip(0),
        torch.arange(101.0, dtype=torch.bfloat16).requires_grad_(),
        np.arange(101).reshape(1, 101),
        [math.inf, *range(101), -math.inf, math.nan],
    ],
    ids=["tensor", "half with gradient", "array", "not finite"],
)
def test_a_histogram_is_the_quantiles_of_its_values(values: Any) -> None:
    found = dict(zip(PARTS, (float(part) for part in Histogram(values).parts("h")), strict=True))
    for percent in PERCENTS:
        assert found[f"q{percent}"] == percent
    assert (found["mean"], found["count"]) == (50.0, 101.0)
    assert found["std"] == pytest.approx(np.arange(101).std())


def test_of_many_values_quantiles_are_sampled_and_extremes_are_not() -> None:
    chance = torch.Generator().manual_seed(1)
    values = torch.randn(10 * SAMPLED, generator=chance)
    values[7], values[8] = -50.0, 60.0
    found = dict(zip(PARTS, (float(part) for part in Histogram(values).parts("h")), strict=True))
    assert (found["q0"], found["q100"], found["count"]) == (-50.0, 60.0, 10.0 * SAMPLED)
    assert found["q50"] == pytest.approx(0, abs=0.02)
    assert found["q95"] == pytest.approx(1.645, abs=0.05)
    parts = [found[part] for part in PARTS]
    made = buckets(np.array(parts))
    assert made is not None
    assert made.count == pytest.approx(10 * SAMPLED)
    assert (np.diff(made.edges) >= 0).all()


def test_a_histogram_of_one_value_has_one_bucket_and_equal_edges_are_one() -> None:
    one = buckets(np.array([float(part) for part in Histogram([3.0] * 7).parts("h")]))
    assert one is not None
    assert (one.edges.tolist(), one.counts.tolist()) == ([3.0, 3.0], [7.0])
    two = buckets(np.array([float(part) for part in Histogram([0.0] * 60 + [1.0] * 40).parts("h")]))
    assert two is not None
    assert two.edges.tolist() == [0.0, 1.0]
    assert two.count == pytest.approx(100)


def test_a_histogram_of_no_finite_number_is_drawn_by_nobody() -> None:
    assert buckets(np.array([float(part) for part in Histogram([math.nan]).parts("h")])) is None


@pytest.mark.parametrize("values", [[], torch.zeros(2, dtype=torch.complex64), "text", None])
def test_what_is_no_distribution_is_refused_by_name(values: Any) -> None:
    metric_log = MetricLog(run=RUN, outbox=None, step=lambda: 0)
    with pytest.raises(InvalidArgument, match="histogram 'deep'"):
        metric_log.log({"a": {"deep": Histogram(values)}}, 1)
    metric_log.close(failed=False)


def test_histograms_are_kept_by_step_like_any_metric(coordinator: Coordinator, tmp_path: Path) -> None:
    run = train(Loop(str(tmp_path / "checkpoints"), coordinator=coordinator.address))
    median = series(coordinator, run, "spread%23q50")["committed"]
    assert set(median["values"]) == {4.0}
    assert median["steps"] == series(coordinator, run, "mine")["committed"]["steps"]
    address = f"http://127.0.0.1:{coordinator.http_port}"
    table = cli("metrics", run, "--api", address)
    (row,) = [line.split() for line in table.splitlines() if line.startswith("spread")]
    assert row[:3] == ["spread", "(histogram)", "4"]
    assert row[4:6] == ["0", "9"]
    assert len(cli("metrics", run, "spread", "--api", address).splitlines()) == 2


# --- sinks, with their own clients ----------------------------------------------------------------------------


def test_tensorboard_hides_what_is_trained_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where, folder = str(tmp_path / "checkpoints"), tmp_path / "tensorboard"
    with pytest.raises(Failure):
        train(Loop(where, sinks=[TensorBoard(folder)], snapshot_every=0), fail_at=7)
    loop = Loop(where, sinks=[TensorBoard(folder)], snapshot_every=0)
    train(loop)
    seen = EventAccumulator(str(folder))
    seen.Reload()
    spread = seen.Histograms("spread")[0].histogram_value
    assert (spread.min, spread.max, spread.num, spread.sum) == (0, 9, 10, 45)
    assert sum(spread.bucket) == pytest.approx(10)
    found = [(event.step, event.value) for event in seen.Scalars("mine")]
    assert found == [
        *((n, 1000.0 + n) for n in range(1, 5)),
        *((n, 2000.0 + n) for n in range(5, loop.job.step + 1)),
    ]


class Opened(WeightsAndBiases):
    """Says how far it is."""

    def __init__(self, project: str, **settings: Any) -> None:
        super().__init__(project, **settings)
        self.opened, self.closed = threading.Event(), threading.Event()

    def open(self, run: SinkRun) -> None:
        super().open(run)
        self.opened.set()

    def close(self) -> None:
        super().close()
        self.closed.set()


def test_weights_and_biases_gets_every_committed_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    where, sent = str(tmp_path / "checkpoints"), str(tmp_path)
    try:
        first = Opened("p", dir=sent)
        with pytest.raises(Failure):
            train(Loop(where, sinks=[first], snapshot_every=0), fail_at=7, once=first.opened)
        assert first.closed.wait(60)
        began_s = int(time.time())
        # Its files are named by the second, and a process that is restarted takes longer than that.
        eventually(lambda: time.time() > began_s + 1, within_s=10)
        loop = Loop(where, sinks=[WeightsAndBiases("p", dir=sent)], snapshot_every=0)
        run = train(loop)
    finally:
        wandb.teardown()  # Its service outlives the run otherwise, until this process ends.
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [run[:8] in path.name for path in files] == [True, True], "one run, continued"
    logged = [row for path in files for row in wandb_history(path)]
    found = [(row["trainer/step"], row["mine"]) for row in logged if "mine" in row]
    assert found == [
        *((n, 1000.0 + n) for n in range(1, 5)),
        *((n, 2000.0 + n) for n in range(5, loop.job.step + 1)),
    ]
    drawn = logged[0]
    assert (drawn["spread/_type"], drawn["spread/bins"]) == ("histogram", list(range(10)))
    assert sum(drawn["spread/values"]) == pytest.approx(10)


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """What a file for `wandb sync` has: records of its protocol in the log format of LevelDB, after seven bytes of its own."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, rows, record = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # No head fits into what is left of a block.
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # The whole of a record, or the last of it.
            found = messages.Record.FromString(record)
            items = found.history.item
            rows.append(
                {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}
            )
            record = b""
    return [row for row in rows if row]


def test_mlflow_gets_every_committed_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where, store = str(tmp_path / "checkpoints"), f"file:{tmp_path / 'mlruns'}"
    with pytest.raises(Failure):
        train(Loop(where, sinks=[MLflow(tracking_uri=store)], snapshot_every=0), fail_at=7)
    loop = Loop(where, sinks=[MLflow(tracking_uri=store)], snapshot_every=0)
    train(loop)
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "mine")
    assert sorted((each.step, each.value) for each in history) == [
        *((n, 1000.0 + n) for n in range(1, 5)),
        *((n, 2000.0 + n) for n in range(5, loop.job.step + 1)),
    ]
    greatest = client.get_metric_history(found.info.run_id, "spread/q100")
    assert {each.value for each in greatest} == {9.0}
