"""What the user chooses: tiers, how often, what to keep, and what a failed save means."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from enum import Enum
from typing import Final

from strata.trainer.errors import ConfigurationError


class CheckpointTier(Enum):
    """Where a checkpoint is kept, from fast to lasting."""

    MEMORY = "memory"
    """Shared memory of this machine: outlives the process."""
    NVME = "nvme"
    """A local disk: outlives the machine's restart."""
    S3 = "s3"
    """Object storage: outlives the machine."""


TIERS: Final = (CheckpointTier.MEMORY, CheckpointTier.NVME, CheckpointTier.S3)


class AsyncSavePolicy:
    """What a failed save means for training."""

    WARN = "warn"
    """A warning in the log; training goes on."""
    FAIL = "fail"
    """`CheckpointSaveError` from the next save, or from waiting."""
    RETRY = "retry"
    """Tried again, then as WARN."""


class InvalidCheckpointConfig(ConfigurationError, ValueError):
    """A setting of `CheckpointConfig` that cannot be."""

    code = "checkpoint_config"

    def __init__(self, reason: str, *, section: str | None = "checkpoint") -> None:
        super().__init__(reason, section=section)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    checkpoint_interval: int = 500
    """Steps between checkpoints on disk and in S3."""
    memory_snapshot_interval: int = 50
    """Steps between snapshots in memory; 0 makes none."""
    nvme_path: str | os.PathLike[str] | None = "/tmp/checkpoints"
    s3_bucket: str | None = None
    s3_prefix: str = ""
    async_save: bool = True
    """Saves go on in the background once the state has been copied. False waits until each is durable."""
    keep_last_n: int = 3
    async_save_policy: str = AsyncSavePolicy.WARN
    async_save_retries: int = 3
    async_save_retry_delay: float = 5.0
    """Seconds."""
    max_memory_mb: float | None = None
    """The most that snapshots in memory may take together; by default what the machine's shared memory has."""

    def __post_init__(self) -> None:
        positive = {"checkpoint_interval": self.checkpoint_interval, "keep_last_n": self.keep_last_n}
        for name, value in positive.items():
            if not _is_whole(value) or value < 1:
                raise InvalidCheckpointConfig(f"{name} ({value}) must be positive")
        counts = {
            "memory_snapshot_interval": self.memory_snapshot_interval,
            "async_save_retries": self.async_save_retries,
        }
        for name, value in counts.items():
            if not _is_whole(value) or value < 0:
                raise InvalidCheckpointConfig(f"{name} ({value}) must not be negative")
        if not math.isfinite(self.async_save_retry_delay) or self.async_save_retry_delay < 0:
            raise InvalidCheckpointConfig(
                f"async_save_retry_delay ({self.async_save_retry_delay}) must not be negative"
            )
        policies = [AsyncSavePolicy.WARN, AsyncSavePolicy.FAIL, AsyncSavePolicy.RETRY]
        if self.async_save_policy not in policies:
            raise InvalidCheckpointConfig(
                f"Unknown async_save_policy '{self.async_save_policy}'. Valid options: {policies}"
            )
        if self.max_memory_mb is not None and not self.max_memory_mb > 0:
            raise InvalidCheckpointConfig(f"max_memory_mb ({self.max_memory_mb}) must be positive")
        if not self.nvme_path and not self.s3_bucket:
            raise InvalidCheckpointConfig("nvme_path or s3_bucket must say where checkpoints are kept")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
