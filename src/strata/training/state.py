"""A training job's state as one plain dictionary, and back.

The keys are those of the harness's `CheckpointState`, so a file saved by either opens with the other, and with
plain `torch.load(weights_only=True)`. Nothing here talks to storage or to other ranks.

A state comes back in two steps: `manager.restore(into=state.targets())` fills the live tensors themselves, and
`adopt` does the rest. `targets` are the tensors of plain modules and of plain optimizers, whose state is allocated from what
was saved where it does not exist yet, without a step that would change anything. Whatever has a way of its own to load a
state (hooks, a `load_state_dict` of its own, schedulers, scalers) is given what was saved, as before. Both ways end in the
same bits. Where a state does not fit, `StateMismatch` names the tensor before anything has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from strata.checkpoint.catalog.naming import MODEL, OPTIMIZER, SCHEDULER
from strata.checkpoint.errors import StateMismatch
from strata.checkpoint.image.nested import Path, leaves, mapped
from strata.checkpoint.image.pickling import TensorRecipe
from strata.torch_compat.modules import is_plain_module, is_plain_optimizer
from strata.torch_compat.wrappers import COMPILED
from strata.training import rng

EXTRA = "extra"


class Stateful(Protocol):
    """Anything that can be saved and put back: optimizers, schedulers, scalers, scaling managers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside the wrappers of DDP, `torch.compile` and Lightning Fabric."""
    while True:
        inner = getattr(model, "module", None) if _is_wrapper(model) else getattr(model, COMPILED, None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def tensor_bytes(state: Any) -> int:
    """What a state's tensors take, which is nearly all of it."""
    return sum(leaf.nbytes for _, leaf in leaves(state, leaf=torch.Tensor) if isinstance(leaf, torch.Tensor))


def _is_wrapper(model: torch.nn.Module) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "DataParallel", "_FabricModule")


def plain_optimizer(optimizer: Stateful) -> tuple[Stateful, dict[str, Stateful]]:
    """The optimizer inside the wrapper of Accelerate or Lightning (Fabric's too), whose steps can be seen; and, by name, what the
    wrapper keeps beside it: the scaler of gradients in half precision."""
    wrapper: Any = optimizer
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if "AcceleratedOptimizer" in kinds:
        scaler = wrapper.scaler
    elif kinds & {"_FabricOptimizer", "LightningOptimizer"}:
        scaler = getattr(wrapper._strategy.precision, "scaler", None) if "_FabricOptimizer" in kinds else None
    else:
        return optimizer, {}
    return wrapper.optimizer, {} if scaler is None else {"scaler": scaler}


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """What a job must carry over to resume as if it had never stopped."""

    model: torch.nn.Module
    optimizer: Stateful
    scheduler: Stateful | None = None
    extra: Mapping[str, Stateful] | None = None
    """Further things to save, by name."""

    def capture(
        self, *, step: int, epoch: int, rng_states: Mapping[str, Any], world_size: int
    ) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": epoch,
            MODEL: unwrap(self.model).state_dict(),
            OPTIMIZER: self.optimizer.state_dict(),
            SCHEDULER: self.scheduler.state_dict() if self.scheduler is not None else None,
            "rng_states": dict(rng_states),
            EXTRA: {name: item.state_dict() for name, item in (self.extra or {}).items()},
            "world_size": world_size,
        }

    def targets(self) -> LiveTargets:
        """The live tensors, for a restore `into` them; `adopt` what that returns."""
        return LiveTargets(self)

    def adopt(self, state: Mapping[str, Any], *, rank: int) -> None:
        """Continue from a restored state. Tensors that are the live ones already, or can become them, are not copied."""
        _adopt(unwrap(self.model), state[MODEL])
        _adopt(self.optimizer, state[OPTIMIZER])
        if self.scheduler is not None and state.get(SCHEDULER) is not None:
            self.scheduler.load_state_dict(state[SCHEDULER])
        for name, item in (self.extra or {}).items():
            saved = (state.get(EXTRA) or {}).get(name)
            if saved is not None:
                _adopt(item, saved)
        rng.restore(state.get("rng_states") or {}, rank)


