"""Checks of GPUs, and copies of a state on them: what is wrong is found. Skipped where there is no device.

On a machine without the project's test settings:
    PYTHONPATH=src:. python -m pytest -q -c /dev/null --rootdir=. tests/training/test_cuda_health.py
"""

from __future__ import annotations

import time

import pytest
import torch

from strata.diagnostics import health
from strata.training.replicas import _Digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_a_good_machine_is_fit_within_three_seconds() -> None:
    health.examine()  # Opens the device.
    began_s = time.monotonic()
    found = health.examine()
    assert found.failed == {}
    assert found.kind == torch.cuda.get_device_name(0)
    assert found.measured["gpus"] == torch.cuda.device_count()
    assert found.measured["pcie_gb_s"] > 1
    assert found.measured["matmul_tflops"] > 1
    print(found, f"{time.monotonic() - began_s:.2f} s")
    assert time.monotonic() - began_s < health.LIMIT_S


def test_in_a_process_of_its_own_nothing_stays() -> None:
    torch.zeros(1, device="cuda")
    free_before, _ = torch.cuda.mem_get_info(0)
    began_s = time.monotonic()
    found = health.examine_in_subprocess()
    print(found, f"{time.monotonic() - began_s:.2f} s with the start of the process")
    assert found.failed == {}
    assert torch.cuda.mem_get_info(0)[0] > free_before - (64 << 20)


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = health.whole_numbers

    def wrong(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        left, other, product = right(size)
        product[size // 2, 3] += 1
        return left, other, product

    monkeypatch.setattr(health, "whole_numbers", wrong)
    found = health.Findings()
    with pytest.raises(health.Unfit, match=r"GPU 0: a matmul in torch.float32 is wrong in 1 of"):
        health.check_gpus(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_any_flipped_bit_of_a_device_changes_the_digest(dtype: torch.dtype) -> None:
    tensors = [
        torch.arange(4096, device="cuda").to(dtype).view(64, 64),
        torch.ones(3, dtype=dtype, device="cuda"),
    ]
    before = _Digest(1, tensors).of_each()
    assert before == _Digest(1, [tensor.clone() for tensor in tensors]).of_each()
    for byte in range(tensors[0].element_size()):
        for bit in range(8):
            changed = [tensor.clone() for tensor in tensors]
            changed[0].view(-1).view(torch.uint8)[513 * tensors[0].element_size() + byte] ^= 1 << bit
            after = _Digest(1, changed).of_each()
            assert (after[0] != before[0], after[1:]) == (True, before[1:])


def test_a_digest_is_of_the_state_when_it_was_requested() -> None:
    """It is queued behind the step: what is changed after it does not count."""
    tensor = torch.zeros(1 << 22, device="cuda")
    square = torch.randn(4096, 4096, device="cuda")
    expected = _Digest(1, [torch.ones_like(tensor)]).of_each()
    for _ in range(30):
        square = torch.tanh(square @ square)
    tensor.fill_(1.0)
    digest = _Digest(1, [tensor])
    tensor.fill_(2.0)
    assert digest.of_each() == expected
