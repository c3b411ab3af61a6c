"""A job called `pretraining` that reads a mixture, at the coordinator, for as long as the page takes."""

import atexit
import os
import subprocess
import sys
from pathlib import Path

Path("pretraining.py").write_text(
    """
import time

import torch

import strata

mix = strata.Mixture({"web": [0.0] * 90, "code": [1.0] * 90}, weights={"web": 0.7, "code": 0.3}, seed=7)
loader = strata.ElasticLoader(mix, strata.ElasticSampler(mix, global_batch_size=8, dataset="mix"))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with strata.elastic(
    model=model, optimizer=optimizer, data=loader, checkpoints="runs/pretraining", max_steps=100_000
) as job:
    for batch in job:
        model(batch.data.float()[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
"""
)
training = subprocess.Popen(
    [sys.executable, "pretraining.py"],
    env={**os.environ, "STRATA_JOB_ID": "pretraining", "COORDINATOR_ADDR": os.environ["TEST_COORDINATOR"]},
)


@atexit.register
def end() -> None:
    training.terminate()
    training.wait(60)
