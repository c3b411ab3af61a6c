"""A training with a large state, for `strata bench recovery --gpu`: as a user writes it, with us and without.

    large_job.py elastic NAME FOLDER STATE_BYTES DEVICE SNAPSHOT_EVERY      strata.elastic, snapshots in shared memory
    large_job.py plain NAME FOLDER STATE_BYTES DEVICE                       torch.save, as often as the disk allows

A stack of linear layers in bfloat16 with AdamW: weights and two moments together have STATE_BYTES. Runs until it is killed.
Each leaves footprints, so that its steps can be watched; `elastic` also notes each recovery in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 4096
STEPS = 1_000_000


def build(
    state_bytes: int, device: str, *, batch: int = 256
) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    parameters = state_bytes // 3 // 2  # Weights and two moments, two bytes each.
    width = max(64, min(WIDTH, int((parameters / 8) ** 0.5) // 64 * 64))
    layers: list[nn.Module] = []
    for _ in range(max(1, round(parameters / width**2))):
        layers += [nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16), nn.GELU()]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return model, optimizer, torch.randn(batch, width, device=device, dtype=torch.bfloat16)


def elastic(name: str, folder: Path, state_bytes: int, device: str, snapshot_every: int) -> None:
    import strata
    from strata.training.job import ElasticOptions

    model, optimizer, inputs = build(state_bytes, device)
    sampler = strata.ElasticSampler(8 * STEPS, global_batch_size=8, dataset="bench")
    loader = strata.ElasticLoader(torch.utils.data.TensorDataset(torch.zeros(8 * STEPS, 0)), sampler)
    options = ElasticOptions(save_every=STEPS, snapshot_every=snapshot_every)
    entered_s = time.perf_counter()
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=[],
        max_steps=STEPS,
        options=options,
        job=name,
    ) as job:
        restored_s = time.perf_counter() - entered_s
        is_first = True
        for _ in job:
            if not is_first and job.recovery is not None:
                _note(folder, job.recovery, restored_s)
                job.recovery = None
            is_first = False
            _step(model, optimizer, inputs)


def _note(folder: Path, recovery: Any, restored_s: float) -> None:
    reported = {
        "phases": recovery.phases,
        "tier": recovery.tier,
        "lost_steps": recovery.lost_steps,
        "restored_s": restored_s,
    }
    with (folder / "recoveries.jsonl").open("a") as file:
        file.write(json.dumps(reported) + "\n")


def plain(name: str, folder: Path, state_bytes: int, device: str) -> None:
    from strata.agent.trace import Footprints

    model, optimizer, inputs = build(state_bytes, device)
    checkpoint, step, saved_s = folder / "plain.pt", 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    footprints = Footprints(name, rank=0)
    while True:
        _step(model, optimizer, inputs)
        step += 1
        footprints.leave(step, 1)
        # As often as the disk allows: training is paused for half of the time.
        if time.monotonic() > saved_s:
            began_s = time.monotonic()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "plain.new")
            os.replace(folder / "plain.new", checkpoint)
            saved_s = time.monotonic() + (time.monotonic() - began_s)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    model(inputs).float().square().mean().backward()
    optimizer.step()
    if inputs.is_cuda:
        torch.cuda.synchronize()  # A step counts when it is made, not when it is queued.


if __name__ == "__main__":
    way, its_name, its_folder, its_bytes, its_device, *more = sys.argv[1:]
    if way == "elastic":
        elastic(its_name, Path(its_folder), int(its_bytes), its_device, int(more[0]))
    else:
        plain(its_name, Path(its_folder), int(its_bytes), its_device)
