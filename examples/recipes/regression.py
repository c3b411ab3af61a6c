"""The script of the recipe `regression`: an ordinary elastic loop that takes its settings as arguments.

Alone, without a coordinator: torchrun --nproc-per-node=2 --max-restarts=100 regression.py --steps 300
"""

import argparse

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import strata

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--checkpoints", default="runs/regression")
options = parser.parse_args()

distributed.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(10_000, 8)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
loader = strata.ElasticLoader(dataset, strata.ElasticSampler(len(dataset), global_batch_size=64))

with strata.elastic(
    model=model, optimizer=optimizer, data=loader, checkpoints=options.checkpoints, max_steps=options.steps
) as job:
    for batch in job:
        x, y = batch.data
        loss = nn.functional.mse_loss(model(x), y)
        (loss * batch.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.report(loss=loss.item())
        if job.step % 50 == 0:
            print(f"step {job.step}: loss {loss.item():.6f}")

distributed.destroy_process_group()
