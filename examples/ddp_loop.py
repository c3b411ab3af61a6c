"""An ordinary DDP loop that outlives its machines. The statements marked with `# +` are what Strata adds.

    strata run --workers 2 examples/ddp_loop.py            # about a minute on two CPU cores; --epochs 1 for less
    strata torchrun --nproc-per-node=2 examples/ddp_loop.py

Kill a worker while it runs (each prints its process id): training continues at the exact next step.
"""

import argparse
import os
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import strata  # +

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoints", default="runs/sums")
parser.add_argument(
    "--step-time", type=float, default=0.04, help="seconds a step takes at least, as with a larger model"
)
arguments = parser.parse_args()

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
inputs = torch.randn(10_000, 32)
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

sampler = strata.ElasticSampler(len(dataset), global_batch_size=64, dataset="sums")  # +
loader = strata.ElasticLoader(dataset, sampler)  # +

with strata.elastic(  # +
    model=model,
    optimizer=optimizer,
    data=loader,
    checkpoints=arguments.checkpoints,
    epochs=arguments.epochs,
) as job:
    print(f"rank {rank} is process {os.getpid()}: kill it with `kill -9 {os.getpid()}`", flush=True)
    for batch in job:  # +
        began_s = time.monotonic()
        x, y = batch.data  # +
        loss = nn.functional.mse_loss(model(x), y)
        (loss * batch.weight).backward()  # +
        optimizer.step()
        optimizer.zero_grad()
        job.report(loss=loss.item())  # +
        if rank == 0 and job.step % 50 == 0:
            print(f"step {job.step:4}  epoch {batch.step.epoch}  loss {loss.item():.4f}", flush=True)
        time.sleep(max(0.0, arguments.step_time - (time.monotonic() - began_s)))

if rank == 0:
    print(strata.audit(arguments.checkpoints, "sums", epoch=0).reason)  # +
distributed.destroy_process_group()
