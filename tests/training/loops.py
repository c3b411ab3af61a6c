"""A small elastic job for tests: a linear model on numbered samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import TensorDataset

import strata
from strata.data.loading.steps import Batch
from strata.sinks import Sink
from strata.training import ElasticJob, ElasticOptions

SAMPLES, BATCH = 64, 8


class Loop:
    """Everything a script would make, and one step of it."""

    def __init__(
        self,
        checkpoints: Any,
        *,
        epochs: int | None = 2,
        max_steps: int | None = None,
        job: str | None = None,
        width: int = 4,
        samples: int = SAMPLES,
        sampler: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
        on_step: Callable[[], None] | None = None,
        coordinator: str | None = None,
        sinks: Sequence[Sink] = (),
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(1)
        inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
        self.model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        keywords = {"global_batch_size": BATCH, "dataset": "numbers", **(sampler or {})}
        self.loader = strata.ElasticLoader(
            dataset, strata.ElasticSampler(samples, **keywords), **(loader or {})
        )
        settings = {"save_every": 4, "snapshot_every": 1, "unreachable_timeout_s": 0.2, **options}
        self.job: ElasticJob = strata.elastic(
            model=self.model,
            optimizer=self.optimizer,
            data=self.loader,
            checkpoints=checkpoints,
            epochs=epochs,
            max_steps=max_steps,
            mesh=mesh,
            job=job,
            coordinator=coordinator,
            sinks=sinks,
            options=ElasticOptions(**settings),
        )

    def backward(self, batch: Batch, scale: float = 1.0) -> None:
        x, y = batch.data
        (nn.functional.mse_loss(self.model(x), y) * batch.weight * scale).backward()

    def train(self, batch: Batch) -> None:
        self.backward(batch)
        if batch.step.ends_step:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, *, stop_at: int | None = None, how: Callable[[], None] | None = None) -> Loop:
        """Train to the end, or until `stop_at` steps are made and `how` ends it; then no snapshot is skipped, so that
        what was saved is known."""
        with self.job as job:
            for batch in job:
                if stop_at is not None and job._manager is not None:
                    assert job._manager.wait_pending(60)
                self.train(batch)
                if stop_at is not None and job.step + 1 == stop_at:
                    if how is None:
                        break
                    how()
        return self

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Crash(Exception):
    """The process would be dead now."""


def crash() -> None:
    raise Crash


def steps_in(folder: Path) -> list[int]:
    """The steps of the durable checkpoints, newest first."""
    from strata.checkpoint.catalog.listing import Catalog
    from strata.stores import open_store

    return [entry.manifest.step for entry in Catalog(open_store(folder)).list().entries]
