"""Checkpoints: one image, the same bytes in memory, on disk and in object storage.

    manager.py     save and load, from a training loop
    image.py       a state as a valid `.pt` file, laid out once, filled at memory speed
    staging.py     images in shared memory, reused, found again after a crash
    copying.py     a state into an image: beside the computation on CUDA, swept over by threads on the CPU
    filling.py     that sweep, which hashes what it writes; sweeping.py and stream.c do the copying
    device.py      what of this is CUDA's
    pipeline.py    moving them through the tiers in the background
    publish.py     payload, then manifest: there entirely or not at all
    manifest.py    what makes a checkpoint exist
    restore.py     the best one there is, verified, with reasons
    in_place.py    into live tensors, in one pass; into.py for those on a device
    retention.py   which may go
    dcp.py         sharded state, through PyTorch's distributed checkpoints
    verify.py      reading everything again, and naming what is damaged
    export.py      copies in other formats

Names load on first use; only states need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


if TYPE_CHECKING:
    from strata.checkpoint.errors import CheckpointError as CheckpointError
    from strata.checkpoint.errors import CheckpointNotFound as CheckpointNotFound
    from strata.checkpoint.errors import Damaged as Damaged
    from strata.checkpoint.errors import InvalidSave as InvalidSave
    from strata.checkpoint.errors import LoadFailed as LoadFailed
    from strata.checkpoint.errors import ManagerClosed as ManagerClosed
    from strata.checkpoint.errors import MemoryLimitExceeded as MemoryLimitExceeded
    from strata.checkpoint.errors import SaveFailed as SaveFailed
    from strata.checkpoint.errors import SaveSkipped as SaveSkipped
    from strata.checkpoint.errors import StateMismatch as StateMismatch
    from strata.checkpoint.errors import UnsupportedState as UnsupportedState
    from strata.checkpoint.events import CheckpointInfo as CheckpointInfo
    from strata.checkpoint.events import Observer as Observer
    from strata.checkpoint.events import SaveHandle as SaveHandle
    from strata.checkpoint.events import Started as Started
    from strata.checkpoint.manager import Author as Author
    from strata.checkpoint.manager import CheckpointManager as CheckpointManager
    from strata.checkpoint.manager import Memory as Memory
    from strata.checkpoint.manifest import Manifest as Manifest
    from strata.checkpoint.pipeline import Policy as Policy
    from strata.checkpoint.restore import Restored as Restored
    from strata.checkpoint.writer import AsyncCheckpointWriter as AsyncCheckpointWriter
