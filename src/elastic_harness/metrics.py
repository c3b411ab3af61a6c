"""What one training run has cost and achieved. Everything lives in `strata.trainer.metrics`."""

from __future__ import annotations

from strata.trainer.metrics import (
    RECENT,
    CheckpointMetrics,
    GradientMetrics,
    LRMetrics,
    RecoveryEvent,
    RecoveryMetrics,
    Series,
    TrainingMetrics,
)

__all__ = [
    "RECENT",
    "CheckpointMetrics",
    "GradientMetrics",
    "LRMetrics",
    "RecoveryEvent",
    "RecoveryMetrics",
    "Series",
    "TrainingMetrics",
]
