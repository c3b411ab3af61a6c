"""What torch's wrappers of modules add to the names of a model's state.

Files have these names as well, whichever torch has written them, so they are read without one. Tests compare them with the
installed torch: at import, that would load the compiler.
"""

from __future__ import annotations

from typing import Final

COMPILED: Final = "_orig_mod"
"""The attribute of a compiled module that is the module itself."""
WRAPPERS: Final = (COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Those of `torch.compile`, of activation checkpointing and of FSDP. DDP's is `module`, as people call modules of their own: code that
drops it has to know that it is DDP's."""


def plain_name(name: str) -> str:
    """The name of a parameter or buffer in the model without any of `WRAPPERS`."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_extra_state(name: str) -> bool:
    """Whether it is what a module makes of something else when it is asked for its state (`Module.get_extra_state`): of any size, or
    no tensor."""
    return name.rpartition(".")[2] == "_extra_state"
