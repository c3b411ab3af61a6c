"""Checkpoints as files on a disk or in a bucket, by name.

Saving again under a name replaces what it had, and `strata.checkpoint` does the work: each file has its manifest beside it, is
there entirely or not at all, and is verified when it is loaded. Files of plain `torch.save` load too.
"""

from __future__ import annotations

import abc
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic_harness.checkpoint.common import Closing, InvalidCheckpointConfig, Pending, close_engines
from elastic_harness.checkpoint.state import CheckpointState, checked_state
from strata.checkpoint.catalog.manifest import CheckpointId
from strata.checkpoint.catalog.naming import step_stem
from strata.checkpoint.catalog.retention import newest_first, remove_named, remove_older
from strata.checkpoint.events import CheckpointInfo
from strata.checkpoint.image.plain import SUFFIX
from strata.checkpoint.manager import CheckpointManager as Engine
from strata.checkpoint.manager import Memory
from strata.checkpoint.pipeline import Policy
from strata.stores import open_store
from strata.stores.protocol import Store, StoreError
from strata.stores.urls import StoreOption
from strata.trainer.error_translation import loading, save_error, saving
from strata.trainer.validation import NOT_NEGATIVE_INT, POSITIVE, POSITIVE_INT, key_problem, nearest
from strata.validation import Schema, violations

log = logging.getLogger("elastic_harness.checkpoint")

__all__ = ["CheckpointLoadConfig", "NVMeBackend", "S3Backend", "S3Config", "StorageBackend"]


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
    """A bucket and how to reach it, for `S3Backend`. The defaults are those of earlier versions."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    connect_timeout: float = 10.0
    """Seconds."""
    read_timeout: float = 60.0
    """Seconds for one request."""
    max_retries: int = 3
    retry_mode: str = "adaptive"
    """`standard`, `adaptive` or `legacy`, for older callers: pauses between attempts grow in each of them."""
    endpoint_url: str | None = None


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

_LIMITS: dict[str, Schema] = {
    "connect_timeout_s": POSITIVE,
    "request_timeout_s": POSITIVE,
    "retry_budget_s": POSITIVE,
    "max_retries": NOT_NEGATIVE_INT,
    "part_bytes": POSITIVE_INT,
    "max_concurrency": POSITIVE_INT,
    "retry_mode": {"type": "string", "enum": ["standard", "adaptive", "legacy"]},
}
_OPTIONS = frozenset([
    "access_key_id", "allow_http", "checksum_algorithm", "conditional_put", "container_authorization_token_file",
    "container_credentials_full_uri", "container_credentials_relative_uri", "copy_if_not_exists", "default_region",
    "disable_bulk_delete", "disable_tagging", "endpoint", "metadata_endpoint", "region", "request_payer", "role_arn",
    "role_session_name", "secret_access_key", "server_side_encryption", "session_token", "skip_signature",
    "sse_bucket_key_enabled", "sse_customer_key_base64", "sse_kms_key_id", "sts_endpoint", "unsigned_payload",
    "virtual_hosted_style_request", "web_identity_token_file", *_LIMITS,
])  # fmt: skip
"""What the store and its client know."""


def _checked(options: Mapping[str, StoreOption]) -> dict[str, StoreOption]:
    """The options by the store's names. Raises `InvalidCheckpointConfig` for the first that cannot be."""
    known = sorted({*_OPTIONS, *_OTHER_NAMES})
    for name, value in options.items():
        ours = _OTHER_NAMES.get(name, name)
        if ours not in _OPTIONS:
            raise InvalidCheckpointConfig(f"unknown S3 option '{name}'{nearest(name, known)}", section=None)
        for violation in violations(_LIMITS.get(ours, {}), value):
            raise InvalidCheckpointConfig(key_problem("", name, violation), section=None)
    return {_OTHER_NAMES.get(name, name): value for name, value in options.items() if name != "retry_mode"}


def file_name(step: int) -> str:
    return step_stem(step, CheckpointId("")) + SUFFIX


