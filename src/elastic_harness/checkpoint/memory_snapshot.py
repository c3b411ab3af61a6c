"""Snapshots in shared memory: as fast as copying, and still there for the next process after a crash.

The last `max_snapshots` are kept. With a limit, older ones make room for a new one; one that would not fit by itself
is refused, and what was there stays.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from elastic_harness.checkpoint.closing import Closing, close_engine
from elastic_harness.checkpoint.config import InvalidCheckpointConfig
from elastic_harness.checkpoint.pending import Pending
from elastic_harness.checkpoint.state import CheckpointState, checked_state
from strata.checkpoint.errors import CheckpointNotFound
from strata.checkpoint.events import CheckpointInfo, SaveHandle
from strata.checkpoint.manager import CheckpointManager, Memory
from strata.trainer.error_translation import loading, saving
from strata.trainer.errors import MemoryLimitExceeded

__all__ = ["MemoryLimitExceeded", "MemorySnapshotBackend"]

MEMORY = "MEMORY"
_MB = 1 << 20
_STATE_BYTES = "state_bytes"


class MemorySnapshotBackend(Closing):
    def __init__(
        self, max_snapshots: int = 2, max_memory_mb: float | None = None, *, job: str | None = None
    ) -> None:
        """`job` names the snapshots, so that the next process finds them; without one they end with this process."""
        if max_snapshots < 1:
            raise InvalidCheckpointConfig(f"max_snapshots ({max_snapshots}) must be positive", section=None)
        if max_memory_mb is not None and not max_memory_mb > 0:
            raise InvalidCheckpointConfig(f"max_memory_mb ({max_memory_mb}) must be positive", section=None)
        memory = Memory(job=job or f"{os.getpid()}-{uuid.uuid4().hex}", images=max_snapshots)
        self.max_snapshots = max_snapshots
        self.max_memory_mb = max_memory_mb
        self._pending = Pending()
        self._engine = CheckpointManager([], memory=memory)
        self._end = weakref.finalize(self, close_engine, self._engine)

    @classmethod
    def over(
        cls, engine: CheckpointManager, pending: Pending, *, max_memory_mb: float | None
    ) -> MemorySnapshotBackend:
        """The memory tier of an engine that somebody else closes."""
        backend = cls.__new__(cls)
        backend.max_snapshots = 2
        backend.max_memory_mb = max_memory_mb
        backend._pending = pending
        backend._engine = engine
        backend._end = lambda: None
        return backend

    def save(self, state: CheckpointState) -> None:
        """Keep a copy of the state. Raises `MemoryLimitExceeded` where it cannot fit."""
        with saving(tier=MEMORY, path="shared memory"):
            self.begin(state).result()

    def begin(self, state: CheckpointState) -> SaveHandle:
        """The same, without waiting for its digest."""
        return self.begin_in([MEMORY], state)

    def begin_in(self, tiers: Sequence[str], state: CheckpointState) -> SaveHandle:
        """Save to these tiers; the image in memory, which every save goes through, stays as a snapshot."""
        state_bytes = tensor_bytes(state.to_dict())
        self._make_room(state_bytes)
        handle = self._engine.save(
            state.to_dict(), state.step, state.epoch, metadata={_STATE_BYTES: state_bytes}, tiers=tiers
        )
        self._pending.add(handle.future)
        return handle

    def _make_room(self, state_bytes: int) -> None:
        """Let older snapshots go until one of this size fits. Raises, and drops nothing, where it never will."""
        if self.max_memory_mb is None:
            return
        limit_bytes = int(self.max_memory_mb * _MB)
        if state_bytes > limit_bytes:
            raise MemoryLimitExceeded.for_snapshot(
                required_mb=state_bytes / _MB, available_mb=limit_bytes / _MB
            )
        kept = self._snapshots()[: self.max_snapshots - 1]
        while kept and sum(map(_size_bytes, kept)) + state_bytes > limit_bytes:
            kept.pop()
        keep = {info.checkpoint_id for info in kept}
        self._engine.drop_snapshots(
            [info.checkpoint_id for info in self._snapshots() if info.checkpoint_id not in keep]
        )

    def load(self, step: int | None = None) -> CheckpointState | None:
        """The newest snapshot, or that of a step; None where there is none."""
        self._settle()
        with loading(path="shared memory"):
            try:
                loaded = self._engine.load(step, tiers=[MEMORY])
            except CheckpointNotFound:
                return None
            return checked_state(loaded, path="shared memory")

    def load_by_step(self, step: int) -> CheckpointState | None:
        return self.load(step)

    def clear(self) -> None:
        """Give up all snapshots, and their memory."""
        self._settle()
        self._engine.drop_snapshots()

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots())

    @property
    def latest_step(self) -> int | None:
        newest = next(iter(self._snapshots()), None)
        return newest.step if newest else None

    @property
    def latest_timestamp(self) -> float | None:
        newest = next(iter(self._snapshots()), None)
        return newest.created_at if newest else None

    def memory_usage_bytes(self) -> int:
        return sum(info.size_bytes for info in self._snapshots())

    def get_stats(self) -> dict[str, Any]:
        found = self._snapshots()
        used_bytes = sum(info.size_bytes for info in found)
        return {
            "num_snapshots": len(found),
            "memory_bytes": used_bytes,
            "memory_mb": used_bytes / _MB,
            "oldest_step": found[-1].step if found else None,
            "latest_step": found[0].step if found else None,
            "oldest_timestamp": found[-1].created_at if found else None,
            "latest_timestamp": found[0].created_at if found else None,
        }

    def _snapshots(self) -> list[CheckpointInfo]:
        self._settle()
        return self._engine.snapshots()

    def _settle(self) -> None:
        """Saves under way count as made."""
        self._pending.settle()


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a state, tied ones once."""
    seen: set[int] = set()

    def count(node: Any) -> int:
        if isinstance(node, torch.Tensor):
            if id(node) in seen:
                return 0
            seen.add(id(node))
            return node.numel() * node.element_size()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
        return sum(map(count, inner))

    return count(value)


def _size_bytes(info: CheckpointInfo) -> int:
    size_bytes = info.metadata.get(_STATE_BYTES)
    return size_bytes if isinstance(size_bytes, int) else info.size_bytes
