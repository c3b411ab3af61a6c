"""Evaluation inside training: every sample once on all ranks together, and nothing of training disturbed.

    loss = job.evaluate(valid_loader, lambda batch: {"loss": criterion(model(batch.data))})["loss"]

    for batch in job.evaluate(valid_loader):      # or batch by batch, this rank's part
        ...

Each call reads the evaluation data from its beginning, in order as its loader has it, divided among the ranks of now, without
padding or repeats. It has no position in a checkpoint: after a crash training continues from its last step, and evaluates when it
comes to it again. The generators of torch, NumPy, Python and CUDA are put back to what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from strata.data.loading.loader import ElasticLoader
from strata.data.loading.steps import Batch
from strata.training import rng
from strata.training.exchange import gather

Values = Mapping[str, float | torch.Tensor]
Measure = Callable[[Batch], Values]
"""Means over the samples of one batch, by name."""


def batches(
    loader: ElasticLoader, *, rank: int, world_size: int, even: bool, alive: Callable[[], None]
) -> Generator[Batch]:
    """This rank's batches of an epoch of evaluation data."""
    loader.set_world(rank, world_size)
    loader.sampler.move(0, 0)
    loader.commit_explicitly()
    with _same_generators():
        for batch in loader:
            alive()
            if even or len(batch.step):
                yield batch
        loader.sampler.move(0, 0)


def reduced(found: Iterator[Batch], model: torch.nn.Module, measure: Measure) -> dict[str, float]:
    """The mean of what `measure` gives over all samples of all ranks: the same on every rank. Collective."""
    sums: dict[str, float | torch.Tensor] = {}
    count = 0
    with _in_evaluation(model), torch.no_grad():
        for batch in found:
            values = measure(batch)
            if not isinstance(values, Mapping):
                raise TypeError(
                    f"measure must return a mapping of names to means over the batch, not {type(values).__name__}"
                )
            samples = len(batch.step)
            if not samples:
                continue  # This rank took part for the sake of the others.
            count += samples
            for name, value in values.items():
                # On a device it is added up there: nothing waits for it before the end.
                value = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
                sums[name] = sums.get(name, 0.0) + value * samples
    everyone = gather(({name: float(value) for name, value in sums.items()}, count))
    total = sum(each for _, each in everyone)
    if not total:
        raise ValueError("the evaluation data has no samples")
    names = {name: None for values, _ in everyone for name in values}
    return {name: sum(values.get(name, 0.0) for values, _ in everyone) / total for name in names}


@contextmanager
def _same_generators() -> Iterator[None]:
    """Generators stand afterwards where they stood before."""
    before = rng.capture()
    try:
        yield
    finally:
        rng.restore({"0": before}, 0)


@contextmanager
def _in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Each module is put back to the mode it was in."""
    modes: list[tuple[Any, bool]] = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
