"""Names of a package that load on first use, so that no process loads what only others need.

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`homes` says which module a name is in: one of the package where it begins with a dot. A module itself is its own home."""

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = importlib.import_module(home, package)
        value = module if home == f".{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return load, names
