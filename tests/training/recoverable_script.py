"""A rank of a recoverable job: `recoverable_script.py FOLDER KIND MAX_STEPS`.

The gradients of kind `ddp` are sums of whole numbers, so the parameters are the same bit for bit whoever computed them: what they
are at the end says which samples were trained, and how often. `fsdp` is an FSDP2 model with Adam and dropout.

What it does is written to FOLDER/log, a line each; FOLDER/faults-SLOT may hold Python that is run after every step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import strata
from strata.training import ElasticOptions
from strata.training.recoverable import Run

SAMPLES, BATCH = 4096, 32
FOLDER, KIND, MAX_STEPS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
STEP_S = float(os.environ.get("STEP_S", "0.01"))


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number % 13), float(number % 7), 1.0, float(number)], dtype=torch.float64)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(dim=1)


def build(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    if KIND == "ddp":
        model: nn.Module = DistributedDataParallel(Weighted())
        return model, torch.optim.SGD(model.parameters(), lr=1.0)
    layers = [nn.Linear(4, 16, dtype=torch.float64), nn.Dropout(0.2), nn.Linear(16, 1, dtype=torch.float64)]
    model = nn.Sequential(*layers)
    fully_shard(model)
    torch.manual_seed(100 + run.rank)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def note(**what: Any) -> None:
    """One write, so that lines of several processes do not mix."""
    with open(FOLDER / "log", "a") as file:
        who = {
            "pid": os.getpid(),
            "slot": int(os.environ.get("STRATA_SLOT", "0")),
            "machine": os.environ.get("MACHINE"),
        }
        file.write(repr({**who, **what}) + "\n")


def faults(step: int) -> None:
    path = FOLDER / f"faults-{os.environ.get('STRATA_SLOT', '0')}"
    if path.exists():
        exec(path.read_text(), {"step": step, "folder": FOLDER, "path": path})  # noqa: S102


@strata.recoverable(timeout_s=float(os.environ.get("TIMEOUT_S", "60")))
def train(run: Run) -> None:
    note(
        entered=run.generation, rank=run.rank, world=run.world_size, restarts=run.restarts, reason=run.reason
    )
    data = run.keep("data", Numbers)
    sampler = strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers", seed=5)
    loader = strata.ElasticLoader(data, sampler)
    model, optimizer = build(run)
    options = ElasticOptions(snapshot_every=20, save_every=100)
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=str(FOLDER / "checkpoints"),
        max_steps=MAX_STEPS,
        options=options,
    ) as job:
        note(resumed=job.step, lost=job.recovery.lost_steps if job.recovery is not None else 0)
        for batch in job:
            loss = model(batch.data).sum() / max(len(batch.data), 1)
            (loss * batch.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_S)
            faults(job.step)
    weights = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    if distributed.get_rank() == 0:
        torch.save(weights, FOLDER / "final.pt")
    note(finished=job.step)


if __name__ == "__main__":
    train()
