"""Where a training process stands among the others, and how it joins and leaves them. Everything lives in `strata.trainer.distributed`."""

from __future__ import annotations

from strata.trainer.distributed import (
    DEFAULT_TIMEOUT_S,
    REQUIRED_ENVIRONMENT,
    Backend,
    ElasticTrainingConfig,
    WorldInfo,
    barrier,
    broadcast_object,
    cleanup_distributed,
    ensure_enough_nodes,
    get_rank,
    get_world_info,
    get_world_size,
    is_main_process,
    setup_distributed_environment,
)

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "REQUIRED_ENVIRONMENT",
    "Backend",
    "ElasticTrainingConfig",
    "WorldInfo",
    "barrier",
    "broadcast_object",
    "cleanup_distributed",
    "ensure_enough_nodes",
    "get_rank",
    "get_world_info",
    "get_world_size",
    "is_main_process",
    "setup_distributed_environment",
]
