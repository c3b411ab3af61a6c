"""The trainer's checkpoints and the harness's open with each other, and training continues from either."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from elastic_harness.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from strata.checkpoint.catalog.naming import step_stem
from strata.data.loading.loader import ElasticLoader
from strata.data.loading.sampler import ElasticSampler
from strata.training.job import ElasticJob


def parts() -> tuple[torch.nn.Linear, torch.optim.SGD]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(folder: Path, *, upto: int) -> tuple[int, torch.nn.Linear]:
    """Run a job to this step; the step it began at, and its model."""
    model, optimizer = parts()
    job = ElasticJob(
        model=model,
        optimizer=optimizer,
        data=ElasticLoader(
            [torch.ones(2)] * 64,
            ElasticSampler(64, global_batch_size=4, rank=0, world_size=1),
            commit="explicit",
        ),
        checkpoints=str(folder),
        max_steps=upto,
        job="passed-on",
        stem=step_stem,
    )
    with job:
        began = job.step
        for batch in job:
            model(batch.data).sum().backward()
            if batch.step.ends_step:
                optimizer.step()
                optimizer.zero_grad()
    return began, model


def test_training_passes_from_trainer_to_harness_and_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, trained = train(tmp_path, upto=3)
    model, optimizer = parts()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        state = manager.load_checkpoint()
        assert state is not None
        assert state.step == 3
        load_checkpoint_to_model(state, model, optimizer)
        assert torch.equal(model.weight, trained.weight)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        manager.save_checkpoint(create_checkpoint_state(4, model, optimizer))
        assert manager.wait_for_pending_saves(60)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "checkpoint_step_00000003.pt",
        "checkpoint_step_00000004.pt",
    ]
    with caplog.at_level(logging.WARNING):
        began, _ = train(tmp_path, upto=6)
    assert began == 4
    assert "has no data position" in caplog.text
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        final = manager.load_checkpoint()
    assert final is not None
    assert final.step == 6
