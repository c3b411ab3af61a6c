"""What it costs to compare the ranks' copies of the state (`ElasticOptions(compare_every=100)`), measured in a training loop.

    torchrun --standalone --nproc-per-node=3 -m benchmarks.replicas [--device cuda] [--width 1024] [--layers 8] [--steps 400]

Every rank trains a stack of linear layers with Adam. The share is what the comparison takes of the whole loop: of processor time
on the CPU, where several ranks share the cores and the clock says little; of time on a device, where the comparison's kernels are timed
by events and what the host does beside them by the clock. One GPU may hold several ranks: then `--backend gloo`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from strata.torch_compat.groups import settle_at_exit
from strata.training.replicas import Replicas
from strata.training.state import TrainingState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100)
    asked = parser.parse_args()
    settle_at_exit()
    if "RANK" not in os.environ:
        meeting = f"file://{Path(tempfile.mkdtemp()) / 'meeting'}"
        distributed.init_process_group(asked.backend, init_method=meeting, rank=0, world_size=1)
    else:
        distributed.init_process_group(asked.backend)
    rank = distributed.get_rank()
    device = torch.device("cpu")
    if asked.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    print(json.dumps({"rank": rank, **measure(asked, device)}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def measure(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(1)
    layers = [nn.Linear(asked.width, asked.width) for _ in range(asked.layers)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    replicas = Replicas(TrainingState(model=model, optimizer=optimizer), every=asked.every)
    batch = torch.randn(asked.batch, asked.width, device=device)
    is_cuda = device.type == "cuda"
    for warm in range(1, 4):
        step(model, optimizer, batch)
        replicas.compare(asked.every * warm, is_saving=False)
    compare_cpu_s = compare_s = 0.0
    kernels_ms: list[float] = []
    if is_cuda:
        torch.cuda.synchronize()
    began_cpu_s, began_s = time.process_time(), time.monotonic()
    for number in range(1, asked.steps + 1):
        step(model, optimizer, batch)
        is_timed = is_cuda and number % asked.every == 0
        first: Any = None
        last: Any = None
        if is_timed:
            first, last = events()
            first.record()
        at_cpu_s, at_s = time.process_time(), time.monotonic()
        assert replicas.compare(number, is_saving=False) is None
        compare_cpu_s += time.process_time() - at_cpu_s
        compare_s += time.monotonic() - at_s
        if is_timed:
            last.record()
            last.synchronize()
            kernels_ms.append(first.elapsed_time(last))
    if is_cuda:
        torch.cuda.synchronize()
    total_cpu_s, total_s = time.process_time() - began_cpu_s, time.monotonic() - began_s
    state_bytes = 3 * sum(each.numel() * each.element_size() for each in model.parameters())
    found: dict[str, Any] = {
        "ranks": distributed.get_world_size(),
        "state_mb": round(state_bytes / 1e6, 1),
        "steps": asked.steps,
        "step_ms": round(1e3 * total_s / asked.steps, 3),
        "step_cpu_ms": round(1e3 * total_cpu_s / asked.steps, 3),
        "compare_cpu_percent": round(100 * compare_cpu_s / total_cpu_s, 4),
        "host_percent": round(100 * compare_s / total_s, 4),
    }
    if is_cuda:
        found["kernels_ms"] = round(statistics.median(kernels_ms), 3)
        found["device_percent"] = round(100 * sum(kernels_ms) / 1e3 / total_s, 4)
    return found


def events() -> tuple[Any, Any]:
    cuda: Any = torch.cuda
    return cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
