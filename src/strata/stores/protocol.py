"""One small protocol for keeping named blobs, whatever keeps them.

Every store promises the same four things, and `tests/stores/conformance.py` holds each of them to it:

* **Atomic.** A key is absent or holds one complete value; a reader never sees half a write, also after a crash.
* **Durable.** When `put` or `BlobWriter.commit` returns, the value survives whatever the tier is meant to
  survive (the process for memory, the machine for local disk, the region for object storage).
* **Exclusive when asked.** With `if_absent=True` exactly one of many racing writers succeeds; the others get
  `AlreadyExists`. This is how a manifest is published.
* **Typed.** Failures are `StoreError`s that name the tier, the key, the cause and what to do next.

Keys are relative POSIX paths (`ckpt-00000012/payload.pt`), without `..` or a leading slash. Stores know nothing
of checkpoints. Methods block; callers that must not block run them on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from strata.errors import StrataError

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """What a store knows about one key."""

    key: str
    size_bytes: int
    modified_s: float
    version: str = ""
    """Differs where the value was replaced; empty where the store has no such mark."""


class BlobWriter(Protocol):
    """A value being written front to back. Nothing is visible before `commit`; leaving the `with` block
    without one aborts and removes every trace."""

    def write(self, chunk: Buffer) -> None:
        """Add bytes. Their memory is the caller's again when it returns."""
        ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def __enter__(self) -> BlobWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A place for blobs. `tier` names it in errors and manifests: MEMORY, NVME, S3, GCS, AZURE."""

    @property
    def tier(self) -> str: ...

    @property
    def url(self) -> str: ...

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a whole value. Large page-aligned buffers take the fastest path the store has."""
        ...

    def open_write(
        self, key: str, *, size_hint_bytes: int | None = None, if_absent: bool = False
    ) -> BlobWriter:
        """Stream a value of unknown or large size."""
        ...

    def read(self, key: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of `key`, or a range of them. Raises `NotFound`; a short value raises `Truncated`."""
        ...

    def read_into(self, key: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill `buffer` from `offset`, in parallel where that is faster. Raises like `read`."""
        ...

    def stat(self, key: str) -> Blob | None: ...

    def list(self, prefix: str = "") -> Iterator[Blob]:
        """Every complete value whose key starts with `prefix`, in key order. Temporary files are not values."""
        ...

    def delete(self, key: str) -> None:
        """Remove `key`; succeeds if it does not exist."""
        ...

    def free_bytes(self) -> int | None:
        """Free space, or None if that is undefined (object storage)."""
        ...


TakePart: TypeAlias = Callable[[int, memoryview], None]
"""Called with an offset and the bytes from there, which are there during the call only."""


@runtime_checkable
class PartReader(Protocol):
    """A store that can hand a value out in parts, for callers that need not have all of it in memory at once."""

    def read_parts(self, key: str, take: TakePart, *, size_bytes: int, part_bytes: int) -> None:
        """Give the whole value to `take`, in parts of `part_bytes`, from several threads and in any order. Raises like
        `read`, `Truncated` also where the value is longer than `size_bytes`; and what `take` raises."""
        ...


@runtime_checkable
class VersionReader(Protocol):
    """A store that can read one version of a value, and no other."""

    def read_version(self, key: str, version: str, *, offset: int, length: int) -> memoryview:
        """A range of the value that `Blob.version` named. Raises `Replaced` where there is another now, `NotFound` where there is
        none."""
        ...


StorageBackend = Store
"""The name users know the protocol by."""


class StoreError(StrataError):
    """An operation of a store failed. `reason` is the cause alone ("No space left on device"), for callers
    who phrase the message themselves."""

    code: ClassVar[str] = "store_error"

    def __init__(self, message: str, *, tier: str, key: str, hint: str = "", reason: str = "") -> None:
        super().__init__(f"[{tier}] {message}", hint=hint)
        self.tier = tier
        self.key = key
        self.reason = reason or message


class InvalidKey(StoreError, ValueError):
    """No store can hold a value under this name."""

    code = "invalid_key"


class NotFound(StoreError):
    code = "not_found"


class AlreadyExists(StoreError):
    code = "already_exists"


class Truncated(StoreError):
    """The value is shorter than the requested range."""

    code = "truncated"


class Replaced(StoreError):
    """The value was replaced since it was first read."""

    code = "replaced"


class NoSpace(StoreError):
    """The value does not fit: the device is full, or the store's own byte limit is reached."""

    code = "no_space"

    def __init__(
        self,
        message: str,
        *,
        tier: str,
        key: str,
        hint: str = "",
        reason: str = "",
        required_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(message, tier=tier, key=key, hint=hint, reason=reason)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class DeviceError(StoreError):
    """The device failed to read, write or flush. The state of the bytes is unknown, so they count as lost."""

    code = "device_error"


class AccessDenied(StoreError):
    """The store refused access: credentials or permissions."""

    code = "access_denied"


class NoCredentials(AccessDenied):
    """There are no credentials to sign a request with."""

    code = "no_credentials"


class Misconfigured(StoreError):
    """The configuration does not lead to a store: no such bucket, another region, a wrong endpoint."""

    code = "store_misconfigured"


class Unavailable(StoreError):
    """The store did not answer, or was overloaded, for longer than the retry budget."""

    code = "unavailable"
