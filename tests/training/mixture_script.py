"""One rank of a job that reads a mixture, whose weights rank 0 asks to change while it trains: run by `tests.support_ranks`.

    python -m tests.training.mixture_script FOLDER COORDINATOR API LIFE LAST_STEP

It writes down what it trains, and ends without a word ("crash") at the step that the life says.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path

import torch
from torch import distributed

import strata
from strata.training.job import ElasticJob, ElasticOptions
from tests.support_ranks import join, say

BATCH, CHANGED, ASKED = 24, 30, 4
"""The step from which the weights are to change, and the one in which rank 0 asks for it."""
STEP_S = 0.05
LIMIT_S = 120.0
SIZES = {"web": 1_000, "code": 150, "chat": 37}


class Numbers:
    """Sample `n` of source `which`, as one number."""

    def __init__(self, which: int, size: int) -> None:
        self._first, self._size = which * 10_000, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.tensor([float(self._first + sample)])


def mixture() -> strata.Mixture:
    return strata.Mixture(
        {name: Numbers(which, size) for which, (name, size) in enumerate(SIZES.items())},
        weights={"web": 0.7, "code": 0.2, "chat": 0.1},
        schedule=[(10, {"chat": 0.2})],
        seed=5,
    )


def ask(api: str, job: ElasticJob) -> None:
    """Ask for other weights, and wait until the job has heard of it: it decides when its ranks meet next."""
    body = json.dumps({"weights": {"code": 0.5}, "from_step": CHANGED}).encode()
    request = urllib.request.Request(
        f"{api}/api/jobs/mixed/mixture", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        assert json.load(answer)["status"] == "waiting"
    watch, until_s = job._mixture, time.monotonic() + LIMIT_S
    assert watch is not None
    while not watch.has_news:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def main() -> None:
    folder, coordinator, api, life, last_step = (*sys.argv[1:5], int(sys.argv[5]))
    rank, _ = join(Path(folder))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    mix = mixture()
    loader = strata.ElasticLoader(mix, strata.ElasticSampler(mix, global_batch_size=BATCH, dataset="mix"))
    trained: list[tuple[int, list[float]]] = []
    job = strata.elastic(
        model=model,
        optimizer=optimizer,
        data=loader,
        checkpoints=f"{folder}/checkpoints",
        max_steps=last_step,
        job="mixed",
        coordinator=coordinator,
        options=ElasticOptions(save_every=1_000, snapshot_every=0),
    )
    with job:
        plan = loader.sampler.mixture
        assert plan is not None
        started_with = [change.number for change in plan.plan.changes]
        for batch in job:
            changed = bool(plan.plan.changes)
            if (life == "crash at adoption" and changed) or (
                life == "crash after the change" and job.step == CHANGED + 2
            ):
                sys.stdout.flush()
                os._exit(9)
            if life == "crash at adoption" and job.step == ASKED and rank == 0:
                ask(api, job)
            distributed.barrier()
            time.sleep(STEP_S if job.step < CHANGED else 0.0)
            values = batch.data.flatten().tolist() if len(batch.step) else []
            trained.append((job.step, values))
            (model(batch.data).mean() * batch.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    say(Path(folder), {"trained": trained, "started_with": started_with})


if __name__ == "__main__":
    main()
