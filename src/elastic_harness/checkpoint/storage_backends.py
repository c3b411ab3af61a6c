"""Checkpoints as files on a disk or in a bucket. Everything lives in `adapter`."""

from __future__ import annotations

from elastic_harness.checkpoint.adapter import (
    CheckpointLoadConfig,
    NVMeBackend,
    S3Backend,
    S3Config,
    StorageBackend,
)

__all__ = [
    "CheckpointLoadConfig",
    "NVMeBackend",
    "S3Backend",
    "S3Config",
    "StorageBackend",
]
