"""Places to keep named blobs: shared memory, local disk, object storage, behind one protocol.

    store = open_store("s3://bucket/runs/a")
    store.put("hello", b"world")

`open_store` chooses by URL, `store_from_env` by environment variables. Nothing beyond the standard library and
NumPy is imported until a store needs it.
"""

from __future__ import annotations

from strata.stores.protocol import (
    AccessDenied,
    AlreadyExists,
    Blob,
    BlobWriter,
    DeviceError,
    InvalidKey,
    Misconfigured,
    NoCredentials,
    NoSpace,
    NotFound,
    Replaced,
    StorageBackend,
    Store,
    StoreError,
    Truncated,
    Unavailable,
)
from strata.stores.urls import InvalidStoreURL, open_store, store_from_env

__all__ = [
    "AccessDenied",
    "AlreadyExists",
    "Blob",
    "BlobWriter",
    "DeviceError",
    "InvalidKey",
    "InvalidStoreURL",
    "Misconfigured",
    "NoCredentials",
    "NoSpace",
    "NotFound",
    "Replaced",
    "StorageBackend",
    "Store",
    "StoreError",
    "Truncated",
    "Unavailable",
    "open_store",
    "store_from_env",
]
