"""`CheckpointManager` and what it takes. Everything lives in `adapter`."""

from __future__ import annotations

from elastic_harness.checkpoint.adapter import (
    AsyncSavePolicy,
    CheckpointConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from strata.trainer.errors import CheckpointSaveError

__all__ = [
    "AsyncSavePolicy",
    "CheckpointConfig",
    "CheckpointManager",
    "CheckpointSaveError",
    "CheckpointState",
    "CheckpointTier",
    "create_checkpoint_state",
    "load_checkpoint_to_model",
]