class LiveTargets:
    """The tensors of a training state that a saved one is loaded into (`strata.checkpoint.image.in_place.Binding`)."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    @property
    def is_on_cpu(self) -> bool:
        """By parameters and buffers: the rest is where they are."""
        modules = [unwrap(self._state.model), *self._extra(torch.nn.Module)]
        optimizers = [self._state.optimizer, *self._extra(torch.optim.Optimizer)]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        tensors += [
            parameter
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        return all(tensor.device.type == "cpu" for tensor in tensors)

    def bind(self, saved: Any) -> Any:
        """The targets for what was saved, a `TensorRecipe` for each tensor. Raises `StateMismatch`."""
        if not isinstance(saved, Mapping) or not {MODEL, OPTIMIZER} <= set(saved):
            raise StateMismatch("The checkpoint holds no training state: a model and an optimizer.")
        state = self._state
        extra = saved.get(EXTRA) or {}
        return {
            MODEL: _targets(unwrap(state.model), saved[MODEL], MODEL),
            OPTIMIZER: _targets(state.optimizer, saved[OPTIMIZER], OPTIMIZER),
            EXTRA: {
                name: _targets(item, extra[name], f"{EXTRA}.{name}")
                for name, item in (state.extra or {}).items()
                if extra.get(name) is not None
            },
        }

    def _extra(self, kind: type[Any]) -> list[Any]:
        return [item for item in (self._state.extra or {}).values() if isinstance(item, kind)]


def _targets(item: object, saved: Any, name: str) -> Any:
    """What of an item can be filled in place; the rest is given to its `load_state_dict`."""
    if isinstance(item, torch.nn.Module) and is_plain_module(item):
        return _module_targets(item, saved, name)
    if isinstance(item, torch.optim.Optimizer) and is_plain_optimizer(item):
        return {"state": _optimizer_targets(item, saved, name)}
    return {}


def _adopt(item: Any, saved: Any) -> None:
    if isinstance(item, torch.nn.Module) and is_plain_module(item) and _is_live(item, saved):
        return
    if isinstance(item, torch.optim.Optimizer) and is_plain_optimizer(item):
        _adopt_optimizer(item, saved)
        return
    item.load_state_dict(saved)


# --- modules --------------------------------------------------------------------------------------------------


def _module_targets(module: torch.nn.Module, saved: Any, name: str) -> dict[str, torch.Tensor]:
    live = module.state_dict()
    found = saved if isinstance(saved, Mapping) else {}
    for key in live:
        if key not in found:
            raise StateMismatch(f"'{name}.{key}' is not in the checkpoint.")
    for key, leaf in found.items():
        if key not in live:
            raise StateMismatch(f"'{name}.{key}' is in the checkpoint, but not in the model.")
        if not isinstance(leaf, TensorRecipe) or leaf.shape != live[key].shape:
            shape = leaf.shape if isinstance(leaf, TensorRecipe) else type(leaf).__name__
            raise StateMismatch(
                f"'{name}.{key}' is {shape} in the checkpoint, but {tuple(live[key].shape)} in the model."
            )
    return live


def _is_live(module: torch.nn.Module, saved: Any) -> bool:
    """Whether a state is in the module already: its tensors are the module's."""
    live = module.state_dict()
    return live.keys() == saved.keys() and all(
        isinstance(saved[key], torch.Tensor)
        and saved[key].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        and saved[key].device == tensor.device
        and saved[key].dtype is tensor.dtype
        and saved[key].shape == tensor.shape
        and saved[key].stride() == tensor.stride()
        and saved[key].storage_offset() == tensor.storage_offset()
        for key, tensor in live.items()
    )


