"""The state of training as the harness's users know it: from a model and an optimizer, and back into them.

Its dictionary is what is saved; a trainer's checkpoint opens as one too (`strata.training.state` has the same keys).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import distributed

from strata.checkpoint.image.nested import mapped
from strata.trainer.errors import CheckpointLoadError, CheckpointValidationError
from strata.training import rng
from strata.training.state import Stateful, unwrap

log = logging.getLogger("elastic_harness.checkpoint")

REQUIRED_KEYS = frozenset({"step", "model_state_dict", "optimizer_state_dict"})


@dataclass
class CheckpointState:
    step: int = 0
    epoch: int = 0
    model_state_dict: dict[str, Any] = field(default_factory=dict)
    optimizer_state_dict: dict[str, Any] = field(default_factory=dict)
    lr_scheduler_state_dict: dict[str, Any] = field(default_factory=dict)
    dataset_state: dict[str, Any] = field(default_factory=dict)
    rng_states: dict[str, Any] = field(default_factory=dict)
    """Of every rank, by its number as text."""
    metrics: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    timestamp: float = field(default_factory=time.time)
    """Unix seconds."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the trainer keeps beside: the states of its scaling and metrics."""

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that is saved; tensors are shared, not copied."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CheckpointState:
        """The other way round. What is missing has its default; keys of no meaning here are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known and value is not None})

    def cpu_copy(self) -> CheckpointState:
        """A copy that shares nothing with this one, its tensors on the CPU. Tied tensors stay tied."""
        copies: dict[int, torch.Tensor] = {}

        def copied(_: object, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in copies:
                    copies[id(value)] = value.detach().cpu().clone()
                return copies[id(value)]
            return bytearray(value) if isinstance(value, bytearray) else value

        return CheckpointState(**mapped(self.to_dict(), copied, leaf=torch.Tensor))


def checked_state(loaded: Any, *, path: str, validate_structure: bool = True) -> CheckpointState:
    """What was loaded, as a state. Raises `CheckpointLoadError` or `CheckpointValidationError` naming what is wrong."""
    if not isinstance(loaded, Mapping):
        raise CheckpointLoadError(f"it holds a {type(loaded).__name__}, not a dictionary", path=path)
    if validate_structure:
        missing = REQUIRED_KEYS - set(loaded)
        if missing:
            raise CheckpointLoadError.missing_keys(path, missing)
        for name in ("step", "epoch"):
            value = loaded.get(name, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointValidationError(f"'{name}' must be a whole number, not {value!r}", path=path)
        for name in ("model_state_dict", "optimizer_state_dict"):
            if not isinstance(loaded[name], Mapping):
                kind = type(loaded[name]).__name__
                raise CheckpointValidationError(f"'{name}' must be a dictionary, not a {kind}", path=path)
    return CheckpointState.from_dict(loaded)


def create_checkpoint_state(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    dataset_state: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    epoch: int = 0,
) -> CheckpointState:
    """The state of training now, of the model inside DDP or `torch.compile`. Tensors are shared until it is saved."""
    rank = distributed.get_rank() if _is_distributed() else 0
    return CheckpointState(
        step=step,
        epoch=epoch,
        model_state_dict=_unwrap(model).state_dict(),
        optimizer_state_dict=optimizer.state_dict() if optimizer is not None else {},
        lr_scheduler_state_dict=lr_scheduler.state_dict() if lr_scheduler is not None else {},
        dataset_state=dict(dataset_state or {}),
        rng_states={str(rank): rng.capture()},
        metrics=dict(metrics or {}),
        world_size=distributed.get_world_size() if _is_distributed() else 1,
    )


def load_checkpoint_to_model(
    state: CheckpointState,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    strict: bool = True,
) -> None:
    """Put a state back. With `strict=False`, what does not fit is left as it is: parameters the model does not have or
    the state has not, an optimizer whose groups have changed, and a scheduler of another kind."""
    _unwrap(model).load_state_dict(state.model_state_dict, strict=strict)
    if optimizer is not None and state.optimizer_state_dict:
        try:
            optimizer.load_state_dict(state.optimizer_state_dict)
        except (ValueError, KeyError) as error:
            if strict and isinstance(error, KeyError):
                raise CheckpointValidationError.missing_state(
                    "the optimizer", str(error.args[0]), found=state.optimizer_state_dict
                ) from error
            if strict:
                raise
            log.warning(
                "the optimizer starts with a fresh state, because the saved one does not fit: %s", error
            )
    if lr_scheduler is not None and state.lr_scheduler_state_dict:
        try:
            lr_scheduler.load_state_dict(state.lr_scheduler_state_dict)
        except KeyError as error:
            if strict:
                raise CheckpointValidationError.missing_state(
                    "the scheduler", str(error.args[0]), found=state.lr_scheduler_state_dict
                ) from error
            log.warning("the scheduler starts afresh, its state does not fit: it has no %s", error)
    _restore_generators(state.rng_states)


def _restore_generators(states: Mapping[str, Any]) -> None:
    """Of this rank; files of older versions have one set for all, with some of it missing."""
    if isinstance(states.get("torch"), torch.Tensor):
        torch.set_rng_state(states["torch"])
        if states.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])
        return
    rng.restore(states, distributed.get_rank() if _is_distributed() else 0)


def _unwrap(model: Any) -> torch.nn.Module:
    """Also of wrappers that are no modules themselves."""
    if not isinstance(model, torch.nn.Module) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return unwrap(model)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
