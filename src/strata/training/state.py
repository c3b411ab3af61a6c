"""A training job's state as one plain dictionary, and back.

The keys are those of the harness's `CheckpointState`, so a file saved by either opens with the other, and with
plain `torch.load(weights_only=True)`. Nothing here talks to storage or to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from strata.training import rng


class Stateful(Protocol):
    """Anything that can be saved and put back: optimizers, schedulers, scalers, scaling managers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DDP or `torch.compile` wrappers."""
    while True:
        inner = getattr(model, "module", None) if _is_wrapper(model) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def tensor_bytes(state: Any) -> int:
    """What a state's tensors take, which is nearly all of it."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(tensor_bytes(value) for value in state)
    return 0


def _is_wrapper(model: torch.nn.Module) -> bool:
    return type(model).__name__ in ("DistributedDataParallel", "DataParallel")


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """What a job must take along to go on as if nothing had happened."""

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
            "model_state_dict": unwrap(self.model).state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "lr_scheduler_state_dict": self.scheduler.state_dict() if self.scheduler is not None else None,
            "rng_states": dict(rng_states),
            "extra": {name: item.state_dict() for name, item in (self.extra or {}).items()},
            "world_size": world_size,
        }

    def restore(self, state: Mapping[str, Any], *, rank: int) -> None:
        unwrap(self.model).load_state_dict(state["model_state_dict"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        if self.scheduler is not None and state.get("lr_scheduler_state_dict") is not None:
            self.scheduler.load_state_dict(state["lr_scheduler_state_dict"])
        for name, item in (self.extra or {}).items():
            saved = (state.get("extra") or {}).get(name)
            if saved is not None:
                item.load_state_dict(saved)
        rng.restore(state.get("rng_states") or {}, rank)
