"""How hard the devices work: the norm of the gradients, and the share of a device's peak that training uses (MFU).

    MFU = floating-point operations per token × tokens per second / (ranks × peak of a device)

The peak is that of dense matrix products in bfloat16 (float16 where there is none), as its maker is quoted, by the device's name; of
others it is for the user to say.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from strata.torch_compat.dtensors import is_distributed_tensor

PEAK_FLOPS: dict[str, float] = {
    # As public tables repeat NVIDIA's figures; the data sheets themselves were not read. Those since Ampere print some with sparsity:
    # half of that is dense. Left out is what sources differ on or what only one has: A10, A10G, L4, L40S (by whether sums are kept
    # in float16 or float32, twice as much), MI300X, MI325X.
    "B200": 2_250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "V100 PCIE": 112e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""By a part of the device's name; the first that is in it counts."""


def peak_flops(device_name: str) -> float | None:
    """Of a device, or None where it is not known."""
    words = device_name.replace("-", " ")
    return next((peak for name, peak in PEAK_FLOPS.items() if f" {name} " in f" {words} "), None)


def own_peak_flops() -> float | None:
    """Of the device that this rank trains on."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def model_flops_utilization(
    *, flops_per_token: float, tokens_per_second: float, ranks: int, peak: float
) -> float:
    return flops_per_token * tokens_per_second / (ranks * peak)


def gradient_norm(optimizer: torch.optim.Optimizer, *, wanted: bool) -> torch.Tensor | None:
    """The 2-norm over all gradients, on their device and without waiting for it. None where there are none, or where it is not
    `wanted`: of sharded gradients all ranks take part in it all the same."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_sharded = any(map(is_distributed_tensor, gradients))
    if not gradients or not (wanted or is_sharded):
        return None
    with torch.no_grad():
        norm = torch.nn.utils.get_total_norm(gradients)
        return cast(torch.Tensor, cast(Any, norm).full_tensor()) if is_distributed_tensor(norm) else norm
