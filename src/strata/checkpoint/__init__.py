"""Checkpoints: one image, the same bytes in memory, on disk and in object storage.

    manager.py     save and load, from a training loop
    image.py       a state as a valid `.pt` file, laid out once, filled at memory speed
    staging.py     images in shared memory, reused, found again after a crash
    pipeline.py    moving them through the tiers in the background
    publish.py     payload, then manifest: there entirely or not at all
    manifest.py    what makes a checkpoint exist
    restore.py     the best one there is, verified, with reasons
    retention.py   which may go

Names load on first use; only states need torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AsyncCheckpointWriter": "writer",
    "Author": "manager",
    "CheckpointInfo": "events",
    "CheckpointManager": "manager",
    "Manifest": "manifest",
    "Memory": "manager",
    "Observer": "events",
    "Policy": "pipeline",
    "Restored": "restore",
    "SaveHandle": "events",
    "Started": "events",
    "CheckpointError": "errors",
    "CheckpointNotFound": "errors",
    "Damaged": "errors",
    "InvalidSave": "errors",
    "LoadFailed": "errors",
    "ManagerClosed": "errors",
    "MemoryLimitExceeded": "errors",
    "SaveFailed": "errors",
    "SaveSkipped": "errors",
    "StateMismatch": "errors",
    "UnsupportedState": "errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strata.checkpoint' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"strata.checkpoint.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
