"""A small elastic training that goes slowly as long as a file is there, so that tests need not race with it."""

import argparse
import os
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import strata
from strata.torch_compat import lazy_dynamo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--slow", help="the file")
parser.add_argument("--say", default="", help="an environment variable that it prints meanwhile")
options = parser.parse_args()

distributed.init_process_group("gloo")
lazy_dynamo.install()
torch.manual_seed(0)
inputs = torch.randn(1_000, 8)
model = DistributedDataParallel(nn.Linear(8, 1))
loader = strata.ElasticLoader(
    TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), strata.ElasticSampler(1_000, global_batch_size=8)
)
task = strata.current_task()
print(f"rank {distributed.get_rank()} of task {task.task_id}")
with strata.elastic(
    model=model,
    optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.01)),
    data=loader,
    checkpoints=str(task.checkpoints),
    max_steps=options.steps,
) as job:
    for batch in job:
        x, y = batch.data
        (nn.functional.mse_loss(model(x), y) * batch.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        if os.path.exists(options.slow):
            time.sleep(0.2)
            print(f"slowly at {job.step} {os.environ.get(options.say, '')}".rstrip())
print(f"all {job.step} steps are made")
distributed.destroy_process_group()
