"""What can go wrong in elastic training, each with the next steps to try. Everything lives in `strata.trainer.errors`."""

from __future__ import annotations

from strata.trainer.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    ConfigurationError,
    DataLoadingError,
    DistributedSetupError,
    ElasticTrainingError,
    MemoryLimitExceeded,
    TopologyChangeError,
)

__all__ = [
    "CheckpointError",
    "CheckpointLoadError",
    "CheckpointSaveError",
    "CheckpointValidationError",
    "ConfigurationError",
    "DataLoadingError",
    "DistributedSetupError",
    "ElasticTrainingError",
    "MemoryLimitExceeded",
    "TopologyChangeError",
]
