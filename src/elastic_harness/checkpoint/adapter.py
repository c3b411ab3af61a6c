"""Checkpoints as the harness's users know them, over `strata.checkpoint`.

    manager = CheckpointManager(CheckpointConfig(nvme_path="/nvme/checkpoints", s3_bucket="bucket"))
    state = manager.load_checkpoint()
    ...
    if manager.should_checkpoint(step, CheckpointTier.NVME):
        manager.save_checkpoint(create_checkpoint_state(step, model, optimizer), CheckpointTier.NVME)

Copying, writing, verifying and loading are the engine's; what is here is names, texts, and the order of tiers. A save
returns when the state has been copied, and continues in the background; a failed one follows the policy. A load
walks memory, disk and S3, and falls back to the next tier and then to the checkpoint before, saying why in the log.
Files are `checkpoint_step_00000500.pt`, beside each its manifest; files of plain `torch.save` load too, and no code in
one runs unless its source is trusted. The methods here see saves under way as done.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch
from torch import distributed

from strata.checkpoint.catalog.listing import Catalog, where
from strata.checkpoint.catalog.manifest import IMAGE, CheckpointId, Manifest, Part
from strata.checkpoint.catalog.naming import manifest_key, new_id, step_stem
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.copying.staging import ImagePayload, Staging
from strata.checkpoint.errors import CheckpointNotFound, Damaged, LoadFailed, SaveFailed
from strata.checkpoint.events import MEMORY, CheckpointInfo, SaveHandle
from strata.checkpoint.image.layout import Plan, prepare
from strata.checkpoint.image.plain import SUFFIX, load_plain, plain_files
from strata.checkpoint.image.reading import fetched, open_image
from strata.checkpoint.manager import Author, Memory
from strata.checkpoint.manager import CheckpointManager as Engine
from strata.checkpoint.pipeline import Policy
from strata.errors import StrataError
from strata.stores import open_store
from strata.stores.protocol import Blob, BlobWriter, Buffer, Store, StoreError
from strata.trainer.error_translation import load_error, loading, save_error, saving
from strata.trainer.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointValidationError,
    ConfigurationError,
    MemoryLimitExceeded,
)
from strata.training import rng
from strata.training.state import unwrap

log = logging.getLogger("elastic_harness.checkpoint")

# Settings --------------------------------------------------------------------------------------------------------


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


# The state -------------------------------------------------------------------------------------------------------

REQUIRED_KEYS = frozenset({"step", "model_state_dict", "optimizer_state_dict"})


@dataclass
class CheckpointState:
    step: int = 0
    epoch: int = 0
    model_state_dict: dict[str, Any] = field(default_factory=dict)
    optimizer_state_dict: dict[str, Any] = field(default_factory=dict)
    lr_scheduler_state_dict: dict[str, Any] = field(default_factory=dict)
    dataset_state: dict[str, Any] = field(default_factory=dict)
    rng_states: dict[str, Any] = field(default_factory=dict)
    """Of every rank, by its number as text."""
    metrics: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    timestamp: float = field(default_factory=time.time)
    """Unix seconds."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the trainer keeps beside: the states of its scaling and metrics."""

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that is saved; tensors are shared, not copied."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CheckpointState:
        """The other way round. What is missing has its default; keys of no meaning here are left out."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known and value is not None})

    def cpu_copy(self) -> CheckpointState:
        """A copy that shares nothing with this one, its tensors on the CPU. Tied tensors stay tied."""
        copied = _cpu_copy(self.to_dict(), {})
        return CheckpointState(**copied)


def _cpu_copy(value: Any, seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        made: Any = value.detach().cpu().clone()
    elif isinstance(value, Mapping):
        made = {key: _cpu_copy(inner, seen) for key, inner in value.items()}
    elif type(value) in (list, tuple):
        made = type(value)(_cpu_copy(inner, seen) for inner in value)
    elif isinstance(value, bytearray):
        made = bytearray(value)
    else:
        return value
    seen[id(value)] = made
    return made


def checked_state(loaded: Any, *, path: str, validate_structure: bool = True) -> CheckpointState:
    """What was loaded, as a state. Raises `CheckpointLoadError` or `CheckpointValidationError` naming what is wrong."""
    if not isinstance(loaded, Mapping):
        raise CheckpointLoadError(f"it holds a {type(loaded).__name__}, not a dictionary", path=path)
    if validate_structure:
        missing = REQUIRED_KEYS - set(loaded)
        if missing:
            raise CheckpointLoadError.missing_keys(path, missing)
        for name in ("step", "epoch"):
            value = loaded.get(name, 0)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointValidationError(f"'{name}' must be a whole number, not {value!r}", path=path)
        for name in ("model_state_dict", "optimizer_state_dict"):
            if not isinstance(loaded[name], Mapping):
                kind = type(loaded[name]).__name__
                raise CheckpointValidationError(f"'{name}' must be a dictionary, not a {kind}", path=path)
    return CheckpointState.from_dict(loaded)


def create_checkpoint_state(
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any | None = None,
    dataset_state: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    epoch: int = 0,
) -> CheckpointState:
    """The state of training now, of the model inside DDP or `torch.compile`. Tensors are shared until it is saved."""
    rank = distributed.get_rank() if _is_distributed() else 0
    return CheckpointState(
        step=step,
        epoch=epoch,
        model_state_dict=_unwrap(model).state_dict(),
        optimizer_state_dict=optimizer.state_dict() if optimizer is not None else {},
        lr_scheduler_state_dict=lr_scheduler.state_dict() if lr_scheduler is not None else {},
        dataset_state=dict(dataset_state or {}),
        rng_states={str(rank): rng.capture()},
        metrics=dict(metrics or {}),
        world_size=distributed.get_world_size() if _is_distributed() else 1,
    )


def load_checkpoint_to_model(
    state: CheckpointState,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any | None = None,
    strict: bool = True,
) -> None:
    """Put a state back. With `strict=False`, what does not fit is left as it is: parameters the model does not have or
    the state has not, and an optimizer whose groups have changed."""
    _unwrap(model).load_state_dict(state.model_state_dict, strict=strict)
    if optimizer is not None and state.optimizer_state_dict:
        try:
            optimizer.load_state_dict(state.optimizer_state_dict)
        except (ValueError, KeyError) as error:
            if strict and isinstance(error, KeyError):
                raise CheckpointValidationError.missing_state(
                    "the optimizer", str(error.args[0]), found=state.optimizer_state_dict
                ) from error
            if strict:
                raise
            log.warning("the optimizer starts afresh, its state does not fit: %s", error)
    if lr_scheduler is not None and state.lr_scheduler_state_dict:
        lr_scheduler.load_state_dict(state.lr_scheduler_state_dict)
    _restore_generators(state.rng_states)


def _restore_generators(states: Mapping[str, Any]) -> None:
    """Of this rank; files of older versions have one set for all, with some of it missing."""
    if isinstance(states.get("torch"), torch.Tensor):
        torch.set_rng_state(states["torch"])
        if states.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])
        return
    rng.restore(states, distributed.get_rank() if _is_distributed() else 0)


def _unwrap(model: Any) -> torch.nn.Module:
    """Also of wrappers that are no modules themselves."""
    if not isinstance(model, torch.nn.Module) and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return unwrap(model)


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


# Saves under way, and how managers and backends end --------------------------------------------------------------


class Pending:
    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()

    def add(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.append(future)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until those started so far have ended, well or not; whether they have, in time."""
        with self._lock:
            futures = list(self._futures)
        return not wait(futures, timeout_s).not_done

    def take_failures(self) -> list[BaseException]:
        """What those that have ended failed of; each is told once."""
        with self._lock:
            ended = [future for future in self._futures if future.done()]
            self._futures = [future for future in self._futures if not future.done()]
        return [error for future in ended if (error := future.exception()) is not None]


