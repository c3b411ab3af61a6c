"""Values that a CUDA device holds are logged as they were, of every kind, from every stream, without waiting for the device."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch

from strata.core.messages import InvalidArgument
from strata.sinks import Sink, SinkRows, SinkRun
from strata.training.metrics.metric_log import MetricLog

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

BUSY_S = 1.0


class Collected(Sink):
    takes_uncommitted = True

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def open(self, run: SinkRun) -> None:
        pass

    def write(self, rows: SinkRows) -> None:
        for step, values in zip(rows.steps.tolist(), rows.values.tolist(), strict=True):
            self.rows.append((step, dict(zip(rows.names, values, strict=True))))

    def close(self) -> None:
        pass

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, values[name]) for step, values in self.rows if name in values]


def opened() -> tuple[MetricLog, Collected]:
    sink = Collected()
    run = SinkRun(run="r", job="r", generation=1, resumed_step=0)
    return MetricLog(run=run, outbox=None, sinks=[sink], step=lambda: 0), sink


def keep_busy() -> None:
    torch.cuda._sleep(int(BUSY_S * 1.98e9))


def test_every_value_is_as_it_was_when_it_was_logged_and_nobody_waits() -> None:
    metric_log, sink = opened()
    total = torch.zeros((), device="cuda")
    for change in (1, -1):
        total += change  # Loading a kernel waits for the device.
    others = [torch.full((), float(n), device="cuda", requires_grad=True) for n in range(49)]
    names = [f"other-{n}" for n in range(49)]
    metric_log.log({"total": total, **dict(zip(names, others, strict=True))}, 0)
    torch.cuda.synchronize()
    keep_busy()
    began_s = time.monotonic()
    for step in range(1, 101):
        total += 1
        values = {"total": total, **dict(zip(names, others, strict=True))}
        if step % 2:
            metric_log.log(values, step)
        else:
            with torch.inference_mode():
                metric_log.log(values, step)
    assert time.monotonic() - began_s < BUSY_S / 2, "the loop waited for the device"
    total.zero_()
    metric_log.close(failed=False)
    assert sink.of("total") == [(step, float(step)) for step in range(101)]
    assert sink.of("other-48") == [(step, 48.0) for step in range(101)]


def test_kinds_and_shapes_may_change_under_the_same_names() -> None:
    metric_log, sink = opened()
    device = torch.device("cuda")
    rows = [
        (torch.tensor(1.5, device=device), torch.tensor(2, device=device)),
        (torch.tensor(1.5, device=device), torch.tensor(2**53 - 1, device=device)),
        (torch.tensor([0.25], device=device, dtype=torch.bfloat16), torch.tensor(True, device=device)),
        (torch.tensor(7.0), torch.tensor(8.0, device=device)),
        (torch.tensor(7.0), torch.tensor(9.0)),
        (3.0, torch.tensor(-math.inf, device=device)),
    ]
    for step, (one, other) in enumerate(rows):
        metric_log.log({"one": one, "other": other}, step)
    with pytest.raises(InvalidArgument, match="other"):
        metric_log.log({"one": rows[0][0], "other": torch.zeros(2, device=device)}, 9)
    with pytest.raises(InvalidArgument, match="complex"):
        metric_log.log({"complex": torch.tensor(1j, device=device)}, 9)
    metric_log.close(failed=False)
    assert [value for _, value in sink.of("one")] == [1.5, 1.5, 0.25, 7.0, 7.0, 3.0]
    assert [value for _, value in sink.of("other")] == [2.0, 2.0**53 - 1, 1.0, 8.0, 9.0, -math.inf]


def test_streams_and_threads_do_not_mix_their_values() -> None:
    metric_log, sink = opened()

    def work(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            value = torch.zeros((), device="cuda")
            for step in range(1, 301):
                value += 1
                metric_log.log({name: value, f"{name}-again": value}, step)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    metric_log.close(failed=False)
    for n in range(4):
        assert sink.of(f"t{n}") == sink.of(f"t{n}-again") == [(step, float(step)) for step in range(1, 301)]
