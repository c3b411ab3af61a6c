"""Whether a module or an optimizer loads and saves its state in torch's own way, so that copying tensors is all there is to it."""

from __future__ import annotations

import torch

from strata.torch_compat import require

require("modules")


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