class Closing:
    _end: Callable[[], object]
    """Does its work once."""

    def close(self) -> None:
        """Finish the saves under way, and give memory back. What is not closed does so when it ends."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_engine(engine: Engine) -> None:
    """After a crash of the program, its snapshots in memory stay for its next life."""
    try:
        engine.close(keep_memory=getattr(sys, "last_value", None) is not None)
    except StrataError as error:
        log.warning("%s", error)


# Files in one place ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointLoadConfig:
    safe_mode: bool = True
    """Load without running any code in the file. Only `trusted_source` changes that."""
    validate_structure: bool = True
    """Refuse what lacks the keys of a checkpoint."""
    warn_on_unsafe: bool = True
    """Warn when a trusted source is loaded with everything in it."""
    trusted_source: bool = False
    """The file is your own: whatever it holds may run while it is loaded."""


@dataclass(frozen=True, slots=True)
class S3Config:
    """A bucket and how to reach it, for `S3Backend`."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint_url: str | None = None
    connect_timeout: float = 5.0
    """Seconds."""
    read_timeout: float = 60.0
    """Seconds for one request."""
    max_retries: int = 6


_OTHER_NAMES = {
    "connect_timeout": "connect_timeout_s",
    "read_timeout": "request_timeout_s",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
"""What boto3 calls the store's options."""


class StorageBackend(Closing, abc.ABC):
    """What both backends share. `path` is a name in the place, or the full path or URL of it."""

    tier: str

    def __init__(self, open_place: Callable[[], Store], pending: Pending | None = None) -> None:
        self._open_place = open_place
        self._opened: Store | None = None
        self._pending = pending or Pending()
        self._plan: Plan | None = None
        self._staging = Staging(f"{os.getpid()}-{uuid.uuid4().hex}", images=1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=f"{self.tier.lower()}-save")
        self._end = weakref.finalize(self, _release, self._staging, self._threads)

    @property
    def store(self) -> Store:
        """The engine's store underneath."""
        if self._opened is None:
            self._opened = self._open_place()
        return self._opened

    def save(self, state: CheckpointState, path: str | os.PathLike[str] | None = None) -> str:
        """Write a checkpoint and wait until it is durable; where it is. Raises `CheckpointSaveError`."""
        return self.save_async(state, path).result()

    def save_async(self, state: CheckpointState, path: str | os.PathLike[str] | None = None) -> Future[str]:
        """Copy the state now, write it in the background."""
        name = os.fspath(path) if path is not None else step_stem(state.step, new_id(state.step)) + SUFFIX
        with saving(tier=self.tier, path=name):
            store, key = self._locate(name)
            at = where(store, key)
            prepared = prepare(state.to_dict(), self._plan)
            self._plan = prepared.plan
            buffer = self._staging.acquire(prepared.plan, timeout_s=None)
            assert buffer is not None
            payload = ImagePayload(self._staging, buffer)
            payload.fill(prepared)
        future = self._threads.submit(self._write, store, key, at, payload, state.step, state.epoch)
        self._pending.add(future)
        return future

    def load(
        self, path: str | os.PathLike[str], config: CheckpointLoadConfig | None = None
    ) -> CheckpointState:
        """Read a checkpoint, verified. Raises `CheckpointLoadError` or `CheckpointValidationError`."""
        config = config or CheckpointLoadConfig()
        name = os.fspath(path)
        if not config.safe_mode and not config.trusted_source:
            log.warning("safe_mode=False alone changes nothing: loading %s runs no code in it", name)
        self._pending.settle()
        with loading(path=name):
            store, key = self._locate(name)
            loaded = read(store, key, trusted_source=config.trusted_source, warn=config.warn_on_unsafe)
        return checked_state(loaded, path=name, validate_structure=config.validate_structure)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        self._pending.settle()
        with loading(path=os.fspath(path)):
            store, key = self._locate(path)
            return store.stat(key) is not None

    def has(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path means this place; an absolute one may mean another."""
        return self._locate(path)[0] is self.store

    def manifest_of(self, path: str | os.PathLike[str]) -> Manifest | None:
        """The manifest of a checkpoint, None for a file that has none."""
        with loading(path=os.fspath(path)):
            return _manifest(*self._locate(path))

    def list_checkpoints(self, prefix: str = "") -> list[str]:
        """The names of all checkpoint files that start so, in alphabetical order."""
        self._pending.settle()
        with loading(path=prefix):
            return [blob.key for blob in self.store.list(prefix) if blob.key.endswith(SUFFIX)]

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; one that is not there is removed already."""
        self._pending.settle()
        with loading(path=os.fspath(path)):
            store, key = self._locate(path)
            store.delete(
                _manifest_of(key)
            )  # First, so that half a checkpoint is never taken for an intact one.
            store.delete(key)

    def get_latest_checkpoint(self) -> str | None:
        """The name of the newest one."""
        return next(iter(self._newest_first()), None)

    def cleanup_old_checkpoints(self, keep_last: int = 3) -> list[str]:
        """Remove all but the newest; the names of those removed. What is visibly broken does not count as kept."""
        if keep_last < 1:
            raise InvalidCheckpointConfig(f"keep_last ({keep_last}) must be positive", section=None)
        removed = []
        kept = 0
        for name in self._newest_first():
            if kept >= keep_last:
                self.delete(name)
                removed.append(name)
            elif self._looks_whole(name):
                kept += 1
        return removed

    def _newest_first(self) -> list[str]:
        """By the time they were saved, as far as their manifests tell, else as far as the place does."""
        self._pending.settle()
        with loading(path=""):
            saved_ms = {
                blob.key: int(blob.modified_s * 1000)
                for blob in self.store.list()
                if blob.key.endswith(SUFFIX)
            }
            for entry in Catalog(self.store).list().entries:
                for part in entry.manifest.parts:
                    if part.key in saved_ms:
                        saved_ms[part.key] = entry.manifest.sequence
        return sorted(saved_ms, key=lambda name: (saved_ms[name], name), reverse=True)

    def _looks_whole(self, name: str) -> bool:
        """A manifest that can be read and a file of the length it says; files without one are taken as they are."""
        try:
            manifest = _manifest(self.store, name)
            blob = self.store.stat(name)
        except StrataError:
            return False
        return blob is not None and (manifest is None or manifest.parts[0].size_bytes == blob.size_bytes)

    @abc.abstractmethod
    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        """The store and key that a path means."""

    def _write(self, store: Store, key: str, at: str, payload: ImagePayload, step: int, epoch: int) -> str:
        try:
            payload.wait()
            part = Part(key=key, size_bytes=len(payload.view), digest=digest_of(payload.view))
            draft = Manifest(
                checkpoint_id=new_id(step),
                step=step,
                epoch=epoch,
                created_at=time.time(),
                format=IMAGE,
                parts=(part,),
                tensors=payload.tensors,
            )
            _put(store, key, payload.view, replace(draft, sequence=int(draft.created_at * 1000)))
        except Exception as error:
            raise save_error(error, tier=self.tier, path=at) from error
        finally:
            payload.release()
        return at


class NVMeBackend(StorageBackend):
    """A folder on a local disk. Saves are always atomic and flushed; `use_atomic_save` is there for older callers."""

    tier = "NVME"

    def __init__(
        self,
        base_path: str | os.PathLike[str],
        use_atomic_save: bool = True,
        *,
        pending: Pending | None = None,
    ) -> None:
        self.base_path = Path(base_path)
        self.use_atomic_save = use_atomic_save
        super().__init__(lambda: open_store(os.path.abspath(base_path)), pending)

    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        name = os.fspath(path)
        if not os.path.isabs(name):
            return self.store, name
        base = os.path.abspath(self.base_path)
        inside = os.path.relpath(name, base)
        if inside.startswith(".."):
            return open_store(os.path.dirname(name)), os.path.basename(name)
        return self.store, inside


class S3Backend(StorageBackend):
    """A bucket, or a folder in one; any server that speaks S3. Opened on first use."""

    tier = "S3"

    def __init__(
        self,
        bucket: str | S3Config,
        prefix: str = "",
        region: str | None = None,
        *,
        pending: Pending | None = None,
        **options: Any,
    ) -> None:
        """`options` go to the store: `endpoint`, `access_key_id`, `secret_access_key`, `max_retries`, `connect_timeout`
        and `read_timeout` in seconds … An `S3Config` in place of the bucket says all of it."""
        if isinstance(bucket, S3Config):
            given = asdict(bucket)
            bucket, prefix, region = given.pop("bucket"), given.pop("prefix"), given.pop("region")
            options = {**{name: value for name, value in given.items() if value is not None}, **options}
        options = {_OTHER_NAMES.get(name, name): value for name, value in options.items()}
        if not bucket:
            raise InvalidCheckpointConfig("the bucket has no name", section=None)
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.region = region
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")
        settings = {**options, **({"region": region} if region else {})}
        super().__init__(lambda: open_store(self.url, **settings), pending)

    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        name = os.fspath(path)
        if "://" not in name:
            return self.store, name
        if not name.startswith(f"{self.url}/"):
            raise StoreError(
                f"'{name}' is not in {self.url}.", tier=self.tier, key=name, reason=f"it is not in {self.url}"
            )
        return self.store, name.removeprefix(f"{self.url}/")


def read(
    store: Store, key: str, *, trusted_source: bool = False, warn: bool = True, is_named: bool = True
) -> Any:
    """What a checkpoint file holds, verified by its manifest, or by its own checksums where it has none. Without
    `is_named`, nobody has asked for just this file: then one that has lost its manifest is refused."""
    manifest = _manifest(store, key)
    if manifest is None:
        return load_plain(store, key, trusted_source=trusted_source, warn=warn, refuse_images=not is_named)
    if manifest.format != IMAGE:
        raise LoadFailed(f"it holds {manifest.format}, not a state.")
    with fetched(store, manifest.parts[0], manifest) as held:
        name = where(store, key)
        return open_image(held.path, manifest, trusted_source=trusted_source, warn=warn, name=name)


def _manifest(store: Store, key: str) -> Manifest | None:
    """The manifest beside a file. Raises `Damaged` where it cannot be read, or is another file's."""
    beside = _manifest_of(key)
    if store.stat(beside) is None:
        return None
    manifest = Catalog(store).read(beside)
    if not manifest.parts or manifest.parts[0].key != key:
        raise Damaged(path=where(store, beside), reason=f"it is not the manifest of {key}")
    return manifest


def _put(store: Store, key: str, image: memoryview, manifest: Manifest) -> None:
    """Write a file and its manifest. A manifest never stands beside bytes it does not fit, so that of a file which is
    replaced goes first; where the new one cannot be written it comes back, as does its file."""
    beside = _manifest_of(key)
    before = store.read(beside) if store.stat(beside) is not None else None
    store.delete(beside)
    try:
        store.put(key, image)
    except BaseException:
        if before is not None:
            store.put(beside, before)
        raise
    store.put(beside, manifest.encode())


def _manifest_of(key: str) -> str:
    return manifest_key(key.removesuffix(SUFFIX))


def _release(staging: Staging, threads: ThreadPoolExecutor) -> None:
    with contextlib.suppress(RuntimeError):  # Collected on its own thread: that one is ending anyway.
        threads.shutdown()
    staging.close()


_MOST_REMEMBERED = 1000


def opened(backend: StorageBackend) -> Store:
    """A backend's store. One that cannot be opened, for want of credentials say, fails when it is used: whether that
    matters is for the policy to say."""
    try:
        return backend.store
    except StoreError as error:
        return UnopenedStore(error, url=getattr(backend, "url", ""))


class UnopenedStore:
    """Answers everything with the reason why it could not be opened."""

    def __init__(self, error: StoreError, *, url: str) -> None:
        self._error = error
        self.tier = error.tier
        self.url = url

    def _refuse(self) -> NoReturn:
        raise self._error

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse()

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> BlobWriter:
        self._refuse()

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._refuse()

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        self._refuse()

    def stat(self, key: str) -> Blob | None:
        self._refuse()

    def list(self, prefix: str = "") -> Iterator[Blob]:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def free_bytes(self) -> int | None:
        return None


class StepNames:
    """`checkpoint_step_00000500`, and with the checkpoint's id behind it where that name is taken already: a step that
    is trained again after going back. Decided when a save begins, so that its path is known then."""

    def __init__(self) -> None:
        self.store: Store | None = None
        """Where the save that begins next goes, if asking there is quick."""
        self._chosen: dict[CheckpointId, str] = {}
        self._lock = threading.Lock()

    def __call__(self, step: int, checkpoint_id: CheckpointId) -> str:
        with self._lock:
            if checkpoint_id not in self._chosen:
                self._chosen[checkpoint_id] = self._choose(step, checkpoint_id)
                if len(self._chosen) > _MOST_REMEMBERED:
                    del self._chosen[next(iter(self._chosen))]
            return self._chosen[checkpoint_id]

    def key_of(self, checkpoint_id: CheckpointId) -> str:
        return self._chosen[checkpoint_id] + SUFFIX

    def _choose(self, step: int, checkpoint_id: CheckpointId) -> str:
        plain = step_stem(step, checkpoint_id)
        if self.store is None:
            return plain
        try:
            if self.store.stat(plain + SUFFIX) is None:
                return plain
        except StoreError:
            return plain  # The save will say what is wrong.
        return f"{plain}-{checkpoint_id}"


# Snapshots in memory ---------------------------------------------------------------------------------------------

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
        self._engine = Engine([], memory=memory)
        self._end = weakref.finalize(self, close_engine, self._engine)

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


# All tiers -------------------------------------------------------------------------------------------------------

_STEP = re.compile(r"checkpoint_step_(\d{8,})\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    step: int
    tier: CheckpointTier
    checkpoint_id: str = ""
    """Of the engine's checkpoints."""
    key: str = ""
    """Of a file without a manifest, in its tier's store."""
    saved_at: float = 0.0

    def __str__(self) -> str:
        return f"step {self.step} in {self.tier.name}" + (f" ('{self.key}')" if self.key else "")


def in_order(
    infos: Sequence[CheckpointInfo], files: Iterable[Candidate], tiers: Sequence[CheckpointTier]
) -> list[Candidate]:
    """`infos` as the engine would fall back to them."""
    left = sorted(files, key=lambda file: file.step)
    ordered: list[Candidate] = []
    for _, same_step in itertools.groupby(infos, key=lambda info: info.step):
        copies = [
            Candidate(step=info.step, tier=tier, checkpoint_id=info.checkpoint_id, saved_at=info.created_at)
            for info in same_step
            for tier in tiers
            if tier.name in info.tiers
        ]
        while left and left[-1].saved_at > max(copy.saved_at for copy in copies):
            ordered.append(left.pop())
        ordered += sorted(copies, key=lambda copy: TIERS.index(copy.tier))
    return ordered + left[::-1]


def files_in(store: Store, tier: CheckpointTier) -> list[Candidate]:
    """The checkpoint files of older programs; none where the store cannot be listed."""
    try:
        blobs = plain_files(store)
    except StoreError as error:
        log.warning("skipped while looking for a checkpoint: %s", error)
        return []
    return [
        Candidate(step=int(named[1]), tier=tier, key=blob.key, saved_at=blob.modified_s)
        for blob in blobs
        if (named := _STEP.fullmatch(blob.key))
    ]


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
        """The newest intact checkpoint, None where there is none; or the one at `path`. `tier` says where to begin: NVME
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
                log.warning("could not load %s", reason)
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
        log.warning("%s Training continues without this checkpoint.", error.message)

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
