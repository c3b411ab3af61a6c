"""A model that is trained on next to nothing, and text for the harness."""

import json
import os
from pathlib import Path
from typing import Any

import torch

import strata
from strata.training import ElasticOptions  # noqa: F401

dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = strata.ElasticLoader(dataset, strata.ElasticSampler(len(dataset), global_batch_size=16))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)


def train_step(batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch.data[0]).square().mean()
    (loss * batch.weight).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


Path("data").mkdir()
text = Path(os.environ["TEST_ROOT"], "README.md").read_text()
lines = [json.dumps({"text": line}) for line in text.splitlines() if line] * 20
Path("data/train.jsonl").write_text("\n".join(lines) + "\n")
