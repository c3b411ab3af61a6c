"""Snapshots in shared memory: bounded, and there for the job's next process where this one crashes."""

from __future__ import annotations

import os
import uuid
import weakref

from elastic_harness.checkpoint.common import Closing, Pending, budget_bytes, check_settings, close_engines
from elastic_harness.checkpoint.state import CheckpointState, checked_state
from strata.checkpoint.errors import CheckpointNotFound
from strata.checkpoint.events import MEMORY, CheckpointInfo
from strata.checkpoint.manager import CheckpointManager as Engine
from strata.checkpoint.manager import Memory
from strata.checkpoint.pipeline import Policy
from strata.trainer.error_translation import loading, saving
from strata.trainer.errors import MemoryLimitExceeded

__all__ = ["MemoryLimitExceeded", "MemorySnapshotBackend"]


class MemorySnapshotBackend(Closing):
    def __init__(
        self, max_snapshots: int = 2, max_memory_mb: float | None = None, *, job: str | None = None
    ) -> None:
        """`job` names the snapshots, so that the next process finds them; without one they end with this process."""
        check_settings(section=None, max_snapshots=max_snapshots, max_memory_mb=max_memory_mb)
        memory = Memory(
            job=job or f"{os.getpid()}-{uuid.uuid4().hex}",
            images=max_snapshots,
            budget_bytes=budget_bytes(max_memory_mb),
        )
        self.max_snapshots = max_snapshots
        self.max_memory_mb = max_memory_mb
        self._pending = Pending()
        self._engine = Engine([], memory=memory, policy=Policy(on_error="warn"))
        self._end = weakref.finalize(self, close_engines, {MEMORY: self._engine})

    @classmethod
    def over(cls, engine: Engine, pending: Pending, *, max_memory_mb: float | None) -> MemorySnapshotBackend:
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
            handle = self._engine.save(state.to_dict(), state.step, state.epoch, tiers=[MEMORY])
            self._pending.add(handle.future)
            handle.result()

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

    def get_stats(self) -> dict[str, float | None]:
        found = self._snapshots()
        used_bytes = sum(info.size_bytes for info in found)
        return {
            "num_snapshots": len(found),
            "memory_bytes": used_bytes,
            "memory_mb": used_bytes / (1 << 20),
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
