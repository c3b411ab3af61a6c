"""A loop of Accelerate that outlives its machines. The statements marked with `# +` are what Strata adds.

    strata torchrun --nproc-per-node=2 examples/accelerate_loop.py        # or: strata run --workers 2 …, or: python …

Kill a worker while it runs, or all of them and start with another number: training continues at the exact next sample.
"""

import argparse
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import TensorDataset

import strata  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoints", default="runs/accelerate")
arguments = parser.parse_args()

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(10_000, 32)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

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
        x, y = send_to_device(batch.data, accelerator.device)  # +
        with nullcontext() if batch.step.ends_step else accelerator.no_sync(model):  # +
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss * batch.weight)  # +
        if batch.step.ends_step:  # +
            optimizer.step()
            optimizer.zero_grad()
            job.log({"loss": loss})  # + kept by the coordinator, where there is one, and by sinks
if accelerator.is_main_process:
    print(strata.audit(arguments.checkpoints, "data", epoch=0).reason)  # +
accelerator.end_training()
