"""A state restored in place is bit for bit the one that `load_state_dict` makes, whatever the optimizer and the model."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata.checkpoint import CheckpointManager, Memory, StateMismatch
from strata.checkpoint.image.in_place import Binding
from strata.torch_compat.modules import is_plain_module, is_plain_optimizer
from strata.training.state import TrainingState
from tests.checkpoint.states import assert_same

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD, momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters()),
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "AdamW, amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "groups in another order": lambda m: torch.optim.AdamW(
        [
            {"params": list(m.parameters())[::-2], "lr": 0.01},
            {"params": list(m.parameters())[-2::-2], "weight_decay": 0.5},
        ]
    ),
    "named parameters": lambda m: torch.optim.Adam(m.named_parameters()),
}


class Model(nn.Module):
    """Parameters of two types, one not contiguous, tied weights, and buffers."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU())
        self.wide = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += len(tokens)
        x = self.inner(self.embedding(tokens))
        x = (x.double() @ self.wide).float() + (x @ self.transposed).sum()
        return self.head(x)  # type: ignore[no-any-return]


class Counter:
    """Anything with a state of its own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"deep": [{"average": torch.zeros(4)}, "text"], "count": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any, /) -> None:
        self.state = copy.deepcopy(state)


class Trained:
    def __init__(self, make: Make, *, seed: int, model: Callable[[], nn.Module] = Model) -> None:
        torch.manual_seed(seed)
        self.model = model()
        self.optimizer = make(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.average = nn.Linear(3, 3)
        self.counter = Counter()
        self.state = TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"average": self.average, "counter": self.counter},
        )

    def step(self, number: int) -> None:
        tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(tokens).float().square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.counter.state["count"] += 1
        self.counter.state["deep"][0]["average"] += 0.25

    def captured(self) -> dict[str, Any]:
        return self.state.capture(step=3, epoch=1, rng_states={}, world_size=1)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    memory = Memory(job=f"test-{uuid.uuid4().hex[:12]}")
    with CheckpointManager(tmp_path / "checkpoints", memory=memory) as manager:
        yield manager


def save(manager: CheckpointManager, trained: Trained, *, step: int = 3) -> None:
    manager.save(trained.captured(), step=step).result()


def load_out(manager: CheckpointManager, trained: Trained) -> None:
    """As PyTorch would do it: a state in memory of its own, copied by every `load_state_dict`."""
    saved = manager.load()
    trained.model.load_state_dict(saved["model_state_dict"])
    trained.optimizer.load_state_dict(saved["optimizer_state_dict"])
    trained.scheduler.load_state_dict(saved["lr_scheduler_state_dict"])
    trained.average.load_state_dict(saved["extra"]["average"])
    trained.counter.load_state_dict(saved["extra"]["counter"])


@pytest.mark.parametrize(("tier", "tear_ok"), [("MEMORY", False), ("MEMORY", True), ("NVME", True)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_restored_in_place_is_the_one_that_torch_would_load(
    manager: CheckpointManager, name: str, tier: str, tear_ok: bool
) -> None:
    make = OPTIMIZERS[name]
    before = Trained(make, seed=1)
    for number in range(3):
        before.step(number)
    save(manager, before)
    wanted, found = Trained(make, seed=2), Trained(make, seed=2)
    load_out(manager, wanted)
    live = {key: tensor.data_ptr() for key, tensor in found.model.state_dict().items()}
    restored = manager.restore(into=found.state.targets(), tiers=[tier], tear_ok=tear_ok)
    assert restored.tier == tier
    found.state.adopt(restored.state, rank=0)
    assert_same(found.captured(), wanted.captured())
    assert {key: tensor.data_ptr() for key, tensor in found.model.state_dict().items()} == live
    for trained in (wanted, found, before):
        trained.step(3)
        trained.step(4)
    assert_same(found.captured(), wanted.captured())
    if name != "NAdam":  # Torch gives one of its numbers another type when it loads a state.
        assert_same(found.captured(), before.captured())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_tensor_is_copied_a_second_time(manager: CheckpointManager, name: str) -> None:
    trained = Trained(OPTIMIZERS[name], seed=1)
    trained.step(0)
    save(manager, trained)
    fresh = Trained(OPTIMIZERS[name], seed=2)
    loaded = manager.restore(into=fresh.state.targets()).state
    arrived = {
        tensor.data_ptr()
        for entry in loaded["optimizer_state_dict"]["state"].values()
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor)
    }
    fresh.state.adopt(loaded, rank=0)
    in_use = {
        tensor.data_ptr()
        for entry in fresh.optimizer.state.values()
        for tensor in entry.values()
        if isinstance(tensor, torch.Tensor)
    }
    assert in_use == arrived


def test_the_state_of_an_optimizer_that_has_stepped_is_filled_where_it_is(manager: CheckpointManager) -> None:
    trained = Trained(OPTIMIZERS["Adam"], seed=1)
    trained.step(0)
    wanted = copy.deepcopy(trained.captured())
    save(manager, trained)
    trained.step(1)
    first = next(iter(trained.optimizer.state.values()))
    addresses = {key: tensor.data_ptr() for key, tensor in first.items()}
    trained.state.adopt(manager.restore(into=trained.state.targets()).state, rank=0)
    assert_same(trained.captured(), wanted)
    first = next(iter(trained.optimizer.state.values()))
    assert {key: tensor.data_ptr() for key, tensor in first.items()} == addresses


def test_half_precision_models_get_the_state_of_their_optimizer_in_their_own_type(
    manager: CheckpointManager,
) -> None:
    """As torch does it: whatever type a moment was saved in, it has its parameter's."""
    make = OPTIMIZERS["Adam"]
    before = Trained(make, seed=1, model=lambda: nn.Linear(4, 3))
    before.model(torch.ones(2, 4)).sum().backward()
    before.optimizer.step()
    save(manager, before)
    wanted, found = (Trained(make, seed=2, model=lambda: nn.Linear(4, 3).bfloat16()) for _ in range(2))
    load_out(manager, wanted)
    found.state.adopt(manager.restore(into=found.state.targets()).state, rank=0)
    assert_same(found.captured(), wanted.captured())
    assert found.optimizer.state[found.model.weight]["exp_avg"].dtype is torch.bfloat16  # type: ignore[index]


class WithHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_load_state_dict_pre_hook(self._double)

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2


class WithExtraState(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


@pytest.mark.parametrize("kind", [WithHook, WithExtraState])
def test_a_module_with_a_way_of_its_own_to_load_a_state_is_asked_to(
    manager: CheckpointManager, kind: Callable[[], nn.Module]
) -> None:
    make = OPTIMIZERS["SGD"]
    before = Trained(make, seed=1, model=kind)
    if isinstance(before.model, WithExtraState):
        before.model.calls = 7
    save(manager, before)
    wanted, found = Trained(make, seed=2, model=kind), Trained(make, seed=2, model=kind)
    load_out(manager, wanted)
    found.state.adopt(manager.restore(into=found.state.targets()).state, rank=0)
    assert not is_plain_module(found.model)
    assert_same(found.captured(), wanted.captured())


def test_an_optimizer_with_a_hook_is_asked_to_load_its_state_itself(manager: CheckpointManager) -> None:
    trained = Trained(OPTIMIZERS["SGD, momentum"], seed=1)
    trained.step(0)
    save(manager, trained)
    fresh = Trained(OPTIMIZERS["SGD, momentum"], seed=2)
    called: list[object] = []
    fresh.optimizer.register_load_state_dict_post_hook(called.append)
    assert not is_plain_optimizer(fresh.optimizer)
    fresh.state.adopt(manager.restore(into=fresh.state.targets()).state, rank=0)
    assert called == [fresh.optimizer]
    assert_same(fresh.captured(), trained.captured())


def test_a_mismatching_model_is_reported_by_name_and_nothing_has_changed(
    manager: CheckpointManager,
) -> None:
    save(manager, Trained(OPTIMIZERS["Adam"], seed=1))

    def wider() -> nn.Module:
        model = Model()
        model.inner[0] = nn.Linear(6, 6, bias=False)
        return model

    def longer() -> nn.Module:
        model = Model()
        model.register_buffer("another", torch.zeros(1))
        return model

    def other_shape() -> nn.Module:
        model = Model()
        model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        return model

    for model, said in (
        (wider, "'model_state_dict.inner.0.bias' is in the checkpoint, but not in the model"),
        (longer, "'model_state_dict.another' is not in the checkpoint"),
        (other_shape, r"'model_state_dict.mask' is \(3,\) in the checkpoint, but \(4,\) in the model"),
    ):
        trained = Trained(OPTIMIZERS["Adam"], seed=2, model=model)
        before = copy.deepcopy(trained.captured())
        for tier in ("MEMORY", "NVME"):
            with pytest.raises(StateMismatch, match=said):
                manager.restore(into=trained.state.targets(), tiers=[tier], tear_ok=True)
        assert_same(trained.captured(), before)


def test_an_optimizer_with_other_groups_is_reported_and_nothing_has_changed(
    manager: CheckpointManager,
) -> None:
    save(manager, Trained(OPTIMIZERS["Adam"], seed=1))
    trained = Trained(OPTIMIZERS["groups in another order"], seed=2)
    before = copy.deepcopy(trained.captured())
    with pytest.raises(StateMismatch, match=r"optimizer_state_dict\.param_groups"):
        manager.restore(into=trained.state.targets(), tear_ok=True)
    assert_same(trained.captured(), before)


def test_a_checkpoint_of_something_else_is_no_training_state(manager: CheckpointManager) -> None:
    manager.save({"x": torch.ones(3)}, step=1).result()
    with pytest.raises(StateMismatch, match="no training state"):
        manager.restore(into=Trained(OPTIMIZERS["SGD"], seed=1).state.targets())


def test_targets_know_where_they_are() -> None:
    targets = Trained(OPTIMIZERS["SGD"], seed=1).state.targets()
    assert isinstance(targets, Binding)
    assert targets.is_on_cpu
    elsewhere = TrainingState(model=nn.Linear(2, 2, device="meta"), optimizer=Counter())
    assert not elsewhere.targets().is_on_cpu
