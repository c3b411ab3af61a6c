"""`CheckpointManager`: one state, three tiers, over the engine of `strata.checkpoint`.

    manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/checkpoints", s3_bucket="bucket"))
    state = manager.load_checkpoint()
    ...
    if manager.should_checkpoint(step, CheckpointTier.NVME):
        manager.save_checkpoint(create_checkpoint_state(step, model, optimizer), CheckpointTier.NVME)

A save returns when the state has been copied, and goes on in the background; a failed one follows the policy. A load
walks memory, disk and S3, verifies, and falls to the next tier and then to the checkpoint before, saying why in the
log. Files are `checkpoint_step_00000500.pt`, beside each its manifest. The methods here see saves under way as made.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any

from elastic_harness.checkpoint.candidates import Candidate, files_in, in_order
from elastic_harness.checkpoint.closing import Closing, close_engine
from elastic_harness.checkpoint.config import (
    TIERS,
    AsyncSavePolicy,
    CheckpointConfig,
    CheckpointTier,
    InvalidCheckpointConfig,
)
from elastic_harness.checkpoint.memory_snapshot import MemorySnapshotBackend
from elastic_harness.checkpoint.pending import Pending
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
    read,
)
from elastic_harness.checkpoint.stores import StepNames, opened
from strata.checkpoint.catalog.listing import where
from strata.checkpoint.errors import CheckpointNotFound, SaveFailed
from strata.checkpoint.events import SaveHandle
from strata.checkpoint.manager import Author, Memory
from strata.checkpoint.manager import CheckpointManager as Engine
from strata.checkpoint.pipeline import Policy
from strata.errors import StrataError
from strata.stores.protocol import Store
from strata.trainer.error_translation import load_error, loading, save_error
from strata.trainer.errors import CheckpointError, CheckpointLoadError, CheckpointSaveError

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

log = logging.getLogger("elastic_harness.checkpoint")


class CheckpointManager(Closing):
    def __init__(self, config: CheckpointConfig, *, job: str | None = None) -> None:
        """`job` names the snapshots in memory; by default they belong to the places that checkpoints go to."""
        self.config = config
        self._pending = Pending()
        self.nvme_backend: NVMeBackend | None = None
        self.s3_backend: S3Backend | None = None
        self._stores: dict[CheckpointTier, Store] = {}
        if config.nvme_path:
            self.nvme_backend = NVMeBackend(config.nvme_path, pending=self._pending)
            self._stores[CheckpointTier.NVME] = opened(self.nvme_backend)
        if config.s3_bucket:
            self.s3_backend = S3Backend(config.s3_bucket, config.s3_prefix, pending=self._pending)
            self._stores[CheckpointTier.S3] = opened(self.s3_backend)
        self._names = StepNames()
        self._beginning = threading.Lock()
        self._engine = Engine(
            list(self._stores.values()),
            config.keep_last_n,
            memory=Memory(job=job),
            policy=Policy(
                # What becomes of a failure is decided here; the engine only needs to know whether to try again.
                on_error="retry" if config.async_save_policy == AsyncSavePolicy.RETRY else "warn",
                retries=config.async_save_retries,
                retry_delay_s=config.async_save_retry_delay,
            ),
            stem=self._names,
        )
        self.memory_backend = MemorySnapshotBackend.over(
            self._engine, self._pending, max_memory_mb=config.max_memory_mb
        )
        self._end = weakref.finalize(self, close_engine, self._engine)

    # Saving

    def save_checkpoint(
        self, state: CheckpointState, tier: CheckpointTier = CheckpointTier.NVME
    ) -> str | None:
        """Save to one tier; where it will be, None for memory. With the policy `fail`, an earlier failure is raised."""
        store = self._store(tier)
        self._raise_failures()
        path = "shared memory" if store is None else where(store, f"checkpoint_step_{state.step:08d}.pt")
        try:
            handle = self._begin(state, tier)
        except (StrataError, OSError) as error:
            self._failed(save_error(error, tier=tier.name, path=path))
            return None
        if not self.config.async_save:
            self._pending.settle()
            self._raise_failures()
        return where(store, self._names.key_of(handle.checkpoint_id)) if store is not None else None

    def _begin(self, state: CheckpointState, tier: CheckpointTier) -> SaveHandle:
        with self._beginning:
            self._engine.author = Author(world_size=state.world_size)
            self._names.store = self._stores.get(tier) if tier == CheckpointTier.NVME else None
            while True:
                try:
                    return self.memory_backend.begin_in([tier.name], state)
                except SaveFailed:
                    continue  # An earlier one, told once by the engine and known to us already.

    def should_checkpoint(self, step: int, tier: CheckpointTier) -> bool:
        """Whether a checkpoint is due after this step; never before the first."""
        if step <= 0 or (tier != CheckpointTier.MEMORY and tier not in self._stores):
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
        tier: CheckpointTier | None = None,
        config: CheckpointLoadConfig | None = None,
    ) -> CheckpointState | None:
        """The newest whole checkpoint, None where there is none; or the one at `path`. `tier` says where to begin: NVME
        skips memory. Raises `CheckpointLoadError` where there are checkpoints, but none that can be loaded."""
        self._pending.settle()
        config = config or CheckpointLoadConfig()
        if path is not None:
            return self._load_named(os.fspath(path), tier, config)
        tiers = TIERS if tier is None else TIERS[TIERS.index(tier) :]
        candidates, reasons = self._candidates(tiers)
        for candidate in candidates:
            try:
                state = self._load(candidate, config)
            except StrataError as error:
                reason = f"{candidate}: {getattr(error, 'message', error)}"
                reasons.append(reason)
                log.warning("did not load %s", reason)
                continue
            log.info("loaded %s", candidate)
            return state
        if reasons:
            raise CheckpointLoadError(f"No checkpoint could be loaded. Tried: {'; '.join(reasons)}")
        return None

    # The parts of it

    def close(self) -> None:
        super().close()
        for backend in (self.nvme_backend, self.s3_backend):
            if backend is not None:
                backend.close()

    def _store(self, tier: CheckpointTier) -> Store | None:
        if tier == CheckpointTier.MEMORY:
            return None
        store = self._stores.get(tier)
        if store is None:
            setting = "s3_bucket" if tier == CheckpointTier.S3 else "nvme_path"
            raise InvalidCheckpointConfig(f"{setting} is not set, so nothing can be saved to {tier.name}")
        return store

    def _failed(self, error: CheckpointError) -> None:
        """A save has failed: what the policy says."""
        if self.config.async_save_policy == AsyncSavePolicy.FAIL or not self.config.async_save:
            raise error
        log.warning("%s Training goes on without this checkpoint.", error.message)

    def _raise_failures(self) -> bool:
        """Whether every save that has ended since the last time has ended well."""
        failures = self._pending.take_failures()
        for failure in failures:
            self._failed(save_error(failure, tier="", path=""))
        return not failures

    def _candidates(self, tiers: tuple[CheckpointTier, ...]) -> tuple[list[Candidate], list[str]]:
        files = [
            file for tier in tiers if tier in self._stores for file in files_in(self._stores[tier], tier)
        ]
        names = {tier.name for tier in tiers}
        infos = [info for info in self._engine.all_checkpoints() if names & set(info.tiers)]
        if infos or files:
            return in_order(infos, files, tiers), []
        try:
            self._engine.load(tiers=list(names))
        except CheckpointNotFound as nothing:
            return [], list(nothing.reasons)  # An empty place has none; one that cannot be read is not empty.
        return [], []

    def _load(self, candidate: Candidate, config: CheckpointLoadConfig) -> CheckpointState:
        if candidate.key:
            store = self._stores[candidate.tier]
            path = where(store, candidate.key)
            loaded: Any = read(
                store,
                candidate.key,
                trusted_source=config.trusted_source,
                warn=config.warn_on_unsafe,
                is_named=False,
            )
        else:
            restored = self._engine.restore(
                checkpoint_id=candidate.checkpoint_id,
                tiers=[candidate.tier.name],
                trusted_source=config.trusted_source,
            )
            path, loaded = restored.info.path, restored.state
        return checked_state(loaded, path=path, validate_structure=config.validate_structure)

    def _load_named(
        self, path: str, tier: CheckpointTier | None, config: CheckpointLoadConfig
    ) -> CheckpointState:
        backends: dict[CheckpointTier, StorageBackend] = {}
        if self.nvme_backend and tier in (None, CheckpointTier.NVME) and "://" not in path:
            backends[CheckpointTier.NVME] = self.nvme_backend
        if self.s3_backend and tier in (None, CheckpointTier.S3) and not os.path.isabs(path):
            backends[CheckpointTier.S3] = self.s3_backend
        for place, backend in backends.items():
            if not backend.exists(path):
                continue
            known = backend.manifest_of(path)
            if known is None or not backend.has(path):
                return backend.load(path, config)
            with loading(path=path):
                wanted = Candidate(step=known.step, tier=place, checkpoint_id=known.checkpoint_id)
                return self._load(wanted, config)
        raise load_error(CheckpointNotFound("there is no such checkpoint"), path=path)
