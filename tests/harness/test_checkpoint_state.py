"""States: from training, to a dictionary and back, into a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from elastic_harness.checkpoint import CheckpointState, create_checkpoint_state, load_checkpoint_to_model
from elastic_harness.errors import CheckpointValidationError
from tests.harness.checkpoint_states import state_of


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.AdamW, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def test_to_dict_and_back() -> None:
    state = state_of(100)
    data = state.to_dict()
    assert (data["step"], data["epoch"], data["world_size"]) == (100, 1, 4)
    assert {
        "model_state_dict", "optimizer_state_dict", "lr_scheduler_state_dict", "dataset_state", "rng_states",
        "metrics", "timestamp",
    } <= set(data)  # fmt: skip
    restored = CheckpointState.from_dict(data)
    assert restored == state


def test_what_is_missing_or_none_has_its_default_and_what_is_unknown_is_left_out() -> None:
    state = CheckpointState.from_dict({"step": 3, "lr_scheduler_state_dict": None, "position": 12})
    assert state.step == 3
    assert state.lr_scheduler_state_dict == {}
    assert state.world_size == 1
    assert not hasattr(state, "position")


def test_a_cpu_copy_shares_nothing_and_keeps_tied_tensors_tied() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    state = CheckpointState(
        model_state_dict={"a": weight, "b": weight}, rng_states={"0": {"python": [3, [1, 2], None]}}
    )
    copied = state.cpu_copy()
    with torch.no_grad():
        weight.zero_()
    state.rng_states["0"]["python"][1].append(9)
    assert copied.model_state_dict["a"].tolist() == [1, 1, 1]
    assert copied.model_state_dict["a"] is copied.model_state_dict["b"]
    assert copied.rng_states["0"]["python"][1] == [1, 2]
    assert copied.model_state_dict["a"].device.type == "cpu"
    assert not copied.model_state_dict["a"].requires_grad


def test_training_continues_bit_for_bit_from_a_state() -> None:
    model, optimizer, scheduler = trained()
    np.random.seed(5)
    state = create_checkpoint_state(
        3, model, optimizer, scheduler, dataset_state={"position": 50}, metrics={"loss": 0.5}, epoch=1
    )
    assert (state.step, state.epoch, state.dataset_state, state.metrics) == (
        3,
        1,
        {"position": 50},
        {"loss": 0.5},
    )
    kept = state.cpu_copy()
    expected, numbers = torch.rand(3), [random.random(), np.random.rand()]
    wanted = step_of(model, optimizer)

    other, other_optimizer, other_scheduler = trained(seed=9)
    load_checkpoint_to_model(kept, other, other_optimizer, other_scheduler)
    assert torch.equal(torch.rand(3), expected)
    assert [random.random(), np.random.rand()] == numbers
    assert torch.equal(step_of(other, other_optimizer), wanted)
    assert other_scheduler.last_epoch == scheduler.last_epoch


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


class Wrapper:
    """A wrapper that is no module itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def test_wrapped_models_are_saved_and_loaded_unwrapped(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        for wrapped in (
            DistributedDataParallel(model),
            Wrapper(model),
            torch.compile(model, backend="eager"),
        ):
            state = create_checkpoint_state(1, wrapped, optimizer)  # type: ignore[arg-type]
            assert set(state.model_state_dict) == {"weight", "bias"}
            assert state.world_size == 1
            kept = state.cpu_copy()
            with torch.no_grad():
                model.get_parameter("weight").zero_()
            load_checkpoint_to_model(kept, wrapped, optimizer)  # type: ignore[arg-type]
            assert torch.equal(model.get_parameter("weight"), kept.model_state_dict["weight"])
    finally:
        distributed.destroy_process_group()


def test_a_model_that_has_changed_is_an_error_unless_not_strict(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = trained()
    state = create_checkpoint_state(1, model, optimizer).cpu_copy()
    changed = torch.nn.Linear(4, 3, bias=False)
    fresh = torch.optim.AdamW(changed.parameters())
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for Linear"):
        load_checkpoint_to_model(state, changed, fresh)
    load_checkpoint_to_model(state, changed, fresh, strict=False)
    assert torch.equal(changed.weight, state.model_state_dict["weight"])
    assert "the optimizer starts with a fresh state" in caplog.text


def test_generators_of_older_files_are_restored_too() -> None:
    model, optimizer, _ = trained()
    state = create_checkpoint_state(1, model, optimizer)
    before = torch.get_rng_state()
    state.rng_states = {"python": None, "numpy": None, "torch": before, "cuda": None}
    expected = torch.rand(3)
    load_checkpoint_to_model(state, model, optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_an_optimizer_state_of_another_program_says_what_it_lacks() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = create_checkpoint_state(1, model, optimizer)
    state.optimizer_state_dict = {"momentum": 0.9}
    with pytest.raises(
        CheckpointValidationError, match="the optimizer has no 'param_groups'; it has momentum"
    ):
        load_checkpoint_to_model(state, model, optimizer)
    load_checkpoint_to_model(state, model, optimizer, strict=False)


@pytest.mark.parametrize(
    ("states", "lacks"),
    [
        ({"0": {}}, "torch, python"),
        ({"0": {"python": [3, [1] * 625, None]}}, "torch"),
        ({"0": None}, ""),
        ({"1": {}}, ""),
    ],
)
def test_generators_that_a_state_lacks_continue_as_they_are(
    states: dict[str, Any], lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = trained()
    state = create_checkpoint_state(1, model, optimizer)
    state.rng_states = states
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_checkpoint_to_model(state, model, optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert (f"of rank 0 are without {lacks}" in caplog.text) == bool(lacks)


def test_a_scheduler_state_of_another_program_says_what_it_lacks(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, _ = trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    state = create_checkpoint_state(1, model, optimizer)
    state.lr_scheduler_state_dict = {"last_epoch": 3}
    with pytest.raises(
        CheckpointValidationError, match="the scheduler has no 'lr_lambdas'; it has last_epoch"
    ):
        load_checkpoint_to_model(state, model, optimizer, scheduler)
    load_checkpoint_to_model(state, model, optimizer, scheduler, strict=False)
    assert "the scheduler starts afresh" in caplog.text
