"""Trains on what a URL holds: `python -m tests.training.stream_script URL CHECKPOINTS BLOCK_BYTES [HOLD]`. Prints the samples of each
step before it makes it, and an error as `error: …`. It makes no step while there is a file HOLD."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

import strata
from strata.data import ElasticDataset, ElasticLoader, ElasticSampler
from strata.data.streaming import sources
from strata.errors import StrataError
from strata.training import ElasticOptions

BATCH = 50


def main() -> None:
    url, checkpoints, block_bytes, *hold = sys.argv[1:]
    sources.BLOCK_BYTES = int(block_bytes)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    dataset = ElasticDataset(url, transform=number)
    loader = ElasticLoader(dataset, ElasticSampler(len(dataset), global_batch_size=BATCH, seed=2))
    options = ElasticOptions(save_every=3, snapshot_every=1)
    with strata.elastic(
        model=model, optimizer=optimizer, data=loader, checkpoints=checkpoints, epochs=1, options=options
    ) as job:
        for batch in job:
            print(job.step, *batch.data.long().flatten().tolist(), flush=True)
            while hold and os.path.exists(hold[0]):
                time.sleep(0.01)
            model(batch.data / 1000).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def number(row: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(row["id"])])


if __name__ == "__main__":
    try:
        main()
    except StrataError as error:
        print(f"error: {type(error).__name__}: {error.message}", flush=True)
        sys.exit(1)
