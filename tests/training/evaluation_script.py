"""One rank that trains and evaluates: `python -m tests.training.evaluation_script FOLDER`. Says what it has evaluated on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support_ranks import join, say
from tests.training.loops import Loop

SAMPLES = 29
"""Of the evaluation data: no world divides it."""


def numbers() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), batch_size=4)


def main() -> None:
    folder = Path(sys.argv[1])
    join(folder)
    loop = Loop(folder / "checkpoints", epochs=1)
    valid = numbers()
    seen: list[list[float]] = []
    means: list[float] = []
    with loop.job as job:
        for batch in job:
            loop.train(batch)
            if job.step % 3 == 0:
                seen.append([x for each in job.evaluate(valid) for x in each.data[0].tolist()])
                means.append(job.evaluate(valid, lambda each: {"x": each.data[0].mean()})["x"])
    say(folder, {"seen": seen, "means": means, "weights": loop.weights.tolist()})


if __name__ == "__main__":
    main()
