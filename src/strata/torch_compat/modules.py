"""Whether a module or an optimizer loads and saves its state in torch's own way, so that copying tensors is all there is to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from strata.torch_compat import require
from strata.torch_compat.dtensors import local_of

require("modules")

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place, as torch counts it. Some kernels (those of batch normalisation) do not let it count."""


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether loading a state into it does nothing but to copy tensors."""
    return all(_is_plain(each) for each in module.modules()) and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        for tensor in (*module.parameters(), *module.buffers())
    )


def _is_plain(module: torch.nn.Module) -> bool:
    kind = type(module)
    loader = kind._load_from_state_dict
    hooks = (
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
        module._state_dict_hooks,
        module._state_dict_pre_hooks,
    )
    return (
        # Torch's own modules load old versions of themselves, which have other keys.
        (loader is torch.nn.Module._load_from_state_dict or loader.__module__.startswith("torch.nn.modules."))
        and kind.load_state_dict is torch.nn.Module.load_state_dict
        and kind.state_dict is torch.nn.Module.state_dict
        and kind._save_to_state_dict is torch.nn.Module._save_to_state_dict
        and kind.get_extra_state is torch.nn.Module.get_extra_state
        and not any(hooks)
    )


@dataclass(frozen=True, slots=True)
class OwnedTensor:
    """A parameter or buffer, and the dictionary of its module that it is in."""

    name: str
    owner: Mapping[str, Any]
    key: str
    tensor: torch.Tensor
    address: int

    def is_current(self) -> bool:
        """Whether the module still has this tensor, in the same memory."""
        return self.owner.get(self.key) is self.tensor and local_of(self.tensor).data_ptr() == self.address


def plain_tensors(module: torch.nn.Module) -> list[OwnedTensor] | None:
    """Everything that is in a module's state; None where the module has ways of its own to make one. FSDP's, which gathers nothing
    but puts the shards in their places, is not one: where they are there, that has happened."""
    found: list[OwnedTensor] = []
    for prefix, each in module.named_modules(remove_duplicate=False):
        kind = type(each)
        hooks = [*each._state_dict_hooks.values(), *each._state_dict_pre_hooks.values()]
        if (
            kind._save_to_state_dict is not torch.nn.Module._save_to_state_dict
            or kind.state_dict is not torch.nn.Module.state_dict
            or kind.get_extra_state is not torch.nn.Module.get_extra_state
            or any(not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp") for hook in hooks)
        ):
            return None
        dot = f"{prefix}." if prefix else ""
        for owner in (each._parameters, each._buffers):
            for key, tensor in owner.items():
                if tensor is not None and key not in each._non_persistent_buffers_set:
                    address = local_of(tensor).data_ptr()
                    found.append(OwnedTensor(f"{dot}{key}", owner, key, tensor, address))
    return found


def state_tensors(optimizer: torch.optim.Optimizer) -> list[OwnedTensor] | None:
    """Everything in the state that an optimizer keeps for its parameters; None where that is more than tensors, or where it has ways
    of its own to save it."""
    if not is_plain_optimizer(optimizer):
        return None
    found: list[OwnedTensor] = []
    for entry in optimizer.state.values():
        if not isinstance(entry, dict) or not all(
            isinstance(value, torch.Tensor) for value in entry.values()
        ):
            return None
        found += [
            OwnedTensor(key, entry, key, tensor, local_of(tensor).data_ptr()) for key, tensor in entry.items()
        ]
    return found


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it loads and saves its state as `torch.optim.Optimizer` does."""
    kind = type(optimizer)
    hooks = (
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
    )
    plain = torch.optim.Optimizer
    return (
        kind.load_state_dict is plain.load_state_dict
        and kind.state_dict is plain.state_dict
        and kind._process_value_according_to_param_policy is plain._process_value_according_to_param_policy
        and not any(hooks)
    )
