"""An ordinary DDP loop that outlives its machines. The lines marked with `# +` are what Strata adds.

    torchrun --nproc-per-node=2 --max-restarts=100 examples/ddp_loop.py

Kill a worker while it runs: training goes on at the exact next step.
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import strata  # +

distributed.init_process_group("gloo")
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
    checkpoints="runs/sums",
    epochs=5,  # +
) as job:  # +
    for batch in job:  # +
        x, y = batch.data
        loss = nn.functional.mse_loss(model(x), y)
        (loss * batch.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        job.report(loss=loss.item())  # +

if distributed.get_rank() == 0:
    print(strata.audit("runs/sums", "sums", epoch=0).reason)  # +
distributed.destroy_process_group()
