"""Checkpoints as files in one place: a local disk, or a bucket.

A file is the engine's image, with its manifest beside it: a `.pt` that any PyTorch opens, and whose every byte is
verified when it is loaded here. Files of plain `torch.save` load too, checked by the checksums in them. No code in a
file runs unless its source is trusted. Saving under a name that is taken replaces it; a file is there whole or not.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic_harness.checkpoint.closing import Closing
from elastic_harness.checkpoint.config import InvalidCheckpointConfig
from elastic_harness.checkpoint.pending import Pending
from elastic_harness.checkpoint.state import CheckpointState, checked_state
from strata.checkpoint.catalog.listing import Catalog, where
from strata.checkpoint.catalog.manifest import IMAGE, Manifest, Part
from strata.checkpoint.catalog.naming import manifest_key, new_id, step_stem
from strata.checkpoint.copying.digest import digest_of
from strata.checkpoint.copying.staging import ImagePayload, Staging
from strata.checkpoint.errors import Damaged, LoadFailed
from strata.checkpoint.image.layout import Plan, prepare
from strata.checkpoint.image.plain import SUFFIX, load_plain
from strata.checkpoint.image.reading import fetched, open_image
from strata.errors import StrataError
from strata.stores import open_store
from strata.stores.protocol import Store, StoreError
from strata.trainer.error_translation import loading, save_error, saving

log = logging.getLogger("elastic_harness.checkpoint")


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
            )  # First, so that half a checkpoint is never taken for a whole one.
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
