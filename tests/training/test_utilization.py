"""Gradient norm, tokens per second, MFU and the disk of checkpoints: logged where they are known, and right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from strata.core.telemetry.run_metrics import DISK_FREE
from strata.training.job import ElasticOptions
from strata.training.metrics.metric_log import fullest
from strata.training.metrics.utilization import PEAK_FLOPS, gradient_norm, model_flops_utilization, peak_flops
from tests.training.loops import Loop
from tests.training.test_metrics import Collected


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 NVL", 835e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("NVIDIA A10", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_more_particular_names_come_first() -> None:
    names = list(PEAK_FLOPS)
    for number, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:number])


def test_mfu_by_hand() -> None:
    found = model_flops_utilization(flops_per_token=6e9, tokens_per_second=10_000, ranks=4, peak=60e12)
    assert found == pytest.approx(0.25)


def test_the_norm_is_over_all_gradients_and_none_where_there_are_none() -> None:
    first, second, third = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second, third]}], lr=0.1)
    assert gradient_norm(optimizer, wanted=True) is None
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    norm = gradient_norm(optimizer, wanted=True)
    assert norm is not None
    assert norm.item() == pytest.approx(5.0)
    assert gradient_norm(optimizer, wanted=False) is None


def test_the_fullest_disk_counts_and_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    disk = fullest([tmp_path / "not" / "yet", tmp_path])
    assert disk is not None
    assert 0 < disk.free <= disk.total
    assert fullest([]) is None


@pytest.mark.parametrize(("name", "value"), [("flops_per_token", -1.0), ("peak_flops", math.inf)])
def test_what_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(ElasticOptions(), **cast(Any, {name: value}))


@pytest.mark.parametrize("how", ["report", "log"])
def test_a_job_logs_them_for_each_step(tmp_path: Path, how: str) -> None:
    sink, norms = Collected(takes_uncommitted=True), list[float]()
    loop = Loop(
        tmp_path / "checkpoints",
        job=f"utilization-{how}",
        max_steps=5,
        sinks=[sink],
        log_gradient_norm=True,
        flops_per_token=6e6,
        peak_flops=1e12,
    )
    with loop.job as job:
        for batch in job:
            loop.backward(batch)
            gradients = [p.grad for p in loop.model.parameters() if p.grad is not None]
            norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if how == "report":
                job.report(tokens=1_000.0)
            else:
                job.log({"tokens": 1_000})
    assert [value for _, value in sink.of("grad_norm")] == pytest.approx(norms)
    times, rates = dict(sink.of("step_time_s")), dict(sink.of("tokens_per_second"))
    assert list(rates) == [1, 2, 3, 4, 5]
    for step, rate in rates.items():
        assert rate == pytest.approx(1_000 / times[step])
    for step, mfu in sink.of("mfu"):
        assert mfu == pytest.approx(6e6 * rates[step] / 1e12)
    assert all(free > 0 for _, free in sink.of(f"system/{DISK_FREE}"))
    assert sink.of(f"system/{DISK_FREE}")
