"""A model sharded over its workers (FSDP2, and tensor parallel with --tp) that outlives its machines.

    strata run --workers 2 examples/fsdp2.py               # on CPU cores, or on GPUs where there are enough
    strata torchrun --nproc-per-node=4 examples/fsdp2.py --tp 2

The statements marked with `# +` are what Strata adds. Kill a worker while it runs (each prints its process id), or start it again
with another number of workers: training continues at the exact next step.
"""

import argparse
import os
import time

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import strata  # +

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1, help="workers that share each matrix and read the same data")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoints", default="runs/sharded")
parser.add_argument("--step-time", type=float, default=0.04, help="seconds a step takes at least")
arguments = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def build(mesh: DeviceMesh, width: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(4)))
    for block in model:
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
mesh = init_device_mesh(device.type, (world // arguments.tp, arguments.tp), mesh_dim_names=("dp", "tp"))
model = build(mesh, arguments.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

inputs = torch.randn(10_000, arguments.width, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, inputs.roll(1, dims=1))
sampler = strata.ElasticSampler(len(dataset), global_batch_size=64, dataset="rolls")  # +
loader = strata.ElasticLoader(dataset, sampler)  # +

with strata.elastic(  # +
    model=model,
    optimizer=optimizer,
    data=loader,
    mesh=mesh["dp"],  # Along it data differs.
    checkpoints=arguments.checkpoints,
    epochs=arguments.epochs,
) as job:
    print(f"rank {rank} is process {os.getpid()}: kill it with `kill -9 {os.getpid()}`", flush=True)
    for batch in job:  # +
        began_s = time.monotonic()
        x, y = (each.to(device) for each in batch.data)  # +
        loss = nn.functional.mse_loss(model(x), y)
        (loss * batch.weight).backward()  # +
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        job.report(loss=loss.item())  # +
        if rank == 0 and job.step % 50 == 0:
            print(f"step {job.step:4}  epoch {batch.step.epoch}  loss {loss.item():.4f}", flush=True)
        time.sleep(max(0.0, arguments.step_time - (time.monotonic() - began_s)))

if rank == 0:
    print(strata.audit(arguments.checkpoints, "rolls", epoch=0).reason)  # +
distributed.destroy_process_group()
