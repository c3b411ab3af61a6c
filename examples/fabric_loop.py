"""A loop of Lightning Fabric that outlives its machines. The statements marked with `# +` are what Strata adds.

    strata torchrun --nproc-per-node=2 examples/fabric_loop.py        # or: strata run --workers 2 …, or: python …

Kill a worker while it runs, or all of them and start with another number: training continues at the exact next sample.
"""

import argparse
import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import TensorDataset

import strata  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoints", default="runs/fabric")
arguments = parser.parse_args()

is_distributed = "LOCAL_WORLD_SIZE" in os.environ
fabric = Fabric(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy="ddp" if is_distributed else "auto",
)
fabric.launch()
torch.manual_seed(0)
inputs = torch.randn(10_000, 32)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

sampler = strata.ElasticSampler(len(dataset), global_batch_size=64, micro_batch_size=16)  # +
loader = strata.ElasticLoader(dataset, sampler, num_workers=2)  # +
with strata.elastic(  # +
    model=model,
    optimizer=optimizer,
    data=loader,
    checkpoints=arguments.checkpoints,  # + resumed from, saved to in the background, and at SIGTERM
    epochs=arguments.epochs,
) as job:
    for batch in job:  # +
        x, y = fabric.to_device(batch.data)  # +
        with fabric.no_backward_sync(model, enabled=is_distributed and not batch.step.ends_step):  # +
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss * batch.weight)  # +
        if batch.step.ends_step:  # +
            optimizer.step()
            optimizer.zero_grad()
            job.log({"loss": loss})  # + kept by the coordinator, where there is one, and by sinks
if fabric.is_global_zero:
    print(strata.audit(arguments.checkpoints, "data", epoch=0).reason)  # +
