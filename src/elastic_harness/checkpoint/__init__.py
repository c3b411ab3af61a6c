"""Checkpoints of the harness: memory, disk and S3 behind one manager. Everything lives in `adapter`."""

from __future__ import annotations

from elastic_harness.checkpoint.adapter import (
    AsyncSavePolicy,
    CheckpointConfig,
    CheckpointLoadConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    MemorySnapshotBackend,
    NVMeBackend,
    S3Backend,
    S3Config,
    StorageBackend,
    create_checkpoint_state,
    load_checkpoint_to_model,
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
