"""A loop that has something to log."""

from typing import Any

import torch

import strata

dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = strata.ElasticLoader(dataset, strata.ElasticSampler(len(dataset), global_batch_size=16))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accuracy = 0.9


def train_step(batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch.data[0]).square().mean()
    (loss * batch.weight).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
