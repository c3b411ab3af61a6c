"""One rank of a small job in a recoverable run, that a test ends where it likes: `python -m tests.training.live_script FOLDER`.

It draws from every generator and keeps running statistics. `PLAN` says who is killed when, as JSON: `{"rank": 1, "step": 5,
"where": "forward"}`; others then leave their loop with the error of a broken collective. Each rank says what became of it in the
file `rank<n>.json` of the folder, or in `left<n>.json` where it was left by others.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import NoReturn

import numpy
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from strata.data.loading.steps import Batch
from strata.training import live
from tests.support_ranks import join
from tests.training.loops import Loop

SAMPLES = 96


class Run:
    """One surviving rank of this machine saves: the first."""

    def __init__(self, survivor: bool) -> None:
        self.survivor = survivor
        self.saved: list[int] = []
        self.presence: live.Presence | None = None

    @property
    def reentry(self) -> None:
        return None

    def check(self) -> None: ...

    def stepped(self, step: int) -> None: ...

    def attach(self, job: object) -> None: ...

    def detach(self, job: object) -> None: ...

    def others_leave(self, reason: str) -> NoReturn:
        raise AssertionError(reason)

    def may_rescue(self, step: int) -> bool:
        return self.survivor

    def rescued(self, step: int) -> None:
        self.saved.append(step)


class Draws(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + 0.1 * random.random() + 0.1 * float(numpy.random.randn()))


def main() -> None:
    folder = Path(sys.argv[1])
    plan = json.loads(os.environ.get("PLAN", "{}"))
    rank, world = join(folder)
    run = Run(survivor=rank == next(r for r in range(world) if r != plan.get("rank")))
    live.set_live_run(run)
    random.seed(rank)
    numpy.random.seed(rank)
    loop = Loop(folder / "checkpoints", samples=SAMPLES, save_every=1000, snapshot_every=4)
    loop.model.extend([nn.BatchNorm1d(1), Draws(), nn.Dropout(0.2)])
    torch.manual_seed(100 + rank)
    model = loop.model
    loop.model = DistributedDataParallel(model)  # type: ignore[assignment]

    def perhaps_die(step: int, where: str) -> None:
        if (rank, step, where) == (plan.get("rank"), plan.get("step"), plan.get("where")):
            os.kill(os.getpid(), signal.SIGKILL)

    def train(batch: Batch, step: int) -> None:
        perhaps_die(step, "forward")
        loop.backward(batch)
        perhaps_die(step, "optimizer")
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        perhaps_die(step, "boundary")

    resumed = -1
    try:
        loop.optimizer.register_step_post_hook(lambda *_: perhaps_die(loop.job.step, "in optimizer"))
        with loop.job as job:
            resumed = job.step
            for batch in job:
                train(batch, job.step)
    except RuntimeError as error:
        left = {
            "saved": run.saved,
            "reason": loop.job.live_reason,
            "step": loop.job.step,
            "error": str(error),
        }
        (folder / f"left{rank}.json").write_text(json.dumps(left))
        os._exit(3)  # The agent would end it.
    found = {
        "resumed": resumed,
        "weights": [p.tolist() for p in model.parameters()],
        "statistics": [b.tolist() for b in model.buffers()],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
