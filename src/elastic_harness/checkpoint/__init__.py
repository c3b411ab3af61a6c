"""Checkpoints of the harness: memory, disk and S3 behind one manager.

checkpointing.py      CheckpointManager
state.py              CheckpointState, and from and to a model
memory_snapshot.py    snapshots in shared memory
storage_backends.py   files on disk and in S3
"""

from __future__ import annotations

from elastic_harness.checkpoint.checkpointing import CheckpointManager
from elastic_harness.checkpoint.config import AsyncSavePolicy, CheckpointConfig, CheckpointTier
from elastic_harness.checkpoint.memory_snapshot import MemorySnapshotBackend
from elastic_harness.checkpoint.state import (
    CheckpointState,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
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
