"""MosaicML Streaming without torchvision, which the package imports for its image datasets alone and whose compiled part fits
one version of torch only. Knows nothing of Strata."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any


def without_images() -> None:
    """Have names in place of torchvision's, so that the rest can be imported."""
    named: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, attributes in named.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(attributes)
        sys.modules[name] = module


def import_streaming() -> Any:
    """The package; not the module of that name beside this one."""
    without_images()
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).parent]
    return importlib.import_module("streaming")
