"""Elastic training for any loop: resume, save, follow the fleet, leave in good order."""

from __future__ import annotations

import importlib
from typing import Any

from strata.platform import require_linux

_HOMES = {
    "ElasticJob": "job",
    "ElasticOptions": "job",
    "Preempted": "job",
    "Recovery": "trace",
    "Tracer": "trace",
}

__all__ = sorted([*_HOMES, "elastic"])


def elastic(**arguments: Any) -> Any:
    """`with strata.elastic(model=…, optimizer=…, data=…, checkpoints=…, max_steps=…) as job:`; see `ElasticJob`."""
    require_linux()
    from strata.training.job import ElasticJob

    return ElasticJob(**arguments)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strata.training' has no attribute '{name}'")
    return getattr(importlib.import_module(f"strata.training.{home}"), name)
