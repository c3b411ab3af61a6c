"""Checkpoints as the harness's users know them, over `strata.checkpoint`.

    manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/checkpoints", s3_bucket="bucket"))
    state = manager.load_checkpoint()
    ...
    if manager.should_checkpoint(step, CheckpointTier.NVME):
        manager.save_checkpoint(create_checkpoint_state(step, model, optimizer), CheckpointTier.NVME)

What is restored, in which order, what counts as intact, publishing and retention are `strata.checkpoint`'s; what is here is
names and texts. A save returns when the state has been copied, and continues in the background; a failed one follows the
policy. A load walks memory, disk and S3, and falls back to the next tier and then to the checkpoint before, saying why in
the log. Files are `checkpoint_step_00000500.pt`, beside each its manifest; files of plain `torch.save` load too, and no code
in one runs unless its source is trusted. The methods here see saves under way as done.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final

from elastic_harness.checkpoint.common import (
    Closing,
    InvalidCheckpointConfig,
    Pending,
    budget_bytes,
    check_settings,
    close_engines,
)
from elastic_harness.checkpoint.memory_snapshot import MemorySnapshotBackend
from elastic_harness.checkpoint.state import (
    CheckpointState,
    checked_state,
    create_checkpoint_state,
    load_checkpoint_to_model,
)
from elastic_harness.checkpoint.storage_backends import (
    CheckpointLoadConfig,
    NVMeBackend,
    S3Backend,
    StorageBackend,
    file_name,
)
from strata.checkpoint.catalog.naming import step_of, step_stem
from strata.checkpoint.errors import CheckpointNotFound, LoadFailed, SaveFailed
from strata.checkpoint.events import SaveHandle
from strata.checkpoint.manager import Author, Memory
from strata.checkpoint.manager import CheckpointManager as Engine
from strata.checkpoint.pipeline import Policy
from strata.errors import StrataError
from strata.stores.deferred import open_deferred
from strata.stores.protocol import Store
from strata.trainer.error_translation import load_error, loading, save_error
from strata.trainer.errors import CheckpointError, CheckpointLoadError, CheckpointSaveError

log = logging.getLogger("elastic_harness.checkpoint")

__all__ = [
    "AsyncSavePolicy",
    "CheckpointConfig",
    "CheckpointManager",
    "CheckpointSaveError",
    "CheckpointState",
    "CheckpointTier",
    "create_checkpoint_state",
    "load_checkpoint_to_model",
]


class CheckpointTier(Enum):
    """Where a checkpoint is kept, from fast to durable."""

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
    """A warning in the log; training continues."""
    FAIL = "fail"
    """`CheckpointSaveError` from the next save, or from waiting."""
    RETRY = "retry"
    """Retried, then as WARN."""


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
    """Saves continue in the background once the state has been copied. False waits until each is durable."""
    keep_last_n: int = 3
    async_save_policy: str = AsyncSavePolicy.WARN
    async_save_retries: int = 3
    async_save_retry_delay: float = 5.0
    """Seconds."""
    max_memory_mb: float | None = None
    """Memory limit for all snapshots together; by default the size of the machine's shared memory."""

    def __post_init__(self) -> None:
        checked = (
            "checkpoint_interval",
            "memory_snapshot_interval",
            "keep_last_n",
            "async_save_policy",
            "async_save_retries",
            "async_save_retry_delay",
            "max_memory_mb",
        )
        check_settings(**{name: getattr(self, name) for name in checked})
        if not self.nvme_path and not self.s3_bucket:
            raise InvalidCheckpointConfig("nvme_path or s3_bucket must be set")


