"""One rank of a job that is to be killed: `python -m tests.training.finish_script KIND FOLDER MAX_STEPS STAND_AT DESTINATION...`.

KIND is `ddp` or `fsdp`. Every eighth step is saved durably, every second in memory. After step STAND_AT a rank leaves `standing-RANK` in the
folder, with its process number, and stands still; with 0 it trains to the end. With STAND_FIRST in the environment, the first process of a rank
stands still after that step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import TensorDataset

import strata
from strata.training import ElasticOptions
from tests.training.shard_script import BATCH, SAMPLES, build

SAVE_EVERY, SNAPSHOT_EVERY = 8, 2


def main(kind: str, folder: Path, max_steps: int, stand_at: int, destinations: list[str]) -> None:
    distributed.init_process_group("gloo")
    model, mesh = build(kind, distributed.get_world_size())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    loader = strata.ElasticLoader(
        TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)),
        strata.ElasticSampler(SAMPLES, global_batch_size=BATCH, dataset="numbers"),
    )
    with strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        mesh=mesh,
        checkpoints=destinations,
        max_steps=max_steps,
        options=ElasticOptions(save_every=SAVE_EVERY, snapshot_every=SNAPSHOT_EVERY),
    ) as job:
        if job.restored and job.rank == 0:
            (folder / "resumed").write_text(f"{job.step} {job.recovery.tier if job.recovery else ''}")
        first = int(os.environ.get("STAND_FIRST", "0"))
        is_first = bool(first) and not job.restored
        for batch in job:
            if job._manager is not None:  # Nothing is skipped, so what was saved is known.
                assert job._manager.wait_idle(60)
            x, y = batch.data
            loss = torch.nn.functional.mse_loss(model(x), y) * batch.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.step + 1 == (first if is_first else stand_at):
                fresh = folder / f".standing-{job.rank}"
                fresh.write_text(str(os.getpid()))
                fresh.rename(folder / f"standing-{job.rank}")
                signal.pause()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
