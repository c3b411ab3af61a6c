"""The trainer's configuration. Everything lives in `strata.trainer.config`."""

from __future__ import annotations

from strata.trainer.config import (
    DataConfig,
    ElasticSection,
    ModelConfig,
    SavingConfig,
    ScalingSection,
    TrainConfig,
    TrainingConfig,
    coordinator_address,
    read_train_config,
)

__all__ = [
    "DataConfig",
    "ElasticSection",
    "ModelConfig",
    "SavingConfig",
    "ScalingSection",
    "TrainConfig",
    "TrainingConfig",
    "coordinator_address",
    "read_train_config",
]