class CheckpointManager(Closing):
    def __init__(self, config: CheckpointConfig, *, job: str | None = None) -> None:
        """`job` names the snapshots in memory; by default they belong to the checkpoint destinations."""
        self.config = config
        self._pending = Pending()
        self.nvme_backend: NVMeBackend | None = None
        self.s3_backend: S3Backend | None = None
        self._backends: dict[CheckpointTier, StorageBackend] = {}
        if config.nvme_path:
            self.nvme_backend = NVMeBackend(config.nvme_path, pending=self._pending)
            self._backends[CheckpointTier.NVME] = self.nvme_backend
        if config.s3_bucket:
            self.s3_backend = S3Backend(config.s3_bucket, config.s3_prefix, pending=self._pending)
            self._backends[CheckpointTier.S3] = self.s3_backend
        self._starting = threading.Lock()
        self._engine = Engine(
            [self._open(backend) for backend in self._backends.values()],
            config.keep_last_n,
            memory=Memory(job=job, budget_bytes=budget_bytes(config.max_memory_mb)),
            policy=Policy(
                # What becomes of a failure is decided here; the engine only needs to know whether to retry.
                on_error="retry" if config.async_save_policy == AsyncSavePolicy.RETRY else "warn",
                retries=config.async_save_retries,
                retry_delay_s=config.async_save_retry_delay,
            ),
            stem=step_stem,
            adopt=step_of,
        )
        self.memory_backend = MemorySnapshotBackend.over(
            self._engine, self._pending, max_memory_mb=config.max_memory_mb
        )
        self._end = weakref.finalize(self, close_engines, {"": self._engine})

    # Saving

    def save_checkpoint(
        self, state: CheckpointState, tier: CheckpointTier | str = CheckpointTier.NVME
    ) -> str | None:
        """Save to one tier; where it will be, None for memory. With the policy `fail`, an earlier failure is raised."""
        tier = _tier(tier)
        if not self._is_configured(tier):
            setting = "s3_bucket" if tier == CheckpointTier.S3 else "nvme_path"
            raise InvalidCheckpointConfig(f"{setting} is not set, so nothing can be saved to {tier.name}")
        self._raise_failures()
        try:
            handle = self._start(state, tier)
        except (StrataError, OSError) as error:
            backend = self._backends.get(tier)
            path = "shared memory" if backend is None else f"{backend.url}/{file_name(state.step)}"
            self._failed(save_error(error, tier=tier.name, path=path))
            return None
        if not self.config.async_save:
            self._pending.settle()
        if not self.config.async_save or (tier == CheckpointTier.MEMORY and handle.done()):
            self._raise_failures()  # What memory refuses is known at once.
        return handle.path if tier != CheckpointTier.MEMORY else None

    def _start(self, state: CheckpointState, tier: CheckpointTier) -> SaveHandle:
        with self._starting:
            self._engine.author = Author(world_size=state.world_size)
            while True:
                try:
                    handle = self._engine.save(state.to_dict(), state.step, state.epoch, tiers=[tier.name])
                except SaveFailed:
                    continue  # An earlier one, which its own handle has reported already.
                self._pending.add(handle.future)
                return handle

    def should_checkpoint(self, step: int, tier: CheckpointTier | str) -> bool:
        """Whether a checkpoint is due after this step; never before the first."""
        tier = _tier(tier)
        if step <= 0 or not self._is_configured(tier):
            return False
        memory = tier == CheckpointTier.MEMORY
        interval = self.config.memory_snapshot_interval if memory else self.config.checkpoint_interval
        return interval > 0 and step % interval == 0

    def wait_for_pending_saves(self, timeout: float | None = None) -> bool:
        """Wait for the saves under way; whether all have ended well, in time. With the policy `fail`, one that has
        failed raises `CheckpointSaveError`."""
        is_done = self._pending.settle(timeout)
        return self._raise_failures() and is_done

    def clear_memory_snapshots(self) -> None:
        """Free the memory that snapshots take."""
        self.memory_backend.clear()

    # Loading

    def load_checkpoint(
        self,
        path: str | os.PathLike[str] | None = None,
        tier: CheckpointTier | str | None = None,
        config: CheckpointLoadConfig | None = None,
    ) -> CheckpointState | None:
        """The newest intact checkpoint, None where there is none; or the one at `path`. `tier` says where to begin: NVME
        skips memory. Raises `CheckpointLoadError` where there are checkpoints, but none that can be loaded."""
        tier = None if tier is None else _tier(tier)
        self._pending.settle()
        config = config or CheckpointLoadConfig()
        if path is not None:
            return self._load_named(os.fspath(path), tier, config)
        first = 0 if tier is None else TIERS.index(tier)
        try:
            restored = self._engine.restore(
                tiers=[each.name for each in TIERS[first:]],
                trusted_source=config.trusted_source,
                warn=config.warn_on_unsafe,
                accept=partial(_accepted, validate_structure=config.validate_structure),
                nearest_of_step=True,
            )
        except LoadFailed as error:
            if isinstance(error, CheckpointNotFound) and not error.reasons:
                return None
            raise CheckpointLoadError(
                f"No checkpoint could be loaded. Tried: {'; '.join(error.reasons)}"
            ) from error
        log.info("loaded step %d in %s", restored.info.step, restored.tier)
        state: CheckpointState = restored.state
        return state

    # The parts of it

    def close(self) -> None:
        super().close()
        for backend in self._backends.values():
            backend.close()

    @staticmethod
    def _open(backend: StorageBackend) -> Store:
        """What cannot be opened, for want of credentials say, fails when it is used, and then by the policy."""
        return open_deferred(lambda: backend.store, url=backend.url)

    def _is_configured(self, tier: CheckpointTier) -> bool:
        return tier == CheckpointTier.MEMORY or tier in self._backends

    def _failed(self, error: CheckpointError) -> None:
        """A save has failed: what the policy says."""
        if self.config.async_save_policy == AsyncSavePolicy.FAIL or not self.config.async_save:
            raise error
        log.warning("%s. Training continues without this checkpoint.", error.message.rstrip("."))

    def _raise_failures(self) -> bool:
        """Whether every save that has ended since the last time has ended well."""
        failures = self._pending.take_failures()
        for failure in failures:
            self._failed(save_error(failure, tier="", path=""))
        return not failures

    def _load_named(
        self, path: str, tier: CheckpointTier | None, config: CheckpointLoadConfig
    ) -> CheckpointState:
        for place, backend in self._backends.items():
            if tier not in (None, place) or not backend.could_mean(path) or not backend.exists(path):
                continue
            key = backend.key_of(path)
            if key is None:
                return backend.load(path, config)
            with loading(path=path):
                restored = self._engine.restore(
                    name=key,
                    tiers=[place.name],
                    trusted_source=config.trusted_source,
                    warn=config.warn_on_unsafe,
                )
            return checked_state(restored.state, path=path, validate_structure=config.validate_structure)
        raise load_error(CheckpointNotFound("there is no such checkpoint"), path=path)


def _tier(tier: CheckpointTier | str) -> CheckpointTier:
    """Also by its name, in any case."""
    try:
        return CheckpointTier(tier.lower() if isinstance(tier, str) else tier)
    except ValueError:
        names = [each.value for each in TIERS]
        raise InvalidCheckpointConfig(f"Unknown tier {tier!r}. Valid options: {names}") from None


def _accepted(loaded: Any, path: str, *, validate_structure: bool) -> CheckpointState:
    """What is no checkpoint of ours is passed over like one that is damaged."""
    try:
        return checked_state(loaded, path=path, validate_structure=validate_structure)
    except CheckpointError as error:
        raise LoadFailed(error.message) from error
