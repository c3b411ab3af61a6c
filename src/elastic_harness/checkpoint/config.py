"""What the user chooses: tiers, how often, what to keep, and what a failed save means. Everything lives beside it."""

from __future__ import annotations

from elastic_harness.checkpoint.checkpointing import TIERS, AsyncSavePolicy, CheckpointConfig, CheckpointTier
from elastic_harness.checkpoint.common import InvalidCheckpointConfig

__all__ = ["TIERS", "AsyncSavePolicy", "CheckpointConfig", "CheckpointTier", "InvalidCheckpointConfig"]
