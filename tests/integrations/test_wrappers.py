"""What Accelerate and Fabric wrap is taken as it is: the job sees the optimizer inside, and saves the scaler beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("lightning_fabric")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision

from strata.training.state import plain_optimizer, unwrap

pytestmark = pytest.mark.filterwarnings("ignore")


def _parts() -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.AdamW(model.parameters())


def test_the_wrappers_of_accelerate_are_taken_off() -> None:
    model, optimizer = _parts()
    prepared, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
    assert unwrap(prepared) is model
    assert plain_optimizer(wrapped) == (optimizer, {})
    scaler = torch.amp.GradScaler("cpu")
    assert plain_optimizer(AcceleratedOptimizer(optimizer, scaler=scaler)) == (optimizer, {"scaler": scaler})


def test_the_wrappers_of_fabric_are_taken_off() -> None:
    model, optimizer = _parts()
    prepared, wrapped = Fabric(accelerator="cpu").setup(model, optimizer)
    assert unwrap(prepared) is model
    assert plain_optimizer(wrapped) == (optimizer, {})
    scaler = torch.amp.GradScaler("cpu")
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    _, wrapped = Fabric(accelerator="cpu", plugins=[precision]).setup(*_parts())
    assert plain_optimizer(wrapped)[1] == {"scaler": scaler}


def test_any_other_optimizer_stays_what_it_is() -> None:
    _, optimizer = _parts()
    assert plain_optimizer(optimizer) == (optimizer, {})