# --- optimizers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Owner:
    """A parameter that a saved entry of an optimizer's state belongs to."""

    parameter: torch.Tensor
    steps_on_device: bool
    """Fused and capturable optimizers count their steps on the device."""

    def home(self, key: object, dtype: torch.dtype) -> tuple[torch.dtype, torch.device]:
        """Of which type, and where, torch wants a tensor of this entry; the same rules as its own `load_state_dict`."""
        if key == "step":
            return (torch.float32, self.parameter.device) if self.steps_on_device else (dtype, _CPU)
        return self.parameter.dtype if self.parameter.is_floating_point() else dtype, self.parameter.device


_CPU = torch.device("cpu")


def _owners(optimizer: torch.optim.Optimizer, saved: Any, name: str) -> Iterator[tuple[Any, _Owner]]:
    """Whom each entry of a saved state belongs to. Raises `StateMismatch` for other groups than there are."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise StateMismatch(f"'{name}.param_groups' is not in the checkpoint.")
    sizes = [len(group.get("params", ())) for group in groups]
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != wanted:
        raise StateMismatch(
            f"'{name}.param_groups' has groups of {sizes} parameters in the checkpoint, but of {wanted} in the optimizer."
        )
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        on_device = bool(group.get("fused") or group.get("capturable"))
        for number, parameter in zip(group["params"], live["params"], strict=True):
            yield number, _Owner(parameter, on_device)


def _optimizer_targets(optimizer: torch.optim.Optimizer, saved: Any, name: str) -> dict[Any, Any]:
    """For each tensor of a saved state, the live one, or a new one of the kind that torch would make of it."""
    owners = dict(_owners(optimizer, saved, name))
    entries = saved.get("state")
    if not isinstance(entries, Mapping):
        raise StateMismatch(f"'{name}.state' is not in the checkpoint.")

    def targets(entry: Any, owner: _Owner) -> Any:
        lives = dict(leaves(optimizer.state.get(owner.parameter), leaf=torch.Tensor))

        def target(path: Path, leaf: Any) -> torch.Tensor | None:
            if not isinstance(leaf, TensorRecipe):
                return None
            live = lives.get(path)
            dtype, device = owner.home(path[-1] if path else None, leaf.dtype)
            if (
                type(live) is torch.Tensor
                and (live.dtype, live.device, tuple(live.shape)) == (dtype, device, leaf.shape)
                and live.data_ptr() not in taken
            ):
                taken.add(live.data_ptr())
                return live
            return torch.empty_strided(leaf.shape, _dense(leaf), dtype=dtype, device=device)

        return mapped(entry, target, leaf=TensorRecipe)

    taken: set[int] = set()
    return {number: targets(entry, owners[number]) for number, entry in entries.items() if number in owners}


def _dense(leaf: TensorRecipe) -> tuple[int, ...]:
    """The strides of a copy: those of the original, where they leave no gaps and share no memory."""
    step = 1
    for stride, size in sorted(zip(leaf.stride, leaf.shape, strict=True)):
        if size != 1 and stride != step:
            return torch.empty(leaf.shape, device="meta").stride()
        step *= size
    return leaf.stride


def _adopt_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """What `Optimizer.load_state_dict` does, but in time that grows with the parameters, not with their square."""
    owners = dict(_owners(optimizer, saved, OPTIMIZER))

    def placed(entry: Any, owner: _Owner) -> Any:
        def place(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            key = path[-1] if path else None
            dtype, device = owner.home(key, leaf.dtype)
            if key == "step" and not owner.steps_on_device:
                return leaf
            return leaf.to(dtype=dtype, device=device)

        return mapped(entry, place, leaf=torch.Tensor)

    state: defaultdict[Any, Any] = defaultdict(dict)
    for number, entry in saved["state"].items():
        owner = owners.get(number)
        if owner is None:
            state[number] = entry
        else:
            state[owner.parameter] = placed(entry, owner)
    groups = deepcopy(saved["param_groups"])
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        group["params"] = live["params"]
        if "param_names" in live:
            group.setdefault("param_names", live["param_names"])
    optimizer.__setstate__({"state": state, "param_groups": groups})
