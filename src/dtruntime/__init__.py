"""The runtime's names as existing scripts import them. Everything lives in `strata`."""

from __future__ import annotations

from strata.checkpoint import CheckpointInfo, CheckpointManager, SaveHandle
from strata.data.shards.manager import Shard, ShardInfo
from strata.data.shards.registry import DatasetRegistry
from strata.worker.orchestrator import TrainingOrchestrator
from strata.worker.values import BarrierResult, CheckpointRecord, ShardAssignment, WorkerConfig

__all__ = [
    "BarrierResult",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointRecord",
    "DatasetRegistry",
    "SaveHandle",
    "Shard",
    "ShardAssignment",
    "ShardInfo",
    "TrainingOrchestrator",
    "WorkerConfig",
]
