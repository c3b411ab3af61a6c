"""Evaluation reads every sample once on all ranks, and leaves training as it was."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import strata
from strata.data import DataError
from tests.support_ranks import ranks
from tests.training.evaluation_script import SAMPLES, numbers
from tests.training.loops import Crash, Loop


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_training_is_the_same_with_and_without_evaluation(tmp_path: Path) -> None:
    undisturbed = Loop(tmp_path / "a").run().weights
    loop, valid = Loop(tmp_path / "b"), numbers()
    with loop.job as job:
        for batch in job:
            loop.train(batch)
            state = (random.getstate(), torch.get_rng_state())
            before = job._data.state_dict()
            for _ in job.evaluate(valid):
                draw()
            found = job.evaluate(valid, lambda each: {"x": each.data[0].mean() + 0 * draw()[0], "n": 1.0})
            assert found == pytest.approx({"x": (SAMPLES - 1) / 2, "n": 1.0})
            assert state[0] == random.getstate()
            assert torch.equal(state[1], torch.get_rng_state())
            assert job._data.state_dict() == before
    assert torch.equal(loop.weights, undisturbed)
    for epoch in range(2):
        assert strata.audit(tmp_path / "b", "numbers", epoch).exact


def test_measuring_leaves_every_module_in_the_mode_it_was_in(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "a")
    frozen = loop.model[1]
    assert isinstance(frozen, nn.Module)
    frozen.eval()
    seen: list[bool] = []

    def measure(batch: strata.data.Batch) -> dict[str, float]:
        seen.append(loop.model.training or torch.is_grad_enabled())
        return {"loss": 1.0}

    with loop.job as job:
        assert job.evaluate(numbers(), measure) == {"loss": 1.0}
        assert (any(seen), loop.model.training, frozen.training) == (False, True, False)
        with pytest.raises(TypeError, match="mapping of names"):
            job.evaluate(numbers(), lambda batch: 3.0)  # type: ignore[arg-type, return-value]
        with pytest.raises(DataError, match="cannot be used for evaluation"):
            job.evaluate(loop.loader)


def crash_while_evaluating(loop: Loop) -> None:
    valid = numbers()
    with loop.job as job:
        for batch in job:
            loop.train(batch)
            for each in job.evaluate(valid):
                assert each.data[0][0] == 0.0
                break
            if job.step == 5:
                assert job._manager is not None
                assert job._manager.wait_pending(60)
                for number, _ in enumerate(job.evaluate(valid)):
                    if number == 3:
                        raise Crash


def test_a_loop_that_is_left_begins_again_and_a_crash_repeats_no_step(tmp_path: Path) -> None:
    undisturbed = Loop(tmp_path / "a").run().weights
    with pytest.raises(Crash):
        crash_while_evaluating(Loop(tmp_path / "b"))
    assert torch.equal(Loop(tmp_path / "b").run().weights, undisturbed)


def test_persistent_loader_processes_evaluate_again_and_again(tmp_path: Path) -> None:
    valid = DataLoader(
        TensorDataset(torch.arange(20.0)), batch_size=6, num_workers=1, persistent_workers=True
    )
    with Loop(tmp_path / "a").job as job:
        for _ in range(3):
            assert [x for each in job.evaluate(valid) for x in each.data[0].tolist()] == list(range(20))


@pytest.mark.timeout(300)
def test_ranks_evaluate_every_sample_once_in_any_world(tmp_path: Path) -> None:
    for world in (1, 3):
        found = ranks("tests.training.evaluation_script", folder=tmp_path / str(world), world=world)
        assert len(found) == world
        for turn in range(len(found[0]["seen"])):
            together = [x for each in found for x in each["seen"][turn]]
            assert sorted(together) == list(range(SAMPLES))
            for each in found:
                assert each["means"][turn] == pytest.approx((SAMPLES - 1) / 2)
