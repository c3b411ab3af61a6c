"""Checkpoints: one image, the same bytes in memory, on disk and in object storage.

    manager.py     save and load, from a training loop
    pipeline.py    moving images through the tiers in the background
    restore.py     the best one there is, verified, with reasons
    writer.py      a checkpoint written piece by piece
    verify.py      reading everything again, and naming what is damaged
    export.py      copies in other formats
    dcp.py         sharded state, through PyTorch's distributed checkpoints
    image/         a state as a valid `.pt` file: laid out once, read safely, loaded in place
    copying/       into an image at memory speed, on the CPU and beside CUDA; images kept in shared memory
    catalog/       manifests, the run they belong to, lineage, publishing, retention
    sharded/       what `dcp.py` stands on: one part per rank, one manifest

Names load on first use; only states need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.lazy_names import lazy_names

_HOMES = {
    "AsyncCheckpointWriter": ".writer",
    "Author": ".manager",
    "CheckpointInfo": ".events",
    "CheckpointManager": ".manager",
    "Manifest": ".catalog.manifest",
    "Memory": ".manager",
    "Observer": ".events",
    "Policy": ".pipeline",
    "Restored": ".restore",
    "SaveHandle": ".events",
    "Started": ".events",
    "CheckpointError": ".errors",
    "CheckpointNotFound": ".errors",
    "Damaged": ".errors",
    "InvalidSave": ".errors",
    "LoadFailed": ".errors",
    "ManagerClosed": ".errors",
    "MemoryLimitExceeded": ".errors",
    "SaveFailed": ".errors",
    "SaveSkipped": ".errors",
    "StateMismatch": ".errors",
    "UnsupportedState": ".errors",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)

if TYPE_CHECKING:
    from strata.checkpoint.catalog.manifest import Manifest as Manifest
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
    from strata.checkpoint.pipeline import Policy as Policy
    from strata.checkpoint.restore import Restored as Restored
    from strata.checkpoint.writer import AsyncCheckpointWriter as AsyncCheckpointWriter
