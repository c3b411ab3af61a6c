"""Snapshots in shared memory. Everything lives in `adapter`."""

from __future__ import annotations

from elastic_harness.checkpoint.adapter import MemorySnapshotBackend
from strata.trainer.errors import MemoryLimitExceeded

__all__ = ["MemoryLimitExceeded", "MemorySnapshotBackend"]
