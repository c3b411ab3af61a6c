"""The peer: a plain DDP loop with `torch.save`, as people write it; and the same loop timed with and without a job.

torchrun --nproc-per-node=2 -m strata.bench.plain_loop CHECKPOINT NAME
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from strata.data.steps import Batch
from strata.training.trace import Footprints

SAVE_EVERY = 10
SNAPSHOT_EVERY = 50
WARM_UP_ROUNDS = 2


def build(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(checkpoint: str, name: str) -> None:
    """Runs until it is killed. Leaves footprints, so that its steps can be watched like ours."""
    distributed.init_process_group("gloo")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build(96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    moments = Footprints(name, rank)
    while True:
        x = torch.randn(64, 96)
        nn.functional.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        moments.leave(step, world_size)
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What an `ElasticJob` adds to a step of the same loop, over pairs of rounds made one right after the other."""

    plain_step_s: float
    ratios: Sequence[float]
    """Of each pair: the elastic round's time over the plain one's."""

    @property
    def percent(self) -> float:
        return 100 * (statistics.median(self.ratios) - 1)

    def interval(self, *, draws: int = 2_000) -> tuple[float, float]:
        """In percent: where the median would lie in 95 of 100 repetitions, by drawing the pairs anew."""
        rng = random.Random(0)
        medians = sorted(
            statistics.median(rng.choices(self.ratios, k=len(self.ratios))) for _ in range(draws)
        )
        low, high = medians[draws // 40], medians[-draws // 40]
        return 100 * (low - 1), 100 * (high - 1)


def compare_overhead(pairs: int, *, width: int = 512, batch: int = 256) -> Overhead:
    """The plain loop beside the same model in an `ElasticJob` that makes one snapshot in the middle of each round, so
    that what it does in the background falls into the same round. Which one goes first alternates: a machine that
    becomes slower or faster favours neither."""
    from strata.data.loader import ElasticLoader
    from strata.data.sampler import ElasticSampler
    from strata.training.job import ElasticJob, ElasticOptions

    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(20_000, width))
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loader() -> ElasticLoader:
        return ElasticLoader(dataset, ElasticSampler(len(dataset), global_batch_size=batch, dataset="bench"))

    def plain_batches() -> Iterator[Batch]:
        while True:
            yield from loader()

    def step(x: torch.Tensor) -> None:
        nn.functional.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def seconds_per_step(batches: Iterator[Batch]) -> float:
        began_s = time.perf_counter()
        for _ in range(SNAPSHOT_EVERY):
            step(next(batches).data[0])
        return (time.perf_counter() - began_s) / SNAPSHOT_EVERY

    plain: list[float] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="strata-bench-") as folder:
        job = ElasticJob(
            model=model,
            optimizer=optimizer,
            data=loader(),
            checkpoints=[folder],
            max_steps=(pairs + WARM_UP_ROUNDS + 1) * SNAPSHOT_EVERY,
            options=ElasticOptions(save_every=1_000_000, snapshot_every=SNAPSHOT_EVERY),
            job=f"overhead-{os.getpid()}",
        )
        with job:
            ours, others = iter(job), plain_batches()
            for _ in range(SNAPSHOT_EVERY // 2):
                step(next(ours).data[0])
            for number in range(pairs + WARM_UP_ROUNDS):
                order = (others, ours) if number % 2 else (ours, others)
                took_s = {id(batches): seconds_per_step(batches) for batches in order}
                if number >= WARM_UP_ROUNDS:
                    plain.append(took_s[id(others)])
                    ratios.append(took_s[id(ours)] / took_s[id(others)])
    return Overhead(plain_step_s=statistics.median(plain), ratios=ratios)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
