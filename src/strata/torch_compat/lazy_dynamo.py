"""The compiler, imported when it is used: every recovery starts processes, and this is half of what their start costs.

The first optimizer or DDP model a process makes imports PyTorch's compiler. That takes as long as `import torch` itself
(1.4 to 1.7 s of CPU time per worker), only to mark functions as not to be compiled, to break graphs that are not traced
and to read a setting. `install` answers these itself; code that wants more of the compiler gets it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from strata.torch_compat import require

require("lazy_dynamo")

NAME = "torch._dynamo"


class _LazyDynamo(ModuleType):
    """Stands for `torch._dynamo` until something is asked of it that only the real one can do."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
        self.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
        return fn

    @staticmethod
    def graph_break(*args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Asked for when a submodule is imported.
            raise AttributeError(name)
        return getattr(load(), name)


def install() -> None:
    """Let `torch._dynamo` be imported when it is needed, not when it is mentioned. Does nothing where it is loaded."""
    if NAME in sys.modules:
        return
    sys.modules[NAME] = torch._dynamo = _LazyDynamo()


def load() -> ModuleType:
    """The real `torch._dynamo`."""
    if isinstance(sys.modules.get(NAME), _LazyDynamo):
        del sys.modules[NAME]
        vars(torch).pop("_dynamo", None)
    return importlib.import_module(NAME)


def use_deterministic_algorithms() -> None:
    """As `torch.use_deterministic_algorithms(True, warn_only=True)`, which imports the compiler to configure it."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