class StorageBackend(Closing, abc.ABC):
    """Base of both backends. `path` is a name within the backend, or a full path or URL."""

    tier: str

    def __init__(self, url: str, pending: Pending | None = None, **options: StoreOption) -> None:
        self.url = url
        self._options = options
        self._opened: Store | None = None
        self._pending = pending or Pending()
        self._lock = threading.Lock()
        self._engines: dict[str, Engine] = {}
        """One for each place that paths have meant, by its URL."""
        self._end = weakref.finalize(self, close_engines, self._engines, keep_memory=False)

    @property
    def store(self) -> Store:
        """The engine's store underneath, opened on first use."""
        if self._opened is None:
            self._opened = open_store(self.url, **self._options)
        return self._opened

    def save(self, state: CheckpointState, path: str | os.PathLike[str] | None = None) -> str:
        """Write a checkpoint and wait until it is durable; where it is. Raises `CheckpointSaveError`."""
        return self.save_async(state, path).result()

    def save_async(self, state: CheckpointState, path: str | os.PathLike[str] | None = None) -> Future[str]:
        """Copy the state now, write it in the background. What has this name is replaced."""
        name = os.fspath(path) if path is not None else file_name(state.step)
        with saving(tier=self.tier, path=name):
            store, key = self._locate(name)
            handle = self._engine(store).save(state.to_dict(), state.step, state.epoch, name=key)
        saved: Future[str] = Future()

        def end(ended: Future[CheckpointInfo]) -> None:
            error = ended.exception()
            if error is not None:
                saved.set_exception(save_error(error, tier=self.tier, path=handle.path))
            else:
                saved.set_result(handle.path)

        self._pending.add(saved)
        handle.future.add_done_callback(end)
        return saved

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
            loaded = self._engine(store).load(
                name=key, trusted_source=config.trusted_source, warn=config.warn_on_unsafe
            )
        return checked_state(loaded, path=name, validate_structure=config.validate_structure)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        self._pending.settle()
        with loading(path=os.fspath(path)):
            store, key = self._locate(path)
            return store.stat(key) is not None

    def key_of(self, path: str | os.PathLike[str]) -> str | None:
        """What a path is called in this place; None where an absolute one means another."""
        store, key = self._locate(path)
        return key if store is self.store else None

    def list_checkpoints(self, prefix: str = "") -> list[str]:
        """The names of all checkpoint files that start so, in alphabetical order."""
        self._pending.settle()
        with loading(path=prefix):
            return [blob.key for blob in self.store.list(prefix) if blob.key.endswith(SUFFIX)]

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; one that is not there is removed already."""
        self._pending.settle()
        with loading(path=os.fspath(path)):
            remove_named(*self._locate(path))

    def get_latest_checkpoint(self) -> str | None:
        """The name of the newest one."""
        self._pending.settle()
        with loading(path=""):
            return next(iter(newest_first(self.store)), None)

    def cleanup_old_checkpoints(self, keep_last: int = 3) -> list[str]:
        """Remove all but the newest; the names of those removed. What is visibly broken does not count as kept."""
        if keep_last < 1:
            raise InvalidCheckpointConfig(f"keep_last ({keep_last}) must be positive", section=None)
        self._pending.settle()
        with loading(path=""):
            return remove_older(self.store, keep_count=keep_last)

    def _engine(self, store: Store) -> Engine:
        with self._lock:
            if store.url not in self._engines:
                memory = Memory(job=f"{os.getpid()}-{uuid.uuid4().hex}", images=1)
                self._engines[store.url] = Engine([store], memory=memory, policy=Policy(on_error="warn"))
            return self._engines[store.url]

    @abc.abstractmethod
    def could_mean(self, path: str) -> bool:
        """Whether a path looks like one of here."""

    @abc.abstractmethod
    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        """The store and key that a path means."""


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
        super().__init__(os.path.abspath(base_path), pending)

    def could_mean(self, path: str) -> bool:
        return "://" not in path

    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        name = os.fspath(path)
        if not os.path.isabs(name):
            return self.store, name
        inside = os.path.relpath(name, self.url)
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
        connect_timeout: float | None = None,
        read_timeout: float | None = None,
        max_retries: int | None = None,
        retry_mode: str | None = None,
        *,
        pending: Pending | None = None,
        **options: StoreOption,
    ) -> None:
        """Timeouts are in seconds; `options` go to the store: `endpoint`, `access_key_id`, `secret_access_key` … An `S3Config`
        in place of the bucket says all of it."""
        named = {
            "connect_timeout": connect_timeout,
            "read_timeout": read_timeout,
            "max_retries": max_retries,
            "retry_mode": retry_mode,
        }
        if isinstance(bucket, S3Config):
            given = asdict(bucket)
            bucket, prefix, region = given.pop("bucket"), given.pop("prefix"), given.pop("region")
            named = {**given, **{name: value for name, value in named.items() if value is not None}}
        options = _checked({**{name: value for name, value in named.items() if value is not None}, **options})
        if not bucket:
            raise InvalidCheckpointConfig("the bucket has no name", section=None)
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.region = region
        settings = {**options, **({"region": region} if region else {})}
        super().__init__(f"s3://{bucket}/{self.prefix}".rstrip("/"), pending, **settings)

    @classmethod
    def from_config(cls, config: S3Config) -> S3Backend:
        return cls(config)

    def could_mean(self, path: str) -> bool:
        return not os.path.isabs(path)

    def _locate(self, path: str | os.PathLike[str]) -> tuple[Store, str]:
        name = os.fspath(path)
        if "://" not in name:
            return self.store, name
        if not name.startswith(f"{self.url}/"):
            raise StoreError(
                f"'{name}' is not in {self.url}.", tier=self.tier, key=name, reason=f"it is not in {self.url}"
            )
        return self.store, name.removeprefix(f"{self.url}/")
