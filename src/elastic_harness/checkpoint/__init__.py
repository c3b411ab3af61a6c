"""Checkpoints of the harness: memory, disk and S3 behind one manager. What it does is
`strata.checkpoint`'s; what is here is the names and texts its users know."""

from __future__ import annotations

from elastic_harness.checkpoint.checkpointing import (
    AsyncSavePolicy,
    CheckpointConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from elastic_harness.checkpoint.memory_snapshot import MemorySnapshotBackend
from elastic_harness.checkpoint.storage_backends import (
    CheckpointLoadConfig,
    NVMeBackend,
    S3Backend,
    S3Config,
    StorageBackend,
)

__all__ = [
    "AsyncSavePolicy",
    "CheckpointConfig",
    "CheckpointLoadConfig",
    "CheckpointManager",
    "CheckpointState",
    "CheckpointTier",
    "MemorySnapshotBackend",
    "NVMeBackend",
    "S3Backend",
    "S3Config",
    "StorageBackend",
    "create_checkpoint_state",
    "load_checkpoint_to_model",
]
