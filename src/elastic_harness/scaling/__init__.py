"""Learning rate and gradient accumulation for a world that changes size. Everything lives in `strata.trainer.scaling`."""

from __future__ import annotations

from strata.trainer.scaling import (
    ROUNDING_MODES,
    STRATEGIES,
    ElasticScalingManager,
    GradAccumulationConfig,
    GradientAccumulationManager,
    HasParamGroups,
    LRScalingManager,
    RoundingMode,
    ScalingConfig,
    ScalingDecision,
    ScalingRule,
    Strategy,
    WarmupScheduler,
    accumulation_steps,
    cosine_factor,
    create_lr_scheduler_with_warmup,
    get_scaled_lr,
    scaled_lr,
    unknown_strategy,
)

__all__ = [
    "ROUNDING_MODES",
    "STRATEGIES",
    "ElasticScalingManager",
    "GradAccumulationConfig",
    "GradientAccumulationManager",
    "HasParamGroups",
    "LRScalingManager",
    "RoundingMode",
    "ScalingConfig",
    "ScalingDecision",
    "ScalingRule",
    "Strategy",
    "WarmupScheduler",
    "accumulation_steps",
    "cosine_factor",
    "create_lr_scheduler_with_warmup",
    "get_scaled_lr",
    "scaled_lr",
    "unknown_strategy",
]
