"""The peer: a plain DDP loop with `torch.save`, as people write it; and the same loop timed with and without a job.

torchrun --nproc-per-node=2 -m strata.bench.recovery.plain_loop CHECKPOINT NAME
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from strata.agent.trace import Footprints
from strata.data.loading.steps import Batch

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
    timestamps = Footprints(name, rank=rank)
    while True:
        x = torch.randn(64, 96)
        nn.functional.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        timestamps.leave(step, world_size)
        if step % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one step, on average over a round."""

    step_s: float
    fetch_s: float
    """Of it, until there was the next batch: all that a job does in the loop's own thread."""
    background_s: float
    """Processor time of all other threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What an `ElasticJob` adds to a step of the same loop, by pairs of rounds made one right after the other.

    Whole steps differ by several percent from one second to the next, in either loop; what the job does in between
    does not, so that is timed by itself. Its other threads are counted as if they had no core of their own.
    """

    plain: Sequence[Round]
    elastic: Sequence[Round]

    @property
    def step_s(self) -> float:
        return statistics.median(r.step_s for r in self.plain)

    @property
    def loop_percent(self) -> float:
        return 100 * self._added(lambda r: r.fetch_s) / self.step_s

    @property
    def background_percent(self) -> float:
        return 100 * self._added(lambda r: r.background_s) / self.step_s

    @property
    def wall_percent(self) -> tuple[float, float]:
        """By whole steps, and its standard error."""
        ratios = [ours.step_s / other.step_s for ours, other in zip(self.elastic, self.plain, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        return 100 * (statistics.fmean(ratios) - 1), 100 * error

    def _added(self, part: Callable[[Round], float]) -> float:
        return statistics.fmean(map(part, self.elastic)) - statistics.fmean(map(part, self.plain))


def compare_overhead(pairs: int, *, width: int = 512, batch: int = 256) -> Overhead:
    """The plain loop beside the same model in an `ElasticJob` that makes one snapshot in the middle of each round, so
    that what it does in the background falls into the same round. Which one goes first alternates: a machine that
    becomes slower or faster favours neither. Torch computes in the loop's thread alone, as it does where each core has a
    rank of its own."""
    from strata.data.loading.loader import ElasticLoader
    from strata.data.loading.sampler import ElasticSampler
    from strata.training.job import ElasticJob, ElasticOptions

    torch.set_num_threads(1)
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

    def make_round(batches: Iterator[Batch]) -> Round:
        fetch_s, began_s = 0.0, time.perf_counter()
        others_s = time.process_time() - time.thread_time()
        for _ in range(SNAPSHOT_EVERY):
            asked_s = time.perf_counter()
            batch = next(batches)
            fetch_s += time.perf_counter() - asked_s
            step(batch.data[0])
        return Round(
            step_s=(time.perf_counter() - began_s) / SNAPSHOT_EVERY,
            fetch_s=fetch_s / SNAPSHOT_EVERY,
            background_s=(time.process_time() - time.thread_time() - others_s) / SNAPSHOT_EVERY,
        )

    plain: list[Round] = []
    elastic: list[Round] = []
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
            # Or Python looks through all of torch once in a thousand steps, and charges it to whichever loop runs then.
            gc.collect()
            gc.freeze()
            for number in range(pairs + WARM_UP_ROUNDS):
                if number % 2:
                    other, our = make_round(others), make_round(ours)
                else:
                    our, other = make_round(ours), make_round(others)
                if number >= WARM_UP_ROUNDS:
                    plain.append(other)
                    elastic.append(our)
    gc.unfreeze()
    return Overhead(plain=plain, elastic=elastic)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
