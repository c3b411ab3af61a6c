"""Turning what the operating system says into the errors of this package."""

from __future__ import annotations

import errno
import os

from strata.stores.protocol import (
    AccessDenied,
    AlreadyExists,
    DeviceError,
    InvalidKey,
    NoSpace,
    NotFound,
    StoreError,
    Unavailable,
)

_KINDS: dict[int, type[StoreError]] = {
    errno.ENOSPC: NoSpace,
    errno.EDQUOT: NoSpace,
    errno.EFBIG: NoSpace,
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.EIO: DeviceError,
    errno.ENXIO: DeviceError,
    errno.ENODEV: DeviceError,
    errno.EREMOTEIO: DeviceError,
    errno.EUCLEAN: DeviceError,
    errno.ESTALE: Unavailable,
    errno.ETIMEDOUT: Unavailable,
    errno.ENOTCONN: Unavailable,
    errno.EMFILE: Unavailable,
    errno.ENFILE: Unavailable,
    errno.ENOTDIR: InvalidKey,
    errno.EISDIR: InvalidKey,
    errno.ENAMETOOLONG: InvalidKey,
}

_HINTS: dict[type[StoreError], str] = {
    NoSpace: "Free some space (df -h shows how much), or keep fewer checkpoints.",
    AccessDenied: "Check the owner and permissions of the directory (ls -la) and that it is not mounted read-only.",
    DeviceError: "The device is failing: check dmesg, and write to another one.",
    Unavailable: "Check the mount and the limit on open files (ulimit -n), then try again.",
    InvalidKey: "A value and a folder cannot share one name: choose another key.",
}


def store_error(error: OSError, *, tier: str, key: str, doing: str) -> StoreError:
    """`doing` completes "Could not …": "write 'a/b' to /nvme"."""
    kind = _KINDS.get(error.errno or 0, StoreError)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return kind(f"Could not {doing}: {reason}.", tier=tier, key=key, hint=_HINTS.get(kind, ""), reason=reason)
